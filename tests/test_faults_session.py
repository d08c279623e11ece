"""Whatever call fails in SAVE or RESTORE, the live conversation, the pools and the folder are as they were.

After every failure three checks hold: the conversation goes on with the tokens of a control run, every byte that is
held is the same, and the folder holds what it held. Each check is shown to fail on a copy of the code that was broken.
"""

import contextlib
import errno
import functools
import itertools
import os
import random
import shutil
import signal

import numpy as np
import pytest

import blockfile
import disksystem
import kvcache
import sessionfile
import sessionstate
from engine import Session
from generation import FatalError
from given_engine import held, new_session, tree
from given_faults import CODES, KINDS, FaultySystem, count, fails, first, installed, no_memory, nothing, short
from given_images import seal
from given_session import MODEL, Live, refusal_of
from helperthread import HelperThread
from sessionfile import SessionReader
from sessionlayout import FRAME_BYTES, HEADER, TRAILER, SessionError

pytestmark = pytest.mark.faults

SMALL_BLOCK = 4096
CHANGED = "the file is changed, cut, grown, replaced, removed or made a link during RESTORE"
MOST_CALLS = 400  # of one save or restore, far more than there are


@pytest.fixture
def live(tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    return Live(folder)


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    if request.param == "many blocks":
        small_blocks(monkeypatch)


def small_blocks(monkeypatch) -> None:
    """Blocks so small that a file of a tiny model has many."""
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", SMALL_BLOCK)
    monkeypatch.setattr(sessionfile, "BLOCK_BYTES", SMALL_BLOCK)


def every_call(fault, kind: str, only: str = ""):
    """A layer for each n, until an operation made fewer than n calls; the operation runs between two of them."""
    for number in range(1, MOST_CALLS):
        system = FaultySystem(number, fault, only=only, kind=kind)
        yield system
        if not system.met:
            return
    raise AssertionError("an operation without end")


# --- the n-th call fails


def save_under(live, system) -> SessionError | None:
    def operation():
        with installed(system):
            live.save()

    error = live.attempt(operation)
    if error is None:
        assert tree(live.folder) == {"chat.bin": live.new}
        live.goes_on(held(live.session))
    live.chat.write_bytes(live.old)
    return error


def restore_under(live, system) -> SessionError | FatalError | None:
    def operation():
        with installed(system):
            live.restore()

    try:
        error = live.attempt(operation)
    except FatalError as fatal:  # some pools are written: this process would end here
        live.reset(new_session(MODEL))
        return fatal
    if error is None:
        assert held(live.session)["live"] == live.restored
        live.reset()
    return error


def failing_saves(live, code: int) -> set[str]:
    """Let each call of a save fail with `code`; returns the calls that were refused for it."""
    refused = set()
    for system in every_call(fails(code), "a call in SAVE fails"):
        error = save_under(live, system)
        if error:
            assert error.kind == KINDS.get(code, "io")
            assert error.published == (system.met == "flush_folder")
            refused.add(system.met)
    return refused


def failing_restores(live, code: int) -> set[str]:
    refused = set()
    for system in every_call(fails(code), "a call in RESTORE fails"):
        error = restore_under(live, system)
        if isinstance(error, FatalError):
            assert system.met == "read", "nothing else is asked of the system once a pool was written"
        elif error:
            assert error.kind == KINDS.get(code, "io")
        if error:
            refused.add(system.met)
    return refused


HARMLESS = {"set_direct", "forget"}  # advice and a faster way: without them it goes on


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_save_whose_nth_call_fails(code, live, blocks):
    always = {"open_folder", "create", "allocate", "start_thread", "write", "flush", "close", "rename"}
    refused = failing_saves(live, code)
    assert not refused & HARMLESS
    if code == errno.EINVAL:  # a direct transfer that is refused is repeated, a folder that cannot be flushed is told
        always -= {"write"}
        assert "flush_folder" not in refused
    assert always <= refused


RESTORING = {"open_existing", "status", "set_blocking", "start_thread", "allocate", "read"}


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_restore_whose_nth_call_fails(code, live, blocks):
    assert failing_restores(live, code) == RESTORING


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.ENOMEM], ids=errno.errorcode.get)
@pytest.mark.parametrize("available_bytes", [0, 1 << 50], ids=["past the cache", "through the cache"])
def test_a_restore_of_what_is_not_cached_whose_nth_call_fails(available_bytes, code, live, blocks, monkeypatch):
    """Both ways of reading, on whatever file system: a direct transfer that is refused is repeated."""
    monkeypatch.setattr(blockfile, "_is_cached", lambda descriptor, size_bytes: False)
    monkeypatch.setattr(disksystem, "_available_bytes", lambda: available_bytes)
    monkeypatch.setattr(disksystem.PosixSystem, "set_direct", lambda self, descriptor, on: None)
    repeated = {"read"} if code == errno.EINVAL and not available_bytes else set()
    assert failing_restores(live, code) == RESTORING - repeated


def test_a_save_without_memory_and_with_two_faults(live):
    """MemoryError at each call; and a temporary file that can neither be written nor removed is named."""
    for system in every_call(no_memory, "an allocation fails", "allocate"):
        error = save_under(live, system)
        assert (error.kind if error else "") == ("memory" if system.met else "")
    for system in every_call(no_memory, "an allocation fails", "allocate"):
        error = restore_under(live, system)
        assert (error.kind if error else "") == ("memory" if system.met else "")

    class Stuck(FaultySystem):
        def unlink(self, folder, name):
            count("a call in SAVE fails")
            raise OSError(errno.EIO, "no unlink")

    before = held(live.session)
    with installed(Stuck(1, fails(errno.ENOSPC), only="write")), pytest.raises(SessionError) as caught:
        live.save()
    (left,) = {path.name for path in live.folder.iterdir()} - {"chat.bin"}
    assert left in str(caught.value)
    assert live.chat.read_bytes() == live.old
    live.goes_on(before)


ALLOCATING = ("empty", "empty_like", "array", "ascontiguousarray")


def under_short_memory(monkeypatch, operation, at: int) -> tuple[Exception | None, bool]:
    """Run an operation whose at-th array cannot be allocated; returns what it raised, and whether it came so far."""
    calls, met = itertools.count(1), False

    def scarce(real):
        def allocate(*arguments, **named):
            nonlocal met
            if next(calls) == at:
                met = True
                count("an allocation fails")
                raise MemoryError
            return real(*arguments, **named)

        return allocate

    raised = None
    with monkeypatch.context() as patched:
        for name in ALLOCATING:
            patched.setattr(np, name, scarce(getattr(np, name)))
        try:
            operation()
        except Exception as error:
            raised = error
    return raised, met


@pytest.mark.parametrize("verb", ["save", "restore"])
def test_an_array_that_cannot_be_allocated(verb, live, blocks, monkeypatch):
    """Refused; but the last two of a restore, the token ids of what is in the pools already, end the process."""
    ends = []
    for at in range(1, MOST_CALLS):
        before, files = held(live.session), tree(live.folder)
        error, met = under_short_memory(monkeypatch, getattr(live, verb), at)
        if not met:
            break
        if isinstance(error, SessionError):
            assert error.kind == "memory"
            assert tree(live.folder) == files
            live.goes_on(before)
        else:
            ends.append(type(error))
            live.reset(new_session(MODEL))
    assert error is None
    assert at > 4
    assert ends == ([MemoryError] * 2 if verb == "restore" else [])
    live.reset()


def test_no_thread_can_be_started(live, monkeypatch):
    """As the system has it: the thread's own start fails."""

    def refuse(run, arguments):
        count("a thread cannot be started")
        raise RuntimeError("can't start new thread")

    for operation in (live.save, live.restore):
        with monkeypatch.context() as patched:
            patched.setattr("_thread.start_new_thread", refuse)

            def tried(operation=operation):
                try:
                    operation()
                finally:
                    patched.undo()

            error = live.attempt(tried)
        assert error.kind == "memory"
        assert "can't start new thread" in str(error)


# --- transfers that do less than they were asked


@pytest.mark.parametrize("fault", [short, nothing])
def test_a_write_that_does_less(fault, live, blocks):
    for system in every_call(fault, "a write in SAVE takes a part or nothing", "write"):
        error = save_under(live, system)
        assert (error.kind if error else "") == ("io" if fault is nothing and system.met else "")


@pytest.mark.parametrize("fault", [short, nothing])
def test_a_read_that_does_less(fault, live, blocks):
    for system in every_call(fault, "a read in RESTORE gives a part or nothing", "read"):
        error = restore_under(live, system)
        if fault is short or not system.met:
            assert error is None
        else:
            assert "became shorter" in str(error)


def test_signals_while_saving_and_restoring(live):
    """A real timer interrupts the calls of both, again and again."""
    n_signals = 0

    def note(*_):
        nonlocal n_signals
        n_signals += 1

    previous = signal.signal(signal.SIGALRM, note)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        for _ in range(8):
            live.save()
            assert live.chat.read_bytes() == live.new
            live.restore()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert n_signals
    count("a signal comes during SAVE or RESTORE", n_signals)
    live.goes_on(held(live.session))


# --- a file that is changed, cut, grown, replaced or removed at any moment of a restore


def change(path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def cut(path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def grow(path) -> None:
    with open(path, "ab") as file:
        file.write(bytes(5000))


def replace(path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    change(path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def make_a_link(path) -> None:
    """To a file that could be restored as well, and must not."""
    path.with_suffix(".link").symlink_to(path.parent.parent / "spare.bin")
    os.replace(path.with_suffix(".link"), path)


def remove(path) -> None:
    path.unlink(missing_ok=True)


def changes_at_every_call(live, action) -> set[str]:
    """Do something to the file before the n-th call of a restore; returns what came of it."""
    outcomes = set()
    for system in every_call(first(lambda: action(live.chat)), CHANGED):
        before = held(live.session)
        try:
            with installed(system):
                live.restore()
            outcomes.add("restored")
            assert held(live.session)["live"] == live.restored
            live.reset()
        except SessionError as error:
            outcomes.add(error.kind)
            live.goes_on(before)
        except FatalError:
            outcomes.add("fatal")
            live.reset(new_session(MODEL))
        live.reset()
    return outcomes


@pytest.mark.parametrize("action", [change, cut, grow, replace, remove, make_a_link])
def test_a_file_in_one_block_that_changes_never_reaches_the_pools(action, live):
    outcomes = changes_at_every_call(live, action)
    assert {"restored"} < outcomes <= {"restored", "invalid", "io"}


@pytest.mark.parametrize("action", [change, cut, grow, replace, remove, make_a_link])
def test_a_file_in_many_blocks_that_changes(action, live, monkeypatch):
    """A change in a later block can come when earlier ones are in the pools already: then the process must end."""
    small_blocks(monkeypatch)
    outcomes = changes_at_every_call(live, action)
    assert {"restored", "fatal"} <= outcomes if action in (change, cut) else "fatal" not in outcomes


# --- a pool that refuses bytes


def pool_writes(live, monkeypatch, target) -> int:
    """Let each write of one kind of sink fail; returns how many there were."""
    write = target.write
    for place in itertools.count(1):
        calls = itertools.count(1)
        met = False

        def broken(self, part, offset, data, place=place, calls=calls):
            nonlocal met
            if next(calls) == place:
                met = True
                count("a pool refuses bytes")
                raise RuntimeError("the pool is broken")
            write(self, part, offset, data)

        with monkeypatch.context() as patched:
            patched.setattr(target, "write", broken)
            try:
                live.restore()
                said = ""
            except FatalError as error:
                said = str(error)
        assert bool(said) == met, "a pool refused bytes, and nobody was told"
        assert not met or ("after the conversation was overwritten" in said and "the pool is broken" in said)
        live.reset(new_session(MODEL))
        if not met:
            return place - 1
    raise AssertionError


@pytest.mark.parametrize("target", [kvcache.PoolWindow, sessionstate.StateSink])
def test_every_write_to_a_pool_that_fails_is_fatal(target, live, blocks, monkeypatch):
    assert pool_writes(live, monkeypatch, target) >= 4


# --- damage, also behind recomputed checksums


def damage(live, data: bytes) -> SessionError | None:
    count("a damaged file is restored")
    live.chat.unlink()  # a new file: one that is cut and written again costs a flush on some file systems
    live.chat.write_bytes(data)
    before = held(live.session)
    error = refusal_of(live.restore)
    if error:
        assert error.kind == "invalid"
        assert held(live.session) == before
    else:
        live.session.restore(str(live.spare))
    return error


def test_a_damaged_file_changes_nothing(live):
    draw = random.Random(1)
    size = len(live.old)
    for _ in range(150):
        spoiled = bytearray(live.old)
        spoiled[draw.randrange(size)] ^= draw.randrange(1, 256)
        assert damage(live, bytes(spoiled))
        assert damage(live, live.old[: draw.randrange(size)])
    live.goes_on(held(live.session))


def test_damage_behind_recomputed_checksums_is_refused_or_fits(live, bounded_memory):
    """A file with sound checksums and wrong contents: refused, or every size of it fits and it can go on."""
    draw = random.Random(2)
    structure = [*range(HEADER.size, HEADER.size + 400), *range(len(live.old) - 400, len(live.old) - TRAILER.size)]
    outcomes = set()
    for _ in range(200):
        spoiled = bytearray(live.old)
        at = draw.choice(structure) if draw.random() < 0.7 else draw.randrange(HEADER.size, len(live.old) - 16)
        spoiled[at : at + 8] = draw.choice((bytes(8), b"\xff" * 8, draw.randbytes(8)))
        outcomes.add(damage(live, seal(spoiled[: len(live.old)])) is None)
    assert outcomes == {True, False}
    assert len(live.old) > FRAME_BYTES + 800
    live.goes_on(held(live.session))


# --- a broken copy of the code is found by each of these


def broken_writer(monkeypatch):
    """Writes over the old file, without a temporary one."""

    def create(self, folder, name):
        target = ".".join(name.split(".")[1:-2])
        return os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=folder)

    monkeypatch.setattr(disksystem.PosixSystem, "create", create)
    monkeypatch.setattr(disksystem.PosixSystem, "rename", lambda *arguments: None)
    monkeypatch.setattr(disksystem.PosixSystem, "unlink", lambda *arguments: None)


def broken_discard(monkeypatch):
    """Leaves its temporary file behind."""
    monkeypatch.setattr(blockfile.BlockWriter, "_discard", blockfile.BlockWriter._close)


def broken_restore(monkeypatch):
    """Forgets the live conversation before the file was looked at."""
    restore = Session.restore

    @functools.wraps(restore)
    def eager(self, path, **named):
        self.erase()
        return restore(self, path, **named)

    monkeypatch.setattr(Session, "restore", eager)


def broken_close(monkeypatch):
    """Takes a close that failed behind a finished restore for a refusal."""
    monkeypatch.setattr(blockfile, "_close_read", lambda descriptor: blockfile.system.close(descriptor))


def broken_ledger(monkeypatch):
    """Hands blocks to the pools without holding them against the first pass."""
    monkeypatch.setattr(SessionReader, "_voucher", lambda self: lambda block: None)


def broken_feed(monkeypatch):
    """Swallows what a pool raises."""

    def feed(self, pieces, sink, part):
        done = 0
        for piece in pieces:
            with contextlib.suppress(Exception):
                sink.write(part, done, piece)
            done += piece.size

    monkeypatch.setattr(SessionReader, "_feed", feed)


def broken_short_write(monkeypatch):
    """Takes a write of a part for a whole one."""

    def write(self, data, offset):
        blockfile.system.write(self._descriptor, data, offset)

    monkeypatch.setattr(blockfile.BlockWriter, "_write", write)


def broken_validation(monkeypatch):
    """Lets contents through that do not fit."""
    monkeypatch.setattr(sessionstate, "validate", lambda *arguments: None)
    monkeypatch.setattr(sessionfile, "check_trailer", lambda source, payload_hash: payload_hash)


def broken_thread(monkeypatch):
    """Lets through what Python says where no thread can be started."""

    def helper():
        try:
            return HelperThread()
        except OSError as error:
            raise error.__cause__ from None

    monkeypatch.setattr(blockfile, "HelperThread", helper)


FOUND = [
    (broken_writer, lambda live, patch: failing_saves(live, errno.ENOSPC)),
    (broken_discard, lambda live, patch: failing_saves(live, errno.ENOSPC)),
    (broken_restore, lambda live, patch: failing_restores(live, errno.EIO)),
    (broken_close, lambda live, patch: failing_restores(live, errno.EIO)),
    (broken_ledger, lambda live, patch: test_a_file_in_one_block_that_changes_never_reaches_the_pools(change, live)),
    (broken_feed, lambda live, patch: pool_writes(live, patch, kvcache.PoolWindow)),
    (broken_short_write, lambda live, patch: test_a_write_that_does_less(short, live, None)),
    (broken_thread, lambda live, patch: test_no_thread_can_be_started(live, patch)),
    (broken_validation, lambda live, patch: test_a_damaged_file_changes_nothing(live)),
]


@pytest.mark.parametrize(("breaks", "trial"), FOUND, ids=[breaks.__name__ for breaks, _ in FOUND])
def test_a_broken_copy_is_found(breaks, trial, live, monkeypatch):
    breaks(monkeypatch)
    with pytest.raises((AssertionError, FatalError, RuntimeError)):
        trial(live, monkeypatch)
