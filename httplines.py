"""What became of a call to the engine child: failures, the state of a running request or save, and the sums of all.

Owns the exceptions of the front's side of the pipe. Refuses to know processes, turns and HTTP. Invariant: a line that
is not as ``verbs.py`` has it means that the child left the protocol.

Read next: ``httpchild.py``, which hears these lines.
"""

import contextlib
from dataclasses import dataclass

from verbs import Event, Moved, Phase, PromptProgress, Resume, Source, Token


class ChildError(Exception):
    """Why a call to the engine child brought no result; ``str()`` is meant for the client."""


class EngineGone(ChildError):
    """The child ended, fell silent, left the protocol or could not be started; what it held is lost."""


class EngineRefused(ChildError):
    """The child answered ``ERR``: the request was not carried out and nothing changed."""


class RequestFailed(ChildError):
    """The child answered ``ERR`` in the middle of a request: nothing is held any more, and the child goes on."""


class GivenUp(ChildError):
    """The caller went before its turn came; nothing was begun."""


class FileGone(ChildError):
    """The file to restore went before the turn came."""


class FileThere(ChildError):
    """There is a file already that the save was not to replace."""


class ModelChanged(ChildError):
    """The request was made for another model file than the one that the child has loaded."""


class NotLoaded(ChildError):
    """The call is not worth loading the model for, and no model is loaded."""


class Ending(ChildError):
    """The server is ending and takes no further request."""


class Busy(ChildError):
    """Another request has the turn."""


class SessionRefused(ChildError):
    """The child answered ``SERR``: the conversation is as before, and the file too unless ``published``."""

    def __init__(self, kind: str, published: bool, reason: str):
        super().__init__(reason)
        self.kind = kind
        self.published = published


@dataclass
class SessionProgress:
    """How far the running save or restore is."""

    action: str
    filename: str
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0

    def note(self, said: Phase | Moved) -> None:
        """Take in what the child said; raises ValueError."""
        if isinstance(said, Phase):
            self.phase = said.phase
        elif said.done_bytes < self.done_bytes:
            raise ValueError("progress that falls")
        else:
            self.done_bytes, self.total_bytes = said


@dataclass
class RequestProgress:
    """How far the latest generation came, and what of its prompt was held already."""

    running: bool = False
    n_prompt: int = 0
    n_read: int = 0
    n_generated: int = 0
    source: str | None = None
    n_reused: int = 0
    diverged_at: int | None = None

    def note(self, event: Event) -> None:
        """Take in what the child said."""
        match event:
            case Resume(n_reused):
                self.n_read = self.n_reused = n_reused
            case PromptProgress(position, n_prompt):
                self.n_read, self.n_prompt = position, n_prompt
            case Source(source, n_tokens, diverged_at):
                self.source, self.n_reused, self.diverged_at = source, n_tokens, diverged_at
            case Token():
                self.n_generated += 1


@dataclass
class Totals:
    """What the child did since the front started; the counters of ``GET /metrics``."""

    n_starts: int = 0
    n_prompt_read: int = 0
    prompt_ms: float = 0.0
    n_generated: int = 0
    decode_ms: float = 0.0
    n_cached: int = 0
    n_saved: int = 0
    n_restored: int = 0
    n_session_failed: int = 0


@contextlib.contextmanager
def in_step(line: str):
    """Whatever cannot be read in ``line`` means that the child left the protocol."""
    try:
        yield
    except ValueError as error:
        raise out_of_step(line, str(error)) from error


def out_of_step(line: str, why: str = "") -> EngineGone:
    """The failure of a child that left the protocol with ``line``."""
    return EngineGone(f"the engine is out of step: {line[:200]!r}" + (f": {why}" if why else ""))
