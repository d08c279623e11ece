"""Session files, format v1: golden files, round trips, estimates, limits and the order of a reader's checks."""

import errno
import json
import os
import socket
import struct
import tracemalloc

import numpy as np
import pytest

import blockfile
from blockfile import BLOCK_BYTES, free_space_folder
from checksum import hash64
from given_images import ARRAYS, DATA, IMAGES, READABLE, SMALL, UNREADABLE, identity, image, number, plain, seal
from sessionfile import (
    Checkpoint,
    Identity,
    Limits,
    SessionError,
    SessionReader,
    deepest,
    inspect_session,
    list_sessions,
    peek_session,
    read_peak_bytes,
    read_session,
    save_peak_bytes,
    stream_peak_bytes,
    verify_session,
    write_session,
)
from verbs import allowance_s

FORMULAS = json.loads((DATA / "formula_vectors.json").read_text())
NEGATIVES = json.loads((DATA / "negatives.json").read_text())["cases"]
OPEN_LIMITS = Limits()


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A file of two blocks with two checkpoints and three layers, and what its writing reported."""
    path = tmp_path_factory.mktemp("sample") / "sample.bin"
    reports = []
    size = write_session(
        path,
        image("sample"),
        identity("sample"),
        progress=lambda *report: reports.append(report),
        phase=lambda *report: reports.append(report),
    )
    return path, size, reports


def refusal(call, *arguments, **named) -> SessionError:
    with pytest.raises(SessionError) as caught:
        call(*arguments, **named)
    return caught.value


# --- Golden files ---


@pytest.mark.parametrize("name", SMALL)
def test_golden_files_are_written_byte_for_byte(name, tmp_path):
    size = write_session(tmp_path / "a.bin", image(name), identity(name))
    written = (tmp_path / "a.bin").read_bytes()
    assert written == (DATA / f"{name}.bin").read_bytes()
    assert len(written) == size == IMAGES[name]["file"]["size"]
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("name", READABLE)
def test_golden_files_read_and_come_out_the_same(name, tmp_path):
    read = read_session(DATA / f"{name}.bin", identity(name), OPEN_LIMITS)
    assert plain(read) == plain(image(name))
    write_session(tmp_path / "again.bin", read, identity(name))
    assert (tmp_path / "again.bin").read_bytes() == (DATA / f"{name}.bin").read_bytes()
    assert hash64((DATA / f"{name}.bin").read_bytes()) == number(IMAGES[name]["file"]["hash64_seed0"])


@pytest.mark.parametrize("name", UNREADABLE)
def test_several_empty_checkpoints_are_written_and_refused(name):
    error = refusal(read_session, DATA / f"{name}.bin", identity(name), OPEN_LIMITS)
    assert (error.kind, error.reason) == ("invalid", "count-payload")


def test_sample_file(sample):
    path, size, _ = sample
    data = path.read_bytes()
    file = IMAGES["sample"]["file"]
    assert size == len(data) == file["size"]
    assert hash64(data) == number(file["hash64_seed0"])
    magic, version, header_bytes, model, config, payload, *reserved, stored = struct.unpack("<8sIIQQQQQQ", data[:64])
    assert (magic, version, header_bytes) == (b"STRSESS\x01", 1, 64)
    assert (model, config) == identity("sample")
    assert (payload, reserved) == (file["payload_bytes"], [0, 0])
    assert stored == number(file["header_hash"]) == hash64(data[:56])
    assert data[-16:] == struct.pack("<Q", number(file["payload_hash"])) + b"STRSEND\x01"


def test_sample_reads_equal(sample):
    path, size, _ = sample
    reports = []
    read = read_session(path, identity("sample"), OPEN_LIMITS, progress=lambda *report: reports.append(report))
    assert plain(read) == plain(image("sample"))
    assert reports == [(BLOCK_BYTES, size), (size, size)]


def test_progress_of_a_small_read():
    path = DATA / "min_empty.bin"
    reports = []
    read_session(path, identity("min_empty"), OPEN_LIMITS, progress=lambda *report: reports.append(report))
    assert reports == [(328, 328)]


# --- The order of checks ---


def patched(case: dict) -> bytes:
    """The bytes of a negative case."""
    data = bytearray((DATA / f"{case['base']}.bin").read_bytes())
    for operation, *values in case["ops"]:
        match operation, values:
            case "truncate", [size]:
                del data[size:]
            case "append", [text]:
                data += bytes.fromhex(text)
            case "xor", [offset, mask]:
                data[offset] ^= mask
            case "u64", [offset, value]:
                struct.pack_into("<Q", data, offset, number(value))
            case "u32", [offset, value]:
                struct.pack_into("<I", data, offset, value)
            case "insert", [offset, text]:
                data[offset:offset] = bytes.fromhex(text)
            case "delete", [offset, size]:
                del data[offset : offset + size]
            case "payload_len", []:
                struct.pack_into("<Q", data, 32, len(data) - 80)
            case "payload_hash", []:
                struct.pack_into("<Q", data, len(data) - 16, hash64(bytes(data[64:-16])))
            case "header_hash", []:
                struct.pack_into("<Q", data, 56, hash64(bytes(data[:56])))
            case _:
                raise ValueError(operation)
    return bytes(data)


def limits_of(description: dict | None) -> Limits:
    def convert(value):
        return tuple(convert(entry) for entry in value) if isinstance(value, list) else number(value)

    return Limits(**{name: convert(value) for name, value in (description or {}).items()})


def admission(case: dict):
    allowed = number(case.get("admit", 0))
    return (lambda need: None if need <= allowed else f"no room for {need}") if allowed else None


@pytest.mark.parametrize("case", NEGATIVES, ids=lambda case: case["note"])
def test_order_of_checks(case, tmp_path):
    path = tmp_path / "case.bin"
    path.write_bytes(patched(case))
    known = identity(case["base"])
    known = Identity(number(case.get("model", known.model)), number(case.get("config", known.config)))
    expected = case["expect"]
    if expected["ok"]:
        read_session(path, known, limits_of(case.get("limits")), admit=admission(case))
        return
    error = refusal(read_session, path, known, limits_of(case.get("limits")), admit=admission(case))
    assert (error.kind, error.reason) == (expected["kind"], expected["reason"])
    if error.kind == "invalid":
        assert f"offset {error.offset}: expected {error.expected}, found {error.found}" in str(error)
        assert error.section in str(error)


@pytest.mark.parametrize("case", [case for case in NEGATIVES if "admit" not in case], ids=lambda case: case["note"])
def test_first_pass_of_a_restore_has_the_same_order(case, tmp_path):
    path = tmp_path / "case.bin"
    path.write_bytes(patched(case))
    known = identity(case["base"])
    known = Identity(number(case.get("model", known.model)), number(case.get("config", known.config)))
    for keep_state in (True, False):
        reader = SessionReader(path, known, limits_of(case.get("limits")), keep_state=keep_state)
        if case["expect"]["ok"]:
            with reader:
                assert reader.size_bytes == len(path.read_bytes())
        else:
            error = refusal(reader.__enter__)
            assert (error.kind, error.reason) == (case["expect"]["kind"], case["expect"]["reason"])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model": Identity(1, 0x5555666677778888)}, "model"),
        ({"model": Identity(0x1111222233334444, 2)}, "config"),
        ({"limits": Limits(max_tokens=999)}, "limit"),
        ({"limits": Limits(max_checkpoints=1)}, "limit"),
        ({"limits": Limits(max_kv_layers=2)}, "limit"),
        ({"limits": Limits(max_file_bytes=17_878_534)}, "limit"),
        ({"limits": Limits(geometry=(0,) * 18)}, "geometry"),
        ({"limits": Limits(layer_range=(0, 24))}, "layer"),
    ],
    ids=str,
)
def test_refusals_name_their_cause(sample, change, word):
    known, limits = change.get("model", identity("sample")), change.get("limits", OPEN_LIMITS)
    assert word in str(refusal(read_session, sample[0], known, limits))


def test_version_and_counts_and_size_are_named(tmp_path):
    base = (DATA / "nockpt_1kv_cvec.bin").read_bytes()
    known = identity("nockpt_1kv_cvec")
    for change, words in (
        (lambda data: data.__setitem__(8, 2), ("version", "found 2")),
        (lambda data: struct.pack_into("<Q", data, 232, 1 << 59), ("count", str(1 << 59))),
    ):
        data = bytearray(base)
        change(data)
        (tmp_path / "a.bin").write_bytes(seal(data))
        error = refusal(read_session, tmp_path / "a.bin", known, OPEN_LIMITS)
        assert all(word in str(error) for word in words)
    (tmp_path / "a.bin").write_bytes(base + b"x")
    assert "size" in str(refusal(read_session, tmp_path / "a.bin", known, OPEN_LIMITS))


def exact_limits(**change) -> Limits:
    """The limits that the sample keeps to without a byte to spare."""
    described = next(entry for entry in FORMULAS["limits"] if entry["note"].endswith("exact limits"))
    names = ("max_file_bytes", "max_tokens", "max_checkpoints", "max_kv_layers", "max_state_bytes", "max_kv_bytes")
    exact = {name: described[name] for name in names}
    exact |= {"geometry": list(range(100, 118)), "layer_range": [0, 48]}
    return limits_of(exact | change)


def test_exact_limits(sample):
    path, size, _ = sample
    limits = exact_limits()
    assert plain(read_session(path, identity("sample"), limits), kv=False) == plain(image("sample"), kv=False)
    assert size <= limits.largest_file() < 2**64 - 1
    for index, name in ((0, "gdn"), (4, "block_pos")):
        state = list(limits.max_state_bytes)
        state[index] -= 1
        error = refusal(read_session, path, identity("sample"), exact_limits(max_state_bytes=state))
        assert error.reason in ("count-limit", "too-big"), name
        assert "limit" in str(error)
    for layer, part in ((0, 0), (2, 1)):
        kv = [list(parts) for parts in limits.max_kv_bytes]
        kv[layer][part] -= 1
        error = refusal(read_session, path, identity("sample"), exact_limits(max_kv_bytes=kv))
        assert "limit" in str(error)


def test_counts_are_bounded_before_anything_is_allocated(tmp_path):
    data = bytearray((DATA / "nockpt_1kv_cvec.bin").read_bytes())
    gdn_count = 64 + 168 + 8 + 4 * 7 + 8  # header, fixed part, token count, tokens, image count
    assert struct.unpack_from("<Q", data, gdn_count) == (96,)
    struct.pack_into("<Q", data, gdn_count, 3 << 30)
    (tmp_path / "a.bin").write_bytes(seal(data))
    known = identity("nockpt_1kv_cvec")
    read_session(DATA / "nockpt_1kv_cvec.bin", known, OPEN_LIMITS)  # compiles what is compiled once
    tracemalloc.start()
    try:
        error = refusal(read_session, tmp_path / "a.bin", known, OPEN_LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert error.reason == "count-payload"
    assert error.offset == gdn_count


# --- Admission and estimates ---


def test_admission_is_asked_exactly_the_peak(sample):
    path, size, _ = sample
    asked = []

    def refuse(need):
        asked.append(need)
        return "the memory is promised to others"

    error = refusal(read_session, path, identity("sample"), OPEN_LIMITS, admit=refuse)
    assert (error.kind, str(error)) == ("memory", "the memory is promised to others")
    assert asked == [read_peak_bytes(size)]
    assert asked[0] > size
    limits = exact_limits()
    refusal(SessionReader(path, identity("sample"), limits, admit=refuse).__enter__)
    assert asked[1] == stream_peak_bytes(size, limits)
    refusal(read_session, path, Identity(1, 2), OPEN_LIMITS, admit=refuse)
    assert len(asked) == 2, "asked for a file of another model"
    read_session(path, identity("sample"), OPEN_LIMITS, admit=lambda need: None)


def test_streaming_needs_less_than_reading(sample):
    big = 1_198_691_396
    assert stream_peak_bytes(big, exact_limits()) < read_peak_bytes(big)


@pytest.mark.parametrize(("size", "peak"), FORMULAS["read_peak_bytes"])
def test_read_peak(size, peak):
    assert read_peak_bytes(number(size)) == number(peak)


@pytest.mark.parametrize(("size", "allowance"), FORMULAS["phase_limit_s"])
def test_phase_allowance(size, allowance):
    assert allowance_s(number(size)) == allowance


@pytest.mark.parametrize("vector", FORMULAS["limits"], ids=lambda vector: vector["note"])
def test_largest_file_and_stream_peak(vector):
    names = ("max_file_bytes", "max_tokens", "max_checkpoints", "max_kv_layers", "max_state_bytes", "max_kv_bytes")
    limits = limits_of({name: vector[name] for name in names})
    assert limits.largest_file() == number(vector["read_max_file_bytes"])
    for size, peak in vector["stream_peak"]:
        assert stream_peak_bytes(number(size), limits) == number(peak)


@pytest.mark.parametrize("vector", FORMULAS["save_peak"], ids=lambda vector: vector["peak"])
def test_save_peak(vector):
    names = ("state_bytes", "tokens", "images", "kv_layers")
    peak = save_peak_bytes(vector["deepest_bytes"] or 0, *(number(vector[name]) for name in names))
    assert peak == number(vector["peak"])


@pytest.mark.parametrize("vector", FORMULAS["free_space_dir"], ids=lambda vector: vector["path"])
def test_free_space_folder(vector):
    assert free_space_folder(vector["path"]) == vector["posix"]
    assert free_space_folder(vector["path"], windows=True) == vector["windows"]


def test_deepest_checkpoint():
    def chain(*marks):
        return [Checkpoint(np.arange(n, dtype=np.int32), pinned=pinned) for n, pinned in marks]

    assert deepest([]) is None
    plain_chain = chain((3, False), (9, False), (9, False), (5, False))
    assert deepest(plain_chain) is plain_chain[1]
    pinned_chain = chain((3, True), (9, False), (5, True), (1, True))
    assert deepest(pinned_chain) is pinned_chain[2]


# --- What is no session file ---


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b'\x40\0\0\0\0\0\0\0{"a":', "safetensors"),
        (b"qsgg\x02\0\0\0", "llama.cpp slot file"),
        (b"nsgg\x09\0\0\0", "llama.cpp session file"),
        (b"PK\x03\x04", "zip"),
        (b"A letter to a friend, " * 4, "text"),
        (b"STRSESS\x02", "layout 2"),
        (b"\0\1\2\3", "not a session file"),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_foreign_files_are_named(start, name, tmp_path):
    (tmp_path / "a.bin").write_bytes(start.ljust(400, b"." if start[:1] == b"A" else b"\0"))
    error = refusal(read_session, tmp_path / "a.bin", Identity(0, 0), OPEN_LIMITS)
    assert (error.kind, error.reason) == ("invalid", "magic")
    assert name in str(error)
    assert "session file" in str(error)


def test_a_huge_empty_file_is_refused_at_once(tmp_path):
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(100 << 30)
    reports = []
    error = refusal(
        read_session, tmp_path / "sparse.bin", Identity(0, 0), OPEN_LIMITS, progress=lambda *r: reports.append(r)
    )
    assert error.reason == "magic"
    assert len(reports) == 1, "read past the first block"


def test_links_folders_pipes_sockets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    file = tmp_path / "a.bin"
    file.write_bytes((DATA / "min_empty.bin").read_bytes())
    os.symlink(file, "link.bin")
    os.mkfifo("pipe.bin")
    os.mkdir("folder.bin")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket.bin")
    for name, reason, words in (
        ("link.bin", "symlink", "symbolic link"),
        ("pipe.bin", "not-regular", "not a regular file"),
        ("folder.bin", "not-regular", "not a regular file"),
        ("socket.bin", "not-regular", "not a regular file"),
        ("/dev/null", "not-regular", "not a regular file"),
    ):
        for call in (verify_session, inspect_session, lambda path: read_session(path, Identity(0, 0), OPEN_LIMITS)):
            error = refusal(call, name)
            assert (error.kind, error.reason) == ("invalid", reason), name
            assert words in str(error)
    listener.close()
    os.link(file, "second.bin")
    error = refusal(read_session, file, Identity(0, 0), OPEN_LIMITS)
    assert (error.kind, error.reason) == ("invalid", "hard-link")
    assert "hard link" in str(error)
    os.unlink("second.bin")
    read_session(file, Identity(0, 0), OPEN_LIMITS)


def test_missing_files_and_bad_paths_are_io(tmp_path):
    for path in (tmp_path / "none.bin", tmp_path / "no" / "folder.bin", "", "a\0b", "a\ud800b"):
        assert refusal(read_session, path, Identity(0, 0), OPEN_LIMITS).kind == "io"


# --- Failures of the system while reading ---


class FailingSystem(blockfile.PosixSystem):
    """Lets the n-th of the named calls fail."""

    def __init__(self, name: str, number: int, code: int):
        def fail(*arguments):
            self.left -= 1
            if self.left == 0:
                raise OSError(code, os.strerror(code))
            return getattr(blockfile.PosixSystem, name)(self, *arguments)

        self.left = number
        setattr(self, name, fail)


@pytest.mark.parametrize("name", ["open_existing", "status", "set_blocking", "read"])
def test_a_failing_call_while_reading(name, sample, monkeypatch):
    for code, kind in ((errno.EIO, "io"), (errno.ENOMEM, "memory")):
        monkeypatch.setattr(blockfile, "system", FailingSystem(name, 1, code))
        for call in (verify_session, lambda path: read_session(path, identity("sample"), OPEN_LIMITS)):
            monkeypatch.setattr(blockfile, "system", FailingSystem(name, 1, code))
            assert refusal(call, sample[0]).kind == kind


def test_a_failing_read_of_the_second_block(sample, monkeypatch):
    monkeypatch.setattr(blockfile, "system", FailingSystem("read", 2, errno.EIO))
    error = refusal(read_session, sample[0], identity("sample"), OPEN_LIMITS)
    assert (error.kind, error.reason) == ("io", "os")


def test_short_reads_are_gone_on_with(sample, monkeypatch):
    class ShortReads(blockfile.PosixSystem):
        def read(self, descriptor, data, offset):
            return super().read(descriptor, data[: data.size // 3 + 1], offset)

    monkeypatch.setattr(blockfile, "system", ShortReads())
    assert plain(read_session(sample[0], identity("sample"), OPEN_LIMITS)) == plain(image("sample"))


def test_a_file_that_becomes_shorter_while_it_is_read(sample, monkeypatch):
    class Shrinking(blockfile.PosixSystem):
        def read(self, descriptor, data, offset):
            return 0 if offset else super().read(descriptor, data, offset)

    monkeypatch.setattr(blockfile, "system", Shrinking())
    error = refusal(read_session, sample[0], identity("sample"), OPEN_LIMITS)
    assert error.kind == "io"
    assert "shorter" in str(error)


def test_no_memory_for_a_block(sample, monkeypatch):
    def refuse(file_bytes):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(blockfile, "allocate_block", refuse)
    assert refusal(read_session, sample[0], identity("sample"), OPEN_LIMITS).kind == "memory"


def test_no_memory_for_the_contents(sample, monkeypatch):
    real = np.empty

    def refuse(size, *arguments):
        if isinstance(size, int) and size > 1 << 20:
            raise MemoryError
        return real(size, *arguments)

    monkeypatch.setattr(np, "empty", refuse)
    assert refusal(read_session, sample[0], identity("sample"), OPEN_LIMITS).kind == "memory"


# --- Looking into files ---


def test_verify_and_inspect_agree(sample):
    for path, name in ((sample[0], "sample"), *((DATA / f"{name}.bin", name) for name in READABLE)):
        looked, proved = inspect_session(path), verify_session(path)
        assert looked.as_dict() == proved.as_dict()
        full = image(name)
        assert looked.identity == identity(name)
        assert looked.payload_hash == number(IMAGES[name]["file"]["payload_hash"])
        assert [record.n_tokens for record in looked.image.records] == [record.n_tokens for record in full.records]
        assert [record.n_images for record in looked.image.records] == [record.n_images for record in full.records]
        assert [layer.part_sizes for layer in looked.image.kv] == [layer.part_sizes for layer in full.kv]
        assert looked.state_bytes == sum(array.size for record in full.records for array in record.state)
        assert looked.kv_bytes == sum(sum(layer.part_sizes) for layer in full.kv)
        live = looked.as_dict()["live"]["state_bytes"]
        assert live == {name: getattr(full.live, name).size for name in ARRAYS}


def test_inspecting_reads_only_header_and_structure(sample, monkeypatch):
    sizes = []

    class Counting(blockfile.PosixSystem):
        def read(self, descriptor, data, offset):
            sizes.append(data.size)
            return super().read(descriptor, data, offset)

    monkeypatch.setattr(blockfile, "system", Counting())
    inspect_session(sample[0])
    assert sum(sizes) < 4096


def test_verifying_finds_what_inspecting_steps_over(sample, tmp_path):
    data = bytearray(sample[0].read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.bin").write_bytes(data)
    inspect_session(tmp_path / "a.bin")
    error = refusal(verify_session, tmp_path / "a.bin")
    assert (error.reason, error.offset) == ("payload-hash", len(data) - 16)


def test_listing_a_folder(tmp_path):
    for name in ("nockpt_1kv_cvec", "ckpt1_images_2kv"):
        (tmp_path / f"{name}.bin").write_bytes((DATA / f"{name}.bin").read_bytes())
    (tmp_path / "cut.bin").write_bytes((DATA / "nockpt_1kv_cvec.bin").read_bytes()[:500])
    (tmp_path / ".a.0123456789abcdef.tmp").write_bytes((DATA / "min_empty.bin").read_bytes())
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.bin").symlink_to(tmp_path / "nockpt_1kv_cvec.bin")
    entries = list_sessions(tmp_path)
    assert [entry.name for entry in entries] == ["ckpt1_images_2kv.bin", "cut.bin", "nockpt_1kv_cvec.bin"]
    assert [entry.n_tokens for entry in entries] == [8, 0, 7]
    assert entries[1].refusal.reason == "size-mismatch"
    assert entries[2] == peek_session(tmp_path / "nockpt_1kv_cvec.bin")
    assert entries[2].identity == identity("nockpt_1kv_cvec")
    assert refusal(list_sessions, tmp_path / "none").kind == "io"


def test_peeking_at_a_file_without_a_live_record(tmp_path):
    for size, reason in ((0, "payload-short"), (100, "payload-short"), (175, "payload-short"), (176, "")):
        data = bytearray((DATA / "min_empty.bin").read_bytes())
        (tmp_path / "a.bin").write_bytes(seal(data[:64] + data[64 : 64 + size] + data[-16:]))
        if reason:
            assert refusal(peek_session, tmp_path / "a.bin").reason == reason
        else:
            assert peek_session(tmp_path / "a.bin").n_tokens == 0


def cached(path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return blockfile._is_cached(descriptor, os.path.getsize(path))
    finally:
        os.close(descriptor)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system does not tell what is cached")
@pytest.mark.parametrize("was_cached", [True, False])
def test_the_page_cache_is_left_as_it_was_found(tmp_path, sample, was_cached):
    path = tmp_path / "a.bin"
    path.write_bytes(sample[0].read_bytes())
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        if not was_cached:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(path) is not was_cached:
        pytest.skip("this file system keeps files in the cache, or out of it")
    verify_session(path)
    assert cached(path) is was_cached
