"""Writing session files: the old file stays until the new one is whole, whatever call to the system fails."""

import errno
import os
import pathlib
import re
import subprocess
import sys
import weakref

import numpy as np
import pytest

import blockfile
import disksystem
from blockfile import BLOCK_BYTES, BlockWriter
from given_images import DATA, Pattern, bare_image, identity, image, plain
from given_target import OLD, SAMPLE_BYTES, Recording, assert_untouched, refusal, use, write_sample
from sessionfile import read_session, verify_session, write_session
from sessionfolder import list_sessions
from sessionlayout import Extent, Identity, Limits, Record, SessionError

ROOT = pathlib.Path(__file__).resolve().parent.parent


# --- The same bytes, however they are written ---


def test_writing_twice_and_over_an_older_file(target):
    assert write_sample(target) == SAMPLE_BYTES
    first = target.read_bytes()
    assert write_sample(target) == SAMPLE_BYTES
    assert target.read_bytes() == first
    assert os.listdir(target.parent) == [target.name]
    assert len(first) == SAMPLE_BYTES


def test_buffered_writing_gives_the_same_bytes(target, monkeypatch):
    write_sample(target)
    direct = target.read_bytes()
    monkeypatch.setenv("STRATA_SESSION_BUFFERED", "1")
    calls = use(monkeypatch, Recording()).calls
    write_sample(target)
    assert "set_direct" not in calls
    assert target.read_bytes() == direct
    assert plain(read_session(target, identity("sample"), Limits())) == plain(image("sample"))


@pytest.mark.parametrize("name", ["aligned_4096", "aligned_4097", "aligned_8192", "min_empty"])
def test_padding_does_not_show(name, tmp_path, monkeypatch):
    for buffered in ("0", "1"):
        monkeypatch.setenv("STRATA_SESSION_BUFFERED", buffered)
        write_session(tmp_path / "a.bin", image(name), identity(name))
        assert (tmp_path / "a.bin").read_bytes() == (DATA / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("first_refused", [1, 2])
def test_a_direct_transfer_that_is_refused_goes_on_buffered(first_refused, target, monkeypatch):
    write_sample(target)
    expected = target.read_bytes()
    system = use(monkeypatch, Recording(first_refused, errno.EINVAL, "write"))
    write_sample(target)
    assert target.read_bytes() == expected
    assert system.calls.count("set_direct") in (1, 2)  # on, and off again where it could be switched on


def test_a_file_system_without_direct_transfers(target, monkeypatch):
    system = use(monkeypatch, Recording(1, errno.EINVAL, "set_direct"))
    write_sample(target)
    assert "truncate" not in system.calls, "nothing was padded"
    assert verify_session(target).size_bytes == SAMPLE_BYTES


def test_short_writes_are_gone_on_with(target, monkeypatch):
    write_sample(target)
    expected = target.read_bytes()

    class ShortWrites(disksystem.PosixSystem):
        def write(self, descriptor, data, offset):
            return super().write(descriptor, data[: data.size // 2 + 1], offset)

    use(monkeypatch, ShortWrites())
    write_sample(target)
    assert target.read_bytes() == expected


def test_a_write_that_takes_nothing(target, monkeypatch):
    class Nothing(disksystem.PosixSystem):
        def write(self, descriptor, data, offset):
            return 0

    use(monkeypatch, Nothing())
    assert refusal(write_sample, target).kind == "io"
    assert_untouched(target)


# --- The order of steps, progress and phases ---


def test_the_file_is_flushed_before_it_gets_its_name(target, monkeypatch):
    calls = use(monkeypatch, Recording()).calls
    write_sample(target)
    steps = [name for name in calls if name != "forget"]
    assert steps == [
        *("open_existing", "status", "read", "close"),  # whether it may be replaced
        *("open_folder", "create", "lock", "set_direct", "write", "write", "truncate"),
        *("flush", "close", "hold", "rename", "flush_folder", "release", "close"),
    ]


def test_without_durability_nothing_is_flushed(target, monkeypatch):
    calls = use(monkeypatch, Recording()).calls
    phases = []
    write_sample(target, durable=False, phase=lambda *report: phases.append(report))
    assert not {"flush", "flush_folder"} & set(calls)
    assert phases == [("publish", SAMPLE_BYTES)]


def test_progress_and_phases(target):
    reports = []
    named = {name: lambda *report: reports.append(report) for name in ("progress", "phase")}
    write_session(target, image("min_empty"), identity("min_empty"), **named)
    assert reports == [(0, 328), (328, 328), ("flush", 328), ("publish", 328)]
    reports.clear()
    write_sample(target, **named)
    size = SAMPLE_BYTES
    assert reports == [(0, size), (BLOCK_BYTES, size), (size, size), ("flush", size), ("publish", size)]


@pytest.mark.slow
def test_a_large_source_is_reported_at_every_block(target):
    reports = []
    source = Pattern((40 << 20) + 123)
    size = write_session(target, bare_image(), Identity(1, 2), [source], progress=lambda *r: reports.append(r))
    done = [report[0] for report in reports]
    assert done == [0, BLOCK_BYTES, 2 * BLOCK_BYTES, size]
    assert {report[1] for report in reports} == {size}
    assert max(call[2] for call in source.calls) <= BLOCK_BYTES
    read = read_session(target, Identity(1, 2), Limits())
    expected = np.empty(source.part_sizes[0], np.uint8)
    source.read(0, 0, expected)
    assert np.array_equal(read.kv[0].parts[0], expected)


def test_a_file_that_ends_with_a_block_has_no_further_report(target):
    frame = write_session(target, bare_image(), Identity(1, 2), [Pattern(0)])
    reports = []
    source = Pattern(BLOCK_BYTES - frame)
    size = write_session(target, bare_image(), Identity(1, 2), [source], progress=lambda *r: reports.append(r))
    assert size == BLOCK_BYTES
    assert reports == [(0, size), (size, size)]
    assert verify_session(target).size_bytes == size


# --- Sources ---


def test_sources_give_the_bytes_of_a_captured_image(tmp_path):
    captured = image("sample")
    write_session(tmp_path / "captured.bin", captured, identity("sample"))
    layers, captured.kv = captured.kv, []
    write_session(tmp_path / "pulled.bin", captured, identity("sample"), layers)
    assert (tmp_path / "pulled.bin").read_bytes() == (tmp_path / "captured.bin").read_bytes()


def test_a_failing_source_leaves_no_file(target):
    for fail_at in (0, 1 << 20):  # before anything was written, and when the first block was handed on
        error = refusal(write_session, target, bare_image(), Identity(1, 2), [Pattern(24 << 20, fail_at)])
        assert (error.kind, error.published, str(error)) == ("io", False, "the pool has gone")
        assert_untouched(target)


def test_a_failing_report_leaves_no_file(target):
    def report(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_sample(target, progress=report)
    assert_untouched(target)


def test_what_cannot_be_written_is_refused_before_the_disk(target, monkeypatch):
    calls = use(monkeypatch, Recording()).calls
    split = bare_image()
    split.live.stage_parts = (b"state of a second device",)
    split_checkpoint = bare_image()
    split_checkpoint.checkpoints = [Record(np.empty(0, np.int32), stage_parts=(b"x",))]
    for cause, arguments in (
        ("layer-split", (split, Identity(1, 2))),
        ("layer-split", (split_checkpoint, Identity(1, 2))),
        ("kv-twice", (image("sample"), Identity(1, 2), [Pattern(5)])),
        ("too-large", (bare_image(), Identity(1, 2), [Pattern(1 << 64)])),
    ):
        error = refusal(write_session, target, *arguments)
        assert (error.kind, error.reason, error.published) == ("invalid", cause, False)
    assert not calls
    assert_untouched(target)


def test_extents_are_not_written(target):
    looked = bare_image()
    looked.live.gdn = Extent(0, 10)
    with pytest.raises(AssertionError, match="Extent"):
        write_session(target, looked, Identity(1, 2))
    assert_untouched(target)


# --- Every failure ---


@pytest.mark.parametrize(
    ("call", "code", "outcome"),
    [
        ("write", errno.ENOSPC, ("storage", False)),
        ("write", errno.EDQUOT, ("storage", False)),
        ("write", errno.EFBIG, ("storage", False)),
        ("write", errno.EIO, ("io", False)),
        ("flush", errno.EIO, ("io", False)),
        ("flush", errno.ENOSPC, ("storage", False)),
        ("close", errno.EIO, ("io", False)),
        ("truncate", errno.EIO, ("io", False)),
        ("rename", errno.EACCES, ("io", False)),
        ("create", errno.EACCES, ("io", False)),
        ("create", errno.ENOSPC, ("storage", False)),
        ("open_existing", errno.EACCES, ("io", False)),
        ("read", errno.EIO, ("io", False)),
        ("lock", errno.EMFILE, ("io", False)),
        ("open_folder", errno.EACCES, ("io", False)),
        ("open_folder", errno.ENOMEM, ("memory", False)),
        ("flush_folder", errno.EIO, ("io", True)),
        ("flush_folder", errno.ENOSPC, ("storage", True)),
    ],
)
def test_failures_have_their_kind(call, code, outcome, target, monkeypatch):
    use(monkeypatch, Recording(2 if call == "close" else 1, code, call))  # the first one is that of the older file
    error = refusal(write_sample, target)
    assert (error.kind, error.published) == outcome
    assert os.strerror(code) in str(error)
    if error.published:
        assert "replaced" in str(error)
        assert verify_session(target).size_bytes == SAMPLE_BYTES
        assert os.listdir(target.parent) == [target.name]
    else:
        assert_untouched(target)


@pytest.mark.parametrize("buffered", ["0", "1"])
def test_whichever_call_fails_the_folder_holds_one_whole_file(buffered, target, monkeypatch):
    monkeypatch.setenv("STRATA_SESSION_BUFFERED", buffered)
    failed = 0
    for number in range(1, 100):
        target.write_bytes(OLD)
        system = use(monkeypatch, Recording(number, errno.EIO))
        kind, published = "", True
        try:
            write_session(target, image("ckpt1_images_2kv"), identity("ckpt1_images_2kv"), reserve_bytes=1)
        except SessionError as error:
            kind, published = error.kind, error.published
        assert kind in ("", "io")
        failed += bool(kind)
        monkeypatch.setattr(blockfile, "system", disksystem.PosixSystem())
        if published:
            assert target.read_bytes() == (DATA / "ckpt1_images_2kv.bin").read_bytes()
            assert os.listdir(target.parent) == [target.name]
        else:
            assert_untouched(target)
        if number > len(system.calls):
            break
    assert failed >= 8
    assert number > failed


def test_a_temporary_file_that_stays_is_named(target, monkeypatch):
    class Stuck(disksystem.PosixSystem):
        def flush(self, descriptor):
            raise OSError(errno.EIO, "no flush")

        def unlink(self, folder, name):
            raise OSError(errno.EACCES, "no unlink")

    use(monkeypatch, Stuck())
    error = refusal(write_sample, target)
    (left,) = set(os.listdir(target.parent)) - {target.name}
    assert left in str(error)
    assert "no flush" in str(error)
    assert target.read_bytes() == OLD
    assert [entry.name for entry in list_sessions(target.parent)] == [target.name], "what is left is not listed"


def test_a_folder_that_cannot_be_flushed_is_no_failure(target, monkeypatch):
    use(monkeypatch, Recording(1, errno.EINVAL, "flush_folder"))
    told = []
    assert write_sample(target, warn=told.append) == SAMPLE_BYTES
    assert len(told) == 1
    assert "folder flush unsupported" in told[0]
    use(monkeypatch, Recording())
    write_sample(target, warn=told.append)
    assert len(told) == 1


def test_no_memory_for_a_block(target, monkeypatch):
    for error in (OSError(errno.ENOMEM, "no memory"), MemoryError()):

        def refuse(file_bytes, error=error):
            raise error

        monkeypatch.setattr(blockfile, "allocate_block", refuse)
        assert refusal(write_sample, target).kind == "memory"
        assert_untouched(target)


def test_disk_space(target, monkeypatch):
    error = refusal(write_sample, target, reserve_bytes=(1 << 63) - 1)
    assert (error.kind, error.reason) == ("storage", "disk-space")
    assert "disk space" in str(error)
    assert_untouched(target)
    write_sample(target, reserve_bytes=1)

    class Room(disksystem.PosixSystem):
        def __init__(self, free):
            self.free = free

        def free_bytes(self, folder):
            assert folder == str(target.parent)
            return self.free

    for free, fits in ((SAMPLE_BYTES + 9, False), (SAMPLE_BYTES + 10, True), (SAMPLE_BYTES - 1, False)):
        use(monkeypatch, Room(free))
        if fits:
            write_sample(target, reserve_bytes=10)
        else:
            assert refusal(write_sample, target, reserve_bytes=10).kind == "storage"
    use(monkeypatch, Recording(1, errno.EACCES, "free_bytes"))
    assert refusal(write_sample, target, reserve_bytes=10).kind == "io"


# --- Memory and death ---


def test_two_blocks_at_most(target, monkeypatch):
    alive, most = weakref.WeakSet(), 0
    allocate = blockfile.allocate_block

    def counted(file_bytes):
        nonlocal most
        block = allocate(file_bytes)
        alive.add(block.base.obj)  # the mapping, which lives as long as any view of it
        most = max(most, len(alive))
        return block

    monkeypatch.setattr(blockfile, "allocate_block", counted)
    write_session(target, bare_image(), Identity(1, 2), [Pattern(50 << 20)])
    assert most == 2
    assert len(alive) == 0


def test_the_writer_counts_its_bytes(target):
    with BlockWriter(str(target), 11) as writer:
        writer.advance(10)
        with pytest.raises(AssertionError, match="10 bytes were written of 11"):
            writer.publish()
    assert_untouched(target)


KILLED = """
import os, signal, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from given_images import Pattern, bare_image
from sessionfile import Identity, write_session

class Deadly(Pattern):
    def read(self, part, offset, out):
        if offset >= {offset}:
            os.kill(os.getpid(), signal.SIGKILL)
        super().read(part, offset, out)

write_session({path!r}, bare_image(), Identity(1, 2), [Deadly(40 << 20)])
"""


@pytest.mark.kills
def test_a_killed_process_leaves_the_old_file_and_a_hidden_one(target):
    script = KILLED.format(root=str(ROOT), path=str(target), offset=20 << 20)
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == -9
    assert target.read_bytes() == OLD
    (left,) = set(os.listdir(target.parent)) - {target.name}
    assert re.fullmatch(r"\.chat\.bin\.[0-9a-f]{16}\.tmp", left)
    write_sample(target)
    assert [entry.name for entry in list_sessions(target.parent)] == [target.name]


class Holes(disksystem.PosixSystem):
    """Leaves blocks of zeros out of the file, and reads them without the disk."""

    def write(self, descriptor, data, offset):
        return super().write(descriptor, data, offset) if data.any() else data.size

    def read(self, descriptor, data, offset):
        try:
            if os.lseek(descriptor, offset, os.SEEK_DATA) < offset + data.size:
                return super().read(descriptor, data, offset)
        except OSError as error:
            if error.errno != errno.ENXIO:  # which says that from here on there is nothing but a hole
                raise
        data[:] = 0
        return data.size


class Zeros(Pattern):
    def read(self, part, offset, out):
        out[:] = 0


@pytest.mark.slow
def test_sizes_past_32_bits(target, monkeypatch):
    use(monkeypatch, Holes())
    large = (4 << 30) + 1
    size = write_session(target, bare_image(), Identity(1, 2), [Zeros(large)])
    assert target.stat().st_size == size > 1 << 32
    assert target.stat().st_blocks * 512 < 100 << 20
    info = verify_session(target)
    assert (info.size_bytes, info.image.kv[0].part_sizes) == (size, (large, 0, 3, 0, 0))
