"""What a save writes before it takes its name: how such a file is called, who holds it, and what becomes of dead ones.

It owns the name and the lock, and knows nothing of what is written. Invariant: a file that a living process writes is
never removed, as its lock is held from its creation to its end; one that nobody holds is removed, however young it is.
Read next: blockfile.py, which writes these files; sessionfolder.py, which has a folder swept of them.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable

try:
    import fcntl
except ImportError:  # Windows, where a file that is open for writing cannot be opened by others
    fcntl = None

MAX_STEM_BYTES = 64  # of the destination's name in the temporary's: 86 bytes in all, below every file system's limit
NAME = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)
# Where there are no locks: none of a save's steps may be silent for longer than an hour.
MAX_SILENCE_S = 3600


def temporary_name(leaf: str) -> str:
    """A hidden name beside `leaf` that no other writer has: at most 86 bytes, whole characters."""
    stem = os.fsencode(leaf)[:MAX_STEM_BYTES]
    if len(os.fsencode(leaf)) > MAX_STEM_BYTES:
        stem = stem.decode("utf-8", "ignore").encode()
    return f".{os.fsdecode(stem)}.{secrets.token_hex(8)}.tmp"


def lock(descriptor: int) -> bool | None:
    """Hold a file until it is closed: True; False where somebody else does, None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def sweep(folder: str, is_ours: Callable[[bytes], bool], n_bytes: int) -> int:
    """Remove the unfinished files of dead processes from a folder; returns how many.

    `is_ours` is shown the first `n_bytes` of a file, or all there are.
    """
    n_removed = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # it was finished, or another process was first
                    n_removed += _remove_dead(entry.path, is_ours, n_bytes)
    return n_removed


def _remove_dead(path: str, is_ours: Callable[[bytes], bool], n_bytes: int) -> bool:
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except PermissionError:
        if fcntl is None:
            return False  # somebody has it open
        raise
    try:
        status, held = os.fstat(descriptor), lock(descriptor)
        is_dead = held or (held is None and time.time() - status.st_mtime > MAX_SILENCE_S)
        if not is_dead or not stat.S_ISREG(status.st_mode) or not is_ours(os.read(descriptor, n_bytes)):
            return False
        if fcntl is not None:  # while the lock is held, as its writer may be about to take it
            os.unlink(path)
    finally:
        os.close(descriptor)
    if fcntl is None:  # Windows removes no open file
        os.unlink(path)
    return True
