"""The folder of saved sessions as HTTP clients see it: names that may be used, what lies there, what may be removed.

Owns the rules for file names and the listing; refuses to know sockets, the engine and how a file is laid out (it asks
``sessionfile``). Invariant: nothing outside the folder and nothing but regular session files directly in it is ever
named, read or removed.

Read next: ``httpfront.py``, which answers with this; ``sessionfile.py``, which writes the files.
"""

import contextlib
import os
import stat
import threading
from collections.abc import Callable
from typing import NamedTuple

import unfinished
from options import has_controls
from printable import one_line

MAX_NAME_BYTES = 200
NOT_IN_NAMES = frozenset('/\\:*?"<>|')
# Names that mean a device on Windows, whatever follows the first dot.
DEVICE_NAMES = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$"]
    + [f"{port}{digit}" for port in ("com", "lpt") for digit in "123456789\N{SUPERSCRIPT ONE}²³"]
)
# Conversations that a save at the end finds under the names that it would take, before it gives up.
MAX_NEW_NAMES = 20
# Files named in one listing; the newest come first.
MAX_LISTED = 1000


class NameRefused(Exception):
    """A file name that may not be used; ``str()`` says which rule it breaks."""


class NotThere(Exception):
    """No session file of this name."""


def check_filename(name: object) -> str:
    """The name, if it may be used on every system and cannot leave the folder; raises NameRefused."""
    if not isinstance(name, str) or not name:
        raise NameRefused("filename must be a text that is not empty")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise NameRefused(f"filename is longer than {MAX_NAME_BYTES} bytes of UTF-8")
    if has_controls(name):
        raise NameRefused("filename has a control character")
    if found := NOT_IN_NAMES.intersection(name):
        raise NameRefused(f"filename has the character {min(found)!r}; name a file, not a path")
    if name.startswith("."):
        raise NameRefused("filename starts with a dot")
    if name.endswith((".", " ")):
        raise NameRefused("filename ends with a dot or a blank")
    if name.partition(".")[0].rstrip().lower() in DEVICE_NAMES:
        raise NameRefused("filename is the name of a device")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise NameRefused("filename cannot be written as UTF-8") from None
    return name


def names_at_exit(name: str) -> list[str]:
    """The names that a save at the end may take, in the order in which they are tried."""
    return [name, f"{name}.new", *(f"{name}.new{number}" for number in range(2, MAX_NEW_NAMES + 1))]


class SavedSession(NamedTuple):
    """What a session file says of itself, fingerprints in hex; ``problem`` instead where it cannot be used."""

    n_tokens: int | None = None
    model: str | None = None
    config: str | None = None
    problem: str | None = None


def inspect_file(path: str) -> SavedSession | None:
    """What a session file says of itself, None for a file of another kind or one that has gone."""
    import sessionfile
    import sessionlayout

    try:
        if not _starts_like_session(path):
            return None
        info = sessionfile.inspect_session(path)
    except FileNotFoundError:
        return None
    except (sessionlayout.SessionError, OSError) as error:
        return SavedSession(problem=str(error))
    return SavedSession(info.image.live.n_tokens, f"{info.identity.model:016x}", f"{info.identity.config:016x}")


def sweep(folder: str) -> int:
    """Remove what killed saves left behind in a folder, and return how many files that were."""
    from sessionlayout import START_MARK, starts_like_session

    def is_ours(start: bytes) -> bool:  # or none of its bytes reached the disk
        return starts_like_session(start) or not start.strip(b"\0")

    return unfinished.sweep(folder, is_ours, len(START_MARK))


def list_sessions(folder: str) -> list:
    """A `Peek` for each session file of a folder, by name; a file that cannot be used says why.

    Raises SessionError where the folder cannot be read.
    """
    from sessionlayout import SessionError

    try:
        names = sorted(entry.name for entry in _regular_files(folder))
    except OSError as error:
        raise SessionError("io", "os", f"reading the folder '{folder}': {error.strerror}") from error
    return [found for name in names if (found := _peek(os.path.join(folder, name)))]


def _peek(path: str):
    import sessionfile
    import sessioninfo
    from sessionlayout import SessionError

    try:
        return sessionfile.peek_session(path) if _starts_like_session(path) else None
    except FileNotFoundError:
        return None  # gone since the folder was read
    except OSError as error:
        error = SessionError("io", "os", f"reading the file: {error.strerror}")
        return sessioninfo.Peek(os.path.basename(path), refusal=error)
    except SessionError as error:
        return sessioninfo.Peek(os.path.basename(path), refusal=error)


def _regular_files(folder: str) -> list[os.DirEntry]:
    """Files of a folder that may be saved sessions: hidden ones are unfinished, links lead elsewhere."""
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".") and entry.is_file(follow_symlinks=False)]


class SessionFolder:
    """The files of one folder; what a header says is kept as long as the file does not change.

    The methods block, so call them in a thread.
    """

    def __init__(self, path: str, inspect: Callable[[str], SavedSession | None] = inspect_file):
        self.path = path
        self._inspect = inspect
        self._known: dict[str, tuple[tuple[int, ...], SavedSession | None]] = {}
        self._lock = threading.Lock()

    def path_of(self, name: str) -> str:
        """Where a checked name lies."""
        return os.path.join(self.path, name)

    def holds(self, name: str) -> bool:
        return os.path.lexists(self.path_of(name))

    def listing(self, model: str | None, config: str | None) -> dict:
        """The files, newest first; ``match`` says whether this model and configuration wrote them, None if unknown."""
        with self._lock:
            files = sorted(self._files(), key=lambda pair: pair[1].st_mtime_ns, reverse=True)
            names = {name for name, _ in files}
            self._known = {name: known for name, known in self._known.items() if name in names}
            looked = [(name, status, self._look(name, status)) for name, status in files[:MAX_LISTED]]
        data = [_entry(name, status, saved, model, config) for name, status, saved in looked if saved]
        return {"object": "list", "data": data, "complete": len(files) <= MAX_LISTED}

    def sweep(self) -> int:
        return sweep(self.path)

    def delete(self, name: str) -> int:
        """Remove a session file and return its size; raises NotThere, and NameRefused for what is no session file."""
        try:
            return self._delete(name)
        except (FileNotFoundError, NotADirectoryError):
            raise NotThere(f"there is no session file {name!r}") from None

    def _delete(self, name: str) -> int:
        from sessionfile import may_replace

        path = self.path_of(name)
        status = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise NameRefused(f"{name!r} is no regular file and stays where it is")
        if not may_replace(path):
            raise NameRefused(f"{name!r} is not a session file and stays where it is")
        os.unlink(path)
        return status.st_size

    def _files(self) -> list[tuple[str, os.stat_result]]:
        """Those with a name that a client may use."""
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in _regular_files(self.path):
                with contextlib.suppress(NameRefused, FileNotFoundError):  # not ours, or gone since
                    found.append((check_filename(entry.name), entry.stat(follow_symlinks=False)))
        return found

    def _look(self, name: str, status: os.stat_result) -> SavedSession | None:
        """What is in a file, read once as long as it does not change."""
        key = (status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._known.get(name)
        if known is None or known[0] != key:
            known = self._known[name] = (key, self._inspect(self.path_of(name)))
        return known[1]


def _entry(name: str, status: os.stat_result, saved: SavedSession, model: str | None, config: str | None) -> dict:
    def same(*pairs: tuple[str | None, str | None]) -> bool | None:
        if saved.problem:
            return False
        return all(a == b for a, b in pairs) if all(b for _, b in pairs) else None

    return {
        "kind": "file",
        "id": name,
        "filename": name,
        "n_bytes": status.st_size,
        "n_tokens": saved.n_tokens,
        "modified": status.st_mtime,
        "match": same((saved.model, model), (saved.config, config)),
        "model_match": same((saved.model, model)),
        "problem": saved.problem and one_line(saved.problem),
    }


def _starts_like_session(path: str) -> bool:
    """Whether the first bytes are those of a session file of any version, sound or damaged."""
    from sessionlayout import START_MARK

    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(len(START_MARK) - 1) == START_MARK[:-1]
