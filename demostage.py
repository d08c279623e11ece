"""Where the demo's stories are told: engines as child processes that answer verbs, a console, and the next prompt.

It owns what the stories share; it knows none of them. Invariant: an engine that was started is ended, and one that does
not do its part ends the story with one line. Read next: demo.py and demofiles.py, the stories; verbs.py for the lines.
"""

import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import verbs
from tokenizer import Tokenizer, TokenizerError

ENGINE_COMMAND = (sys.executable, str(pathlib.Path(__file__).with_name("strata.py")), "--serve")
NO_RESERVES = ("--session-min-free-mib", "0", "--conversation-cache-min-free-mib", "0")
WARM_UP_TOKENS = 256  # enough to run, and so to compile, all that a long prompt runs
END_GRACE_S = 30

Told = TypeVar("Told")  # what a story measured
Show = Callable[[int, int], None]  # progress: done, total


class DemoError(Exception):
    """The story cannot be told: the engine or the model does not do its part; one line."""


class Turn(NamedTuple):
    """One answered prompt."""

    ids: list[int]
    n_reused: int
    n_prompt_read: int
    first_token_s: float
    n_drafts_accepted: int
    n_drafts_offered: int
    n_held: int = 0  # tokens of the conversation behind it, where the engine says so
    source: str = ""  # and where the reused tokens were


class Transfer(NamedTuple):
    """One SAVE or RESTORE."""

    n_tokens: int
    size_bytes: int
    seconds: float


class Stage:
    """Where the story is told: how engines are started, where files go, where lines are printed."""

    def __init__(self, command: Sequence[str], folder: str, console: Console):
        self._command = [*command, *NO_RESERVES]
        self.folder = folder
        self._log_path = pathlib.Path(folder, "engine.log")
        self.console = console

    @contextmanager
    def engine(self, title: str, *options: str) -> Iterator["EngineProcess"]:
        """A running engine that is ended behind the block."""
        start = time.perf_counter()
        with open(self._log_path, "wb") as log, EngineProcess([*self._command, *options], log) as engine:
            self.say(f"[bold]{title}[/]: ready after {time.perf_counter() - start:.1f} s")
            yield engine

    def say(self, text: str) -> None:
        self.console.print(text)

    @contextmanager
    def progress(self, title: str) -> Iterator[Show]:
        """A progress bar on a terminal, nothing elsewhere."""
        if not self.console.is_terminal:
            yield lambda done, total: None
            return
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bars:
            task = bars.add_task(title, total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)


def run(tell: Callable[[Tokenizer, Stage], Told], report: Callable[[Told, Console], bool],
        model: str, command: Sequence[str], console: Console | None) -> bool:  # fmt: skip
    """Tell a story with a model file and return whether every promise in it held; raises DemoError."""
    console = console or Console(highlight=False)
    try:
        tokenizer = Tokenizer.load(model)
        with tempfile.TemporaryDirectory(prefix="strata-demo-") as folder:
            told = tell(tokenizer, Stage([*command, "--model", model], folder, console))
    except TokenizerError as error:
        raise DemoError(str(error)) from error
    return report(told, console)


def first_prompt(tokenizer: Tokenizer, text: str, question: str, most: int) -> tuple[list[dict], list[int]]:
    """The first message and its ids, at most so many; the text is cut after a paragraph where that is too few."""
    paragraphs = text.split("\n\n")
    while paragraphs:
        messages = [{"role": "user", "content": "\n\n".join(["Read this text.", *paragraphs, question])}]
        ids = tokenizer.encode_chat(messages)
        if len(ids) <= most:
            return messages, ids
        paragraphs.pop()
    raise DemoError(f"the context is too small for the story: no prompt is as short as {most} tokens")


def next_prompt(
    tokenizer: Tokenizer, messages: list[dict], prompt: list[int], answer: list[int], question: str
) -> list[int]:
    """The ids so far, and the next question behind them.

    The answer's own ids are kept: to encode its text again could give others, and the conversation would not match.
    """
    ended = answer[-1:] if answer[-1] in tokenizer.end_ids else []
    text = tokenizer.decode(answer[: len(answer) - len(ended)])
    turns = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": question}]
    before, whole = tokenizer.render_chat(messages) + text, tokenizer.render_chat(turns)
    if not whole.startswith(before):
        raise DemoError("this model's chat template rewrites earlier answers, so no prompt continues what was held")
    rest = tokenizer.encode(whole[len(before) :], special=True)
    return prompt + answer + (rest[1:] if rest[:1] == ended else rest)


class EngineProcess:
    """A child that runs `strata --serve`: verbs go in, answer lines come out; its log goes to a file."""

    def __init__(self, command: Sequence[str], log):
        self._log, self._killed = log, False
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, encoding="utf-8", bufsize=1
        )
        try:
            self.max_context = next(self._answers(verbs.Ready)).n_ctx
        except BaseException:
            self._end(kill=True)
            raise

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, failure, *_) -> None:
        self._end(kill=failure is not None)

    def generate(self, ids: Sequence[int], max_new: int, show: Show) -> Turn:
        """Send a greedy GEN and read its answer."""
        start, first_token_s, tokens = time.perf_counter(), 0.0, []
        n_held, source = 0, ""
        self._send(verbs.gen_line(max_new, ids, {"source": 1}))
        for said in self._answers(verbs.Done, verbs.Token, verbs.PromptProgress, verbs.Source, verbs.Held):
            match said:
                case verbs.PromptProgress(position, n_prompt):
                    show(position, n_prompt)
                case verbs.Token(token):
                    first_token_s = first_token_s or time.perf_counter() - start
                    tokens.append(token)
                case verbs.Source():
                    source = said.source
                case verbs.Held():
                    n_held = said.n_tokens
        if not tokens:
            raise DemoError("the engine answered without a token")
        drafts = said.n_drafts_accepted, said.n_drafts_offered
        return Turn(tokens, said.n_reused, said.n_prompt_read, first_token_s, *drafts, n_held, source)

    def kill_in(self, ids: Sequence[int], max_new: int, n_tokens: int) -> None:
        """Send a greedy GEN, and SIGKILL once so many tokens of its answer have come."""
        self._send(verbs.gen_line(max_new, ids))
        for _, said in zip(range(n_tokens), self._answers(verbs.Done, verbs.Token), strict=False):
            if isinstance(said, verbs.Done):
                raise DemoError(f"the answer ended before it had {n_tokens} tokens, so nothing could be killed in it")
        self._killed = True
        self._child.kill()

    def transfer(self, verb: str, name: str, show: Show) -> Transfer:
        """SAVE or RESTORE a file of the engine's folder."""
        start = time.perf_counter()
        self._send(f"{verb} {name}")
        for said in self._answers(verbs.TRANSFERS[verb], verbs.Moved):
            if isinstance(said, verbs.Moved):
                show(*said)
        return Transfer(said.n_tokens, said.size_bytes, time.perf_counter() - start)

    def _send(self, line: str) -> None:
        try:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._failure("the engine ended") from None

    def _answers(self, last: type, *wanted: type) -> Iterator:
        """The wanted records up to and with the last one; raises DemoError for a refusal or the end."""
        for line in map(str.strip, self._child.stdout):
            kind = verbs.kind_of(line)
            if kind in (verbs.Refusal, verbs.SessionRefusal, verbs.Fatal):
                raise DemoError(f"the engine answered: {line}")
            try:
                said = verbs.read(line, kind) if kind in (last, *wanted) else None
            except ValueError as error:
                raise DemoError(f"the engine is out of step: {line[:200]!r}: {error}") from error
            if said:
                yield said
            if kind is last:
                return
        raise self._failure("the engine ended")

    def _failure(self, what: str) -> DemoError:
        """An error with the last line of the engine's log."""
        code = self._child.wait()
        lines = pathlib.Path(self._log.name).read_text(errors="replace").splitlines()
        return DemoError(f"{what} with exit code {code}; its log ends: {lines[-1] if lines else '(nothing)'}")

    def _end(self, *, kill: bool) -> None:
        """Close stdin, which ends the engine, and wait for it."""
        if kill:
            self._child.kill()
        try:
            self._child.communicate(timeout=END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
        if not kill and not self._killed and self._child.returncode != 0:
            raise self._failure("the engine ended")
