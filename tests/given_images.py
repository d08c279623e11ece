"""Session images as tests/data/session/images.json describes them, and how two of them are compared."""

import functools
import json
import pathlib
import struct

import numpy as np

from checksum import hash64
from sessionfile import Checkpoint, Identity, Image, KvHeader, KvLayer, write_session

DATA = pathlib.Path(__file__).parent / "data" / "session"
IMAGES = json.loads((DATA / "images.json").read_text())
SMALL = [name for name in IMAGES if name != "sample"]
# Written by every writer of the format, refused by every reader: the least size of a checkpoint is counted too high.
UNREADABLE = ["quirk_emptyckpt2", "quirk_emptyckpt3"]
READABLE = [name for name in SMALL if name not in UNREADABLE]
ARRAYS = ("gdn", "ple", "tails", "dead", "block_pos")
PARTS = ("k", "v", "k_scale", "v_scale", "pooled")


def number(value) -> int:
    return int(value, 16) if isinstance(value, str) else value


@functools.cache
def pattern(n: int, mul: int, seed: int) -> np.ndarray:
    data = (np.arange(n, dtype=np.uint64) * np.uint64(mul) + np.uint64(seed)).astype(np.uint8)
    data.flags.writeable = False
    return data


def _bytes(description: dict) -> np.ndarray:
    if "pattern" in description:
        return pattern(**description["pattern"])
    return np.frombuffer(bytes.fromhex(description["hex"]), np.uint8)


def _record(description: dict) -> Checkpoint:
    ids = description["ids"]
    ids = np.arange(*ids["range"], dtype=np.int32) if isinstance(ids, dict) else np.array(ids, np.int32)
    images = [(start, number(mark)) for start, mark in description["imgs"]]
    return Checkpoint(ids, images, *(_bytes(description[name]) for name in ARRAYS), number(description["used"]))


def image(name: str) -> Image:
    description = IMAGES[name]["image"]
    layers = [
        KvLayer(KvHeader(*(layer[key] for key in KvHeader._fields)), tuple(_bytes(layer[part]) for part in PARTS))
        for layer in description["kv"]
    ]
    return Image(
        tuple(description["geometry"]),
        description["layer_lo"],
        description["layer_hi"],
        description["cvec"],
        _record(description["live"]),
        [_record(checkpoint) for checkpoint in description["checkpoints"]],
        layers,
    )


def identity(name: str) -> Identity:
    return Identity(*(number(IMAGES[name]["identity"][key]) for key in ("model", "config")))


def plain(image: Image, *, kv: bool = True) -> tuple:
    """Everything in an image as values that compare with ==; without `kv` the parts' sizes alone."""
    records = [
        (record.ids.tolist(), [tuple(i) for i in record.images], *(a.tobytes() for a in record.state), record.used)
        for record in image.records
    ]
    layers = [
        (tuple(layer.header), tuple(part.tobytes() for part in layer.parts) if kv else layer.part_sizes)
        for layer in image.kv
    ]
    return tuple(image.geometry), image.layer_lo, image.layer_hi, image.cvec, records, layers


def seal(data: bytearray) -> bytes:
    """Recompute payload length, header hash and payload hash of a patched file, so that only its contents are wrong."""
    struct.pack_into("<Q", data, 32, len(data) - 80)
    struct.pack_into("<Q", data, 56, hash64(bytes(data[:56])))
    struct.pack_into("<Q", data, len(data) - 16, hash64(bytes(data[64:-16])))
    return bytes(data)


class Pattern:
    """A K/V source of one large part; it may fail at an offset."""

    header = KvHeader(1, 4, 1, 64, 4, 0, 0)

    def __init__(self, size: int, fail_at: int | None = None):
        self.part_sizes = (size, 0, 3, 0, 0)
        self.calls = []
        self._fail_at = fail_at

    def read(self, part, offset, out):
        self.calls.append((part, offset, out.size))
        if self._fail_at is not None and offset >= self._fail_at:
            raise RuntimeError("the pool has gone")
        out[:] = (np.arange(offset, offset + out.size, dtype=np.uint32) * 7 + part).astype(np.uint8)


def bare_image() -> Image:
    return Image((1,) * 18, 0, 1, False, Checkpoint(np.arange(3, dtype=np.int32)))


def write_empty_session(path, n_tokens: int, model: int = 0xAA, config: int = 0xBB) -> int:
    """A session file of so many tokens and nothing else; its size."""
    image = Image((0,) * 18, 0, 1, False, Checkpoint(np.arange(n_tokens, dtype=np.int32)))
    return write_session(str(path), image, Identity(model, config))
