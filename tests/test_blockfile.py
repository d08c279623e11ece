"""Which way blocks are read, past the page cache or through it, and what becomes of the file that is replaced."""

import errno
import os
import sys
import threading

import numpy as np
import pytest

import blockfile
import disksystem
from blockfile import BLOCK_BYTES, DIRECT_UNIT, BlockReader, BlockWriter
from helperthread import HelperThread

SIZES = (1, 328, DIRECT_UNIT, DIRECT_UNIT + 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 5000)
PLENTY = 1 << 50


class Noting(disksystem.PosixSystem):
    """Notes switches of direct transfers, advice and reads; the n-th read meets a fault. Any file system will do."""

    def __init__(self, available=PLENTY, fail_at=0, fault=None):
        self.direct, self.ahead, self.forgotten, self.reads = [], 0, [], []
        self._available, self._fail_at, self._fault = available, fail_at, fault

    def available_bytes(self):
        if isinstance(self._available, OSError):
            raise self._available
        return self._available

    def set_direct(self, descriptor, on):
        self.direct.append(on)

    def read_ahead(self, descriptor):
        self.ahead += 1

    def forget(self, descriptor, offset, size):
        self.forgotten.append((offset, size))

    def read(self, descriptor, data, offset):
        self.reads.append((offset, data.size))
        if len(self.reads) == self._fail_at:
            data = self._fault(data)
        return super().read(descriptor, data, offset)


def refused(data):
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def a_third(data):
    return data[: data.size // 3 + 1]


@pytest.fixture
def install(monkeypatch):
    def install(system, *, cached=False):
        monkeypatch.setattr(blockfile, "system", system)
        monkeypatch.setattr(blockfile, "_is_cached", lambda descriptor, size_bytes: cached)
        return system

    return install


@pytest.fixture
def file(tmp_path):
    """A file of so many bytes, and what they are."""

    def make(size: int) -> tuple[str, bytes]:
        data = np.random.default_rng(size).bytes(size)
        (tmp_path / "a.bin").write_bytes(data)
        return str(tmp_path / "a.bin"), data

    return make


def blocks(reader, *, last, check=None) -> bytes:
    reader.start(last=last, check=check)
    n_blocks = -(-reader.size_bytes // BLOCK_BYTES)
    return b"".join(reader.next_block().tobytes() for _ in range(n_blocks))


# --- Past the page cache


@pytest.mark.parametrize("size", SIZES)
def test_a_single_reading_goes_past_the_cache_in_whole_units(size, file, install):
    path, data = file(size)
    system = install(Noting())
    with BlockReader(path) as reader:
        assert blocks(reader, last=True) == data
    assert system.direct == [True]
    assert all(n % DIRECT_UNIT == 0 for read in system.reads for n in read)
    assert (system.ahead, system.forgotten) == (0, []), "there is nothing in the cache to give back"


@pytest.mark.parametrize("fault", [refused, a_third])
@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_direct_reading_that_is_refused_or_cut_goes_on(fault, fail_at, file, install):
    path, data = file(SIZES[-1])
    system = install(Noting(fail_at=fail_at, fault=fault))
    with BlockReader(path) as reader:
        assert blocks(reader, last=True) == data
    assert system.direct == ([True, False] if fault is refused else [True])
    assert bool(system.forgotten) == (fault is refused), "what went through the cache is given back"


def test_a_real_direct_reading_that_is_cut_goes_on(file, monkeypatch):
    """The rest of a unit is no direct transfer, which real systems refuse."""
    path, data = file(SIZES[-1])

    class Short(disksystem.PosixSystem):
        def read(self, descriptor, data, offset):
            return super().read(descriptor, a_third(data), offset)

    monkeypatch.setattr(blockfile, "system", Short())
    monkeypatch.setattr(blockfile, "_is_cached", lambda descriptor, size_bytes: False)
    with BlockReader(path) as reader:
        assert blocks(reader, last=True) == data


def test_a_refusal_of_a_reading_through_the_cache_is_told(file, install):
    path, _ = file(SIZES[-1])
    install(Noting(fail_at=2, fault=refused))
    with BlockReader(path) as reader, pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        blocks(reader, last=False)


def test_the_switch_for_buffered_transfers_holds_for_reading(file, install, monkeypatch):
    monkeypatch.setenv(blockfile.BUFFERED_SWITCH, "1")
    path, data = file(SIZES[-1])
    system = install(Noting())
    with BlockReader(path) as reader:
        assert blocks(reader, last=True) == data
    assert (system.direct, system.ahead) == ([], 1)
    assert system.forgotten == [(0, BLOCK_BYTES), (0, 0)]


# --- Through it


def test_two_readings_go_through_a_cache_that_has_room(file, install):
    path, data = file(SIZES[-1])
    for available in (PLENTY, 2 * len(data)):
        system = install(Noting(available))
        with BlockReader(path) as reader:
            assert blocks(reader, last=False) == data
            assert system.forgotten == []
            assert blocks(reader, last=True) == data
        assert (system.direct, system.ahead) == ([], 1)
        assert system.forgotten == [(0, BLOCK_BYTES), (0, 0)]


@pytest.mark.parametrize("available", [0, 2 * SIZES[-1] - 1, OSError(errno.EIO, "nobody knows")])
def test_two_readings_go_past_a_cache_without_room(available, file, install):
    path, data = file(SIZES[-1])
    system = install(Noting(available))
    with BlockReader(path) as reader:
        assert blocks(reader, last=False) == data
        assert blocks(reader, last=True) == data
    assert (system.direct, system.ahead, system.forgotten) == ([True], 0, [])


@pytest.mark.parametrize("last", [False, True])
def test_a_file_that_is_in_the_cache_is_read_from_there_and_stays(last, file, install):
    path, data = file(SIZES[-1])
    system = install(Noting(0), cached=True)
    with BlockReader(path) as reader:
        assert blocks(reader, last=last) == data
    assert (system.direct, system.ahead, system.forgotten) == ([], 0, [])


def test_a_check_sees_every_block_in_order_before_it_is_handed_out(file, install):
    path, data = file(SIZES[-1])
    install(Noting())
    seen, threads = [], set()

    def check(block):
        threads.add(threading.current_thread())
        seen.append(block.tobytes())
        if len(seen) == 3:
            raise ValueError("not this one")

    with BlockReader(path) as reader:
        reader.start(last=True, check=check)
        for n_seen in (1, 2):
            assert reader.next_block().tobytes() == seen[n_seen - 1]
        with pytest.raises(ValueError, match="not this one"):
            reader.next_block()
    assert b"".join(seen) == data
    assert threading.current_thread() not in threads


# --- The file that is replaced


def write(path, data: bytes = b"new") -> None:
    with BlockWriter(str(path), len(data)) as writer:
        writer.space()[: len(data)] = np.frombuffer(data, np.uint8)
        writer.advance(len(data))
        writer.publish()


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="this system cannot hold a file without opening it")
def test_a_replaced_file_lives_until_the_new_one_is_safe(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    alive = []

    class Holding(disksystem.PosixSystem):
        held = None

        def hold(self, folder, name):
            self.held = super().hold(folder, name)
            return self.held

        def flush_folder(self, folder):
            alive.append((os.fstat(self.held).st_size, os.fstat(self.held).st_nlink))
            super().flush_folder(folder)

    system = Holding()
    monkeypatch.setattr(blockfile, "system", system)
    write(path)
    system.free_bytes(str(tmp_path))
    assert alive == [(3, 0)]
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(system.held)


def test_free_space_counts_what_a_replaced_file_took(tmp_path, monkeypatch):
    """Who asks for it while the old file's blocks are still being freed waits for that."""
    freeing, freed, here = threading.Event(), [], threading.get_ident()
    close = os.close

    def slow(descriptor):
        if threading.get_ident() != here:
            freeing.wait()
            freed.append(True)
        close(descriptor)

    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    system = disksystem.PosixSystem()
    monkeypatch.setattr(blockfile, "system", system)
    monkeypatch.setattr(os, "close", slow)
    write(path)
    assert freed == []
    asked = threading.Thread(target=system.free_bytes, args=(str(tmp_path),))
    asked.start()
    freeing.set()
    asked.join()
    assert freed == [True]


def test_what_cannot_be_kept_or_let_go_in_a_thread_is_no_failure(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"

    def refuse():
        if sys._getframe(1).f_code.co_name == "release":
            raise OSError(errno.ENOMEM, "can't start new thread")
        return HelperThread()

    class Loose(disksystem.PosixSystem):
        def hold(self, folder, name):
            raise OSError(errno.EMFILE, "no more files")

    monkeypatch.setattr(blockfile, "HelperThread", refuse)
    n_open = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for system in (disksystem.PosixSystem(), Loose()):
        monkeypatch.setattr(blockfile, "system", system)
        for data in (b"first", b"second"):
            write(path, data)
            assert path.read_bytes() == data
    assert n_open == (len(os.listdir("/proc/self/fd")) if n_open else 0)
    assert os.listdir(tmp_path) == ["a.bin"]
