"""A layer between blockfile and the system that lets any call fail, and the count of what was injected.

Owns the faults and their number by kind; knows no test. Invariant: a fault is counted when it happens, so that a count
never says more than was tried. Read next: test_faults_session.py, which lets every call fail.
"""

import collections
import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator

import blockfile
import disksystem

# What a full disk, a full table, a broken device, a foreign owner and an unlucky moment say.
CODES = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EIO, errno.EACCES, errno.EINTR),
    *(errno.EMFILE, errno.EINVAL, errno.EROFS),
)
KINDS = {
    errno.ENOSPC: "storage",
    errno.EDQUOT: "storage",
    errno.EFBIG: "storage",
    errno.ENOMEM: "memory",
}  # every other one is "io"
INJECTED: collections.Counter[str] = collections.Counter()

Fault = Callable[[Callable, tuple], object]  # is given the call and its arguments, and does what becomes of it


def count(kind: str, n: int = 1) -> None:
    INJECTED[kind] += n


def fails(code: int) -> Fault:
    def fault(call, arguments):
        raise OSError(code, os.strerror(code))

    return fault


def no_memory(call, arguments):
    """MemoryError, as an allocation has it that Python makes."""
    raise MemoryError


def short(call, arguments):
    """A transfer of a part: a third of what was asked for, at least a byte."""
    descriptor, data, offset = arguments
    return call(descriptor, data[: data.size // 3 + 1], offset)


def nothing(call, arguments):
    """A transfer that moves no byte."""
    return 0


def first(action: Callable[[], object]) -> Fault:
    """Something happens to the file just before the call."""

    def fault(call, arguments):
        action()
        return call(*arguments)

    return fault


def dies_before(call, arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def dies_after(call, arguments):
    call(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)


def dies_half_way(call, arguments):
    """Killed while a write is under way: a part of it is in the file."""
    short(call, arguments)
    os.kill(os.getpid(), signal.SIGKILL)


class FaultySystem(disksystem.PosixSystem):
    """Notes every call in `calls`; the n-th one, of all or of those of one name, meets the fault."""

    def __init__(self, at: int = 0, fault: Fault = nothing, *, only: str = "", kind: str = ""):
        self.calls: list[str] = []
        self.met = ""  # the call that met the fault
        self._left = at
        self._fault = fault
        self._only = only
        self._kind = kind

    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        if name.startswith("_") or not callable(method):
            return method
        return lambda *arguments: self._call(name, method, arguments)

    def _call(self, name, method, arguments):
        self.calls.append(name)
        if not self._only or name == self._only:
            self._left -= 1
            if not self._left:
                self.met = name
                if self._kind:
                    count(self._kind)
                return self._fault(method, arguments)
        return method(*arguments)

    # What a save or a restore asks of the system beside its file calls.

    def allocate(self, file_bytes: int):
        return _allocate_block(file_bytes)

    def start_thread(self):
        return _helper_thread()


_allocate_block, _helper_thread = blockfile.allocate_block, blockfile.HelperThread


@contextlib.contextmanager
def installed(system: FaultySystem) -> Iterator[FaultySystem]:
    """The layer in place of the system; the name `system` of blockfile is looked up at every call."""
    names = {"system": system, "allocate_block": system.allocate, "HelperThread": system.start_thread}
    before = {name: getattr(blockfile, name) for name in names}
    for name, value in names.items():
        setattr(blockfile, name, value)
    try:
        yield system
    finally:
        for name, value in before.items():
            setattr(blockfile, name, value)
