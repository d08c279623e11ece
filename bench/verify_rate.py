"""How fast a session file is verified beside `dd` reading it: cold and warm, medians, the two in turn.

The file is of the reference geometry: 63,025 tokens, twelve int8 layers and a draft layer, a checkpoint of 118 MB;
1.2 GB in a temporary folder that goes at the end. Cold runs begin with the file out of the page cache, warm ones with
all of it there. The last line is everything as JSON.

Usage: verify_rate.py [--rounds N] [--folder DIR]
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np

from sessionfile import Checkpoint, Identity, Image, KvHeader, verify_session, write_session

STRATA = pathlib.Path(__file__).resolve().parent.parent / "strata.py"
N_TOKENS = 63_025
CELLS = 63_028  # whole pages
GEOMETRY = (2560, 48, 4, 128, 16, 32, 4, 8192, 4096, 24, 2, 256, 4, 128, 4, 64, 512, 768)
STATE_BYTES = (117_669_808, 368_640, 18_432, 6_144, 48)  # of the live record, and as much of its checkpoint
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


def reference_layers() -> list[Layer]:
    return [*(Layer(i, indexer=True) for i in range(12)), Layer(12, indexer=False)]


def reference_image() -> Image:
    ids = np.random.default_rng(1).integers(0, 150_000, N_TOKENS, dtype=np.int32)

    def record() -> Checkpoint:
        return Checkpoint(ids, [], *(np.resize(TILE, size) for size in STATE_BYTES))

    return Image(GEOMETRY, 0, 48, False, record(), [record()])


def bench_arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="not used: every bench takes it")
    parser.add_argument("--folder", help="where the temporary folder goes, to choose the disk")
    return parser


def evict(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def dd(path: str) -> None:
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M", "status=none"], check=True)


def command(path: str) -> None:
    arguments = [sys.executable, str(STRATA), "session", "verify", "--quiet", path]
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)


def duration_s(read, path: str, *, warm: bool) -> float:
    """Seconds of one reading."""
    evict(path)
    if warm:
        dd(path)
    begin = time.perf_counter()
    read(path)
    return time.perf_counter() - begin


def measure(path: str, *, warm: bool, n_rounds: int) -> dict[str, float]:
    """Medians in GB/s, and the ratio of the two."""
    rates = {dd: [], verify_session: []}
    for _ in range(n_rounds):
        for read, values in rates.items():
            values.append(FILE_BYTES / duration_s(read, path, warm=warm) / 1e9)
    dd_rate, verify_rate = (statistics.median(values) for values in rates.values())
    return {"dd_gb_per_s": dd_rate, "verify_gb_per_s": verify_rate, "ratio": verify_rate / dd_rate}


def main() -> None:
    parser = bench_arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = os.path.join(folder, "bench.bin")
        image = reference_image()
        begin = time.perf_counter()
        size_bytes = write_session(path, image, IDENTITY, reference_layers())
        write_rate = size_bytes / (time.perf_counter() - begin) / 1e9
        assert size_bytes == FILE_BYTES
        verify_session(path)  # compiles what is compiled once
        results = {kind: measure(path, warm=kind == "warm", n_rounds=args.rounds) for kind in ("cold", "warm")}
        results["command_s"] = duration_s(command, path, warm=True)
    results |= {"file_bytes": size_bytes, "write_gb_per_s": write_rate, "rounds": args.rounds}
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}")
    for kind in ("cold", "warm"):
        print(f"dd, {kind}: {results[kind]['dd_gb_per_s']:.2f} GB/s")
        print(f"verify, {kind}: {results[kind]['verify_gb_per_s']:.2f} GB/s")
        print(f"verify to dd, {kind}: {results[kind]['ratio']:.2f}")
    print(f"write: {write_rate:.2f} GB/s")
    print(f"strata session verify, warm, with its start: {results['command_s']:.2f} s")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
