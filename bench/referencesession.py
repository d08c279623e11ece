"""A session of the reference geometry for the benches: 63,025 tokens, twelve int8 layers and a draft layer, 1.2 GB."""

import numpy as np

from sessionfile import Checkpoint, Identity, Image, KvHeader

N_TOKENS = 63_025
CELLS = 63_028  # whole pages
GEOMETRY = (2560, 48, 4, 128, 16, 32, 4, 8192, 4096, 24, 2, 256, 4, 128, 4, 64, 512, 768)
STATE_BYTES = (117_669_808, 368_640, 18_432, 6_144, 48)  # 118 MB for the live record, as much for its checkpoint
IDENTITY = Identity(0x1111222233334444, 0x5555666677778888)
FILE_BYTES = 1_198_691_376
TILE = np.random.default_rng(0).integers(0, 256, (16 << 20) + 4096, dtype=np.uint8)


class Layer:
    """A K/V source whose bytes are a random tile over and over, begun at another place in each layer."""

    def __init__(self, index: int, *, indexer: bool):
        pooled_rows = N_TOKENS // 4 + 1 if indexer else 0
        self.header = KvHeader(1, CELLS, 2, 256, 4, pooled_rows, 128 if indexer else 0)
        self.part_sizes = (CELLS * 512, CELLS * 512, CELLS * 16, CELLS * 16, pooled_rows * 512)
        self._start = index * 17

    def read(self, part: int, offset: int, out: np.ndarray) -> None:
        out[:] = TILE[self._start : self._start + out.size]


def layers() -> list[Layer]:
    return [*(Layer(i, indexer=True) for i in range(12)), Layer(12, indexer=False)]


def image() -> Image:
    ids = np.random.default_rng(1).integers(0, 150_000, N_TOKENS, dtype=np.int32)

    def record() -> Checkpoint:
        return Checkpoint(ids, [], *(np.resize(TILE, size) for size in STATE_BYTES))

    return Image(GEOMETRY, 0, 48, False, record(), [record()])
