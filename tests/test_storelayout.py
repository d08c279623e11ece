"""The bytes of a store file: a plain writer of its own, random shapes, and heads that were made to hurt."""

import hashlib
import itertools
import random
import struct
import tracemalloc

import numpy as np
import pytest

import blockfile
import storelayout as layout
from cells import FORMATS
from given_kernels import CPU
from given_store import IDENTITY, SHAPE, empty_windows, ids_of, kept, random_shape, state_arrays, write
from kvcache import Cache, CacheShape
from plainhash import hash64
from storefile import StoreReader, arrays_of, cells_of, read_head
from storeflush import segments_of, state_at
from storelayout import Head, Shape, StoreError

BLOCK_BYTES = 8192


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", BLOCK_BYTES)


def plain_bytes(kept, *, with_draft: bool) -> bytes:
    """A whole file as the manual page says it, with nothing of the code but the plain hash."""

    def key(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    layers = [units for i, units in enumerate(kept.shape.layers)]
    raw = struct.pack(f"<{len(kept.ids)}i", *kept.ids.tolist())
    parent, segments, payload = key(kept.identity), b"", b""
    parents = []
    for i in range(0, len(kept.ids), 256):
        parents.append(parent)
        ids = raw[4 * i : 4 * (i + 256)]
        n = len(ids) // 4
        segments += struct.pack("<16sIHBB", parent, i // 256, n, with_draft, 0)
        for layer, units in enumerate(layers if with_draft else layers[:-1]):
            for part, unit in enumerate(units):
                first, last = (i // 4, -(-(i + n) // 4)) if part < 4 else (i // 4, (i + n) // 4)
                payload += kept.windows[layer].parts[part].tobytes()[first * unit : last * unit]
        parent = key(parent + ids)
    states, state_ids = b"", b""
    for offer in kept.states:
        full = offer.position // 256
        states += struct.pack("<16sIIQ", (*parents, parent)[full], offer.position, offer.kind, offer.used)
        state_ids += raw[1024 * full : 4 * offer.position]
        payload += b"".join(array.tobytes() for array in offer.arrays())
    table = b"".join(struct.pack("<5I", *units) for units in layers) + segments + states + raw + state_ids
    table += kept.label.encode()
    counts = len(layers), len(parents), len(kept.states), len(kept.label.encode())
    header = b"STRSTOR\x01" + struct.pack("<II", 1, 128) + kept.identity + struct.pack("<QQ", len(table), len(payload))
    header += struct.pack("<6I", *counts, 1, 0) + struct.pack("<5Q", *kept.shape.state_sizes)
    digest = hashlib.blake2b(header + table, digest_size=32).digest()
    stream = header + digest + table + payload + b"STRSTEN\x01"
    pieces = [stream[at : at + BLOCK_BYTES - 8] for at in range(0, len(stream), BLOCK_BYTES - 8)]
    (seed,) = struct.unpack("<Q", digest[:8])
    return b"".join(piece + struct.pack("<Q", hash64(piece, (seed + i) % 2**64)) for i, piece in enumerate(pieces))


@pytest.mark.parametrize("n_drafted", [0, 1 << 30])
@pytest.mark.parametrize("n_tokens", [1, 256, 259, 700])
def test_a_file_is_byte_for_byte_what_the_page_says(n_tokens, n_drafted, tmp_path):
    what = kept(ids_of(n_tokens, 3), [n_tokens, max(1, n_tokens // 2)], n_drafted=n_drafted, root=1, label="Größe?")
    head = write(tmp_path / "a", what)
    data = (tmp_path / "a").read_bytes()
    assert data == plain_bytes(what, with_draft=n_drafted > 0)
    assert len(data) == head.file_bytes
    found = read_head(str(tmp_path / "a"))
    assert found.head == head
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_round_trips_of_random_shapes(tmp_path):
    rng = random.Random(5)
    for number in range(60):
        shape, n_tokens = random_shape(rng), rng.randrange(1, 900)
        ids, positions = ids_of(n_tokens, number), sorted({rng.randrange(1, n_tokens + 1) for _ in range(3)})
        n_drafted = rng.choice((0, 256, 1 << 30))
        what = kept(ids, positions, shape=shape, identity=rng.randbytes(32), n_drafted=n_drafted, label="x" * number)
        path = tmp_path / str(number)
        segments = [s._replace(n_skipped=rng.randrange(s.n_tokens) // 4 * 4) for s in segments_of(what)]
        head = write(path, what, segments)
        with StoreReader(str(path)) as reader:
            assert reader.head == head
            reader.verify()
            order = list(range(len(head.offsets)))
            rng.shuffle(order)
            expected = [np.concatenate([pulled(pull) for pull in pulls] or [np.empty(0, np.uint8)])
                        for pulls in [cells_of(s, shape, what.windows) for s in head.segments]
                        + [arrays_of(offer.arrays()) for offer in what.states]]  # fmt: skip
            for index in order:
                assert np.array_equal(pulled(reader.pull(index)), expected[index])


def pulled(pull) -> np.ndarray:
    out = np.empty(pull.size, np.uint8)
    pull.read(0, out)
    return out


def test_keys_chain_over_all_ids_before():
    ids = ids_of(1024, 1)
    keys = [segment.key for segment in segments_of(kept(ids))]
    other = ids.copy()
    other[0] += 1
    assert not set(keys) & {segment.key for segment in segments_of(kept(other))}
    assert not set(keys) & {segment.key for segment in segments_of(kept(ids, identity=bytes(32)))}
    assert keys == [segment.key for segment in segments_of(kept(np.append(ids, 7)))][:4]


@pytest.mark.parametrize("cells", FORMATS)
def test_a_shape_is_that_of_the_pools(cells):
    """The windows of a real cache are sources and sinks as they are, whatever the format of its cells."""
    geometry = (8, 4, 2, 4, 2, 2, 4, 8, 8, 4, 2, 64, 1, 16, 0, 0, 0, 0)
    shape = CacheShape(geometry, 2, 2, True, 2, 64, 16, 64, 1024, FORMATS[cells], FORMATS["fp16"])
    cache = Cache(shape, CPU)
    for pool in cache._all_pools:
        for array in (pool.k, pool.v, pool.k_scale, pool.v_scale, pool.pooled):
            flat = array.reshape(-1).view(np.uint8)
            flat[:] = np.random.default_rng(0).integers(0, 256, flat.size, np.uint8)
    ids = ids_of(700, 4)
    mine = {n: Shape.of(cache.windows(n), True, shape.state_sizes) for n in (1, 4, 700, 1024)}
    assert len(set(mine.values())) == 1
    windows = cache.windows(700)
    for segment in segments_of(kept(ids)):
        for part in segment.parts(mine[1]):
            assert part.pool_offset + part.size <= windows[part.layer].part_sizes[part.part]
    parts = [part for segment in segments_of(kept(ids)) for part in segment.parts(mine[1])]
    copied = [
        sum(part.size for part in parts if (part.layer, part.part) == place)
        for place in itertools.product(range(3), range(5))
    ]
    rows = [size - 4 * 16 if part == 4 and size else size for w in windows for part, size in enumerate(w.part_sizes)]
    assert copied == rows, "all bytes of a window but the spare row of the pooled keys"


# --- heads that lie


def reseal(data: bytes) -> bytes:
    """A file whose hash and checksums are right again, whatever its head says."""
    pieces = [data[at : at + BLOCK_BYTES][:-8] for at in range(0, len(data), BLOCK_BYTES)]
    stream = bytearray(b"".join(pieces))
    (table_bytes,) = struct.unpack_from("<Q", stream, 48)
    end = min(160 + table_bytes, len(stream))
    stream[128:160] = hashlib.blake2b(bytes(stream[:128] + stream[160:end]), digest_size=32).digest()
    (seed,) = struct.unpack_from("<Q", stream, 128)
    pieces = [bytes(stream[at : at + BLOCK_BYTES - 8]) for at in range(0, len(stream), BLOCK_BYTES - 8)]
    return b"".join(piece + struct.pack("<Q", hash64(piece, (seed + i) % 2**64)) for i, piece in enumerate(pieces))


class Checked:
    """Sinks that take only what lies in the pools of the shape."""

    def __init__(self, sizes):
        self.part_sizes = sizes

    def write(self, part, offset, data):
        assert 0 <= offset <= offset + data.size <= self.part_sizes[part]


def use(path, shape: Shape, n_tokens: int) -> None:
    """All that an engine does with a file."""
    found = read_head(str(path))
    with StoreReader(str(path), found.hash) as reader:
        reader.verify()
        sinks = [Checked(window.part_sizes) for window in empty_windows(shape, n_tokens)]
        for number, segment in enumerate(reader.head.segments):
            if segment.end <= n_tokens:
                reader.segment(number, shape, sinks)
        for number in range(len(reader.head.states)):
            reader.state(number, shape, Checked(shape.state_sizes))


def is_refused(path) -> bool:
    try:
        use(path, SHAPE, 300)
    except StoreError as error:
        return error.kind == "invalid" and str(path) in str(error)  # any other refusal counts as none
    return False


HOSTILE = [0, 1, 2, 255, 257, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]


@pytest.mark.faults
def test_a_sealed_head_with_hostile_values_is_refused_or_harmless(tmp_path):
    """Each field and each record of the head takes values that were made to hurt; memory stays small."""
    what = kept(ids_of(300, 1), [300, 7], label="abc")
    write(tmp_path / "a", what)
    good = (tmp_path / "a").read_bytes()
    head_end = read_head(str(tmp_path / "a")).head.head_bytes
    records_end = 160 + 3 * 20 + 2 * 24 + 2 * 32
    path, refused, tried = tmp_path / "b", 0, 0
    tracemalloc.start()
    for at, size in [(at, 4) for at in range(0, records_end, 4)] + [(48, 8), (56, 8)] + [(at, 8) for at in
                     range(88, 128, 8)] + [(at, 2) for at in range(220, 268, 2)] + [(head_end - 3, 1)]:  # fmt: skip
        if 128 <= at < 160:
            continue
        for value in HOSTILE:
            data = bytearray(good)
            data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
            path.write_bytes(reseal(bytes(data)))
            tried += 1
            refused += is_refused(path)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert tried // 2 < refused < tried


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (12, 127, "header"), (48, 1, "table"), (56, 7, "size"), (76, 600, "label"), (80, 2, "header"),
        (84, 1, "header"), (88, 41, "payload"), (220, 1, "segment"), (240, 300 << 16, "segment"),
        (240, 0x40010100, "segment"), (284, 0, "state"), (288, 2, "state"), (300, 1, "state"),
    ],
)  # fmt: skip
def test_what_a_sealed_head_is_refused_for(at, value, reason, tmp_path):
    write(tmp_path / "a", kept(ids_of(300, 1), [300, 7], label="abc"))
    data = bytearray((tmp_path / "a").read_bytes())
    data[at : at + 4] = value.to_bytes(4, "little")
    (tmp_path / "a").write_bytes(reseal(bytes(data)))
    with pytest.raises(StoreError) as caught:
        use(tmp_path / "a", SHAPE, 300)
    assert caught.value.reason == reason


@pytest.mark.faults
def test_every_flipped_byte_is_found(tmp_path):
    what = kept(ids_of(300, 1), [300], shape=Shape(((8, 4, 4, 4, 3), (4, 4, 0, 0, 0)), True, (16, 0, 4, 4, 4)))
    write(tmp_path / "a", what)
    good = (tmp_path / "a").read_bytes()
    path = tmp_path / "b"
    for at in range(len(good)):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        with pytest.raises(StoreError) as caught:
            use(path, what.shape, 300)
        assert caught.value.kind == "invalid"
        assert caught.value.is_damage == (caught.value.reason != "version")
        assert caught.value.part
    for size in itertools.chain(range(0, 400), range(400, len(good), 7), [len(good) + 1]):
        path.write_bytes((good + b"\0")[:size])
        with pytest.raises(StoreError) as caught:
            use(path, what.shape, 300)
        assert caught.value.is_damage


def test_what_no_file_may_hold_is_refused_before_it_is_written():
    what = kept(ids_of(3), [3])
    head = Head(IDENTITY, SHAPE, tuple(segments_of(what)), (state_at(what, what.states[0]),))
    layout.pack_head(head)
    for wrong in (head._replace(label="x" * 513), head._replace(segments=(), states=()),
                  head._replace(segments=head.segments * 4000)):  # fmt: skip
        with pytest.raises(ValueError, match=r"label|piece|table"):
            layout.pack_head(wrong)


def test_a_state_is_that_of_its_own_tokens():
    ids = ids_of(300, 1)
    assert any((a != b).any() for a, b in zip(state_arrays(SHAPE, ids), state_arrays(SHAPE, ids[:299]), strict=True))
