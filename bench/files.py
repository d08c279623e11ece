"""How fast session files are saved, restored and verified beside what the disk does at best, and in how much memory.

The conversation is one of a large model: 63,025 tokens, twelve int8 layers of two K/V heads of 256 and a draft layer,
a running state and one checkpoint of 118 MB each, 1.2 GB in all; its pools are those of the engine and lie ready. Ours
and the rival take turns, and every figure is the median of its rounds. Cold is with the file out of the page cache,
warm with all of it there. A ratio says how many times better ours is. Linux only.

The rivals: `fio` writing as much with direct transfers, eight in flight, and flushing at the end, in the way that is
best here; one `dd` of the file with direct transfers of 16 MiB; one `cat` of it.

Usage: files.py [--model PATH] [--folder DIR] [--rounds N] [--deepest TOKENS] [--json FILE]
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
from machine import machine_facts, write_figures

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import backend
from blockfile import BLOCK_BYTES
from cells import FORMATS, PAGE
from kvcache import CacheShape, LayerPool
from sessionfile import SessionReader, verify_session, write_session
from sessionlayout import Identity, Image, Limits, Record
from sessionstate import StateSink

N_TOKENS, FILE_BYTES = 63_025, 1_198_691_376
DEEPEST = 198_830  # tokens of the largest file that is restored: 3.3 GB
GEOMETRY = (2560, 48, 4, 128, 16, 32, 4, 8192, 4096, 24, 2, 256, 4, 128, 4, 64, 512, 768)
N_ATTENTION, N_HEAD_KV, HEAD_DIM, INDEX_DIM = 12, 2, 256, 128
STATE_BYTES = (117_669_808, 368_640, 18_432, 6_144, 48)  # of the live record, and as much of its checkpoint
IDENTITY = Identity(0x1111222233334444, 0x5555666677778888)
TILE = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8)
GROWTH_BYTES = (1e8, 2e8, 4e8, 8e8, 1.6e9, 3e9)
MOST_EXTRA_MIB = 40
STRAIGHT = 0.95  # a power of 1.05 is still growth in proportion, as far as six medians can tell
MIB = 1 << 20
# Ways of fio, of which the quickest is the rival: which one that is differs from machine to machine.
FIO_WAYS = (("io_uring", "1M"), ("libaio", "1M"), ("libaio", "4M"), ("psync", "16M"))


class Conversation:
    """Pools and state of so many tokens, written to once, so that their pages are there.

    The running state does not grow with a conversation; `state_share` of it makes files in proportion to their tokens.
    """

    def __init__(self, n_tokens: int, state_share: float = 1.0):
        cells, int8 = -(-n_tokens // PAGE) * PAGE, FORMATS["int8"]
        shape = CacheShape(
            GEOMETRY, N_ATTENTION, 0, True, N_HEAD_KV, HEAD_DIM, INDEX_DIM, STATE_BYTES[1], cells, int8, int8
        )
        widths, ops = [INDEX_DIM] * N_ATTENTION + [0], backend.load("cpu", 1, print)
        self.windows = [LayerPool(shape, int8, width, ops).window(n_tokens) for width in widths]
        state_bytes = (round(STATE_BYTES[0] * state_share), *STATE_BYTES[1:])
        self.states = [StateSink([np.resize(TILE, size) for size in state_bytes]) for _ in range(2)]
        ids = np.random.default_rng(1).integers(0, 150_000, n_tokens, dtype=np.int32)
        records = [Record(ids, [], *state.arrays) for state in self.states]
        self.image = Image(GEOMETRY, 0, 48, False, records[0], records[1:])
        for window in self.windows:
            for part, size in enumerate(window.part_sizes):
                for offset in range(0, size, BLOCK_BYTES):
                    window.write(part, offset, TILE[: size - offset])

    def save(self, path: str) -> None:
        write_session(path, self.image, IDENTITY, self.windows)

    def restore(self, path: str) -> None:
        """Both passes."""
        with SessionReader(path, IDENTITY, Limits(), keep_state=False) as reader:
            reader.apply(self.windows, self.states)

    def extra_mib(self, path: str) -> float:
        """How much the resident set rises while the file is restored."""
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident now
        before = _resident_mib("VmRSS")
        self.restore(path)
        return _resident_mib("VmHWM") - before


def _resident_mib(field: str) -> float:
    """VmRSS, or the peak VmHWM."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


# --- The rivals


def cat(path: str) -> None:
    subprocess.run(["cat", path], check=True, stdout=subprocess.DEVNULL)


def dd(path: str) -> None:
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M", "iflag=direct", "status=none"], check=True)


def fio_s(path: str, size_bytes: int, way: tuple[str, str]) -> float:
    """Seconds of a durable write as fio itself counts them, without its start; raises CalledProcessError."""
    engine, block = way
    arguments = [f"--filename={path}", f"--size={-(-size_bytes // MIB)}M", f"--ioengine={engine}", f"--bs={block}"]
    arguments += ["--name=write", "--rw=write", "--direct=1", "--iodepth=8", "--end_fsync=1", "--output-format=json"]
    ran = subprocess.run(["fio", *arguments], check=True, capture_output=True, text=True)
    os.unlink(path)
    job = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0]
    return job["job_runtime"] / 1e3


def best_fio(path: str, size_bytes: int) -> tuple[str, str] | None:
    """The way of fio that is quickest here, the better of two tries each; None without fio."""
    if not shutil.which("fio"):
        return None
    trials = {}
    for way in FIO_WAYS * 2:
        try:
            trials.setdefault(way, []).append(fio_s(path, size_bytes, way))
        except subprocess.CalledProcessError as error:  # an engine that this system forbids or lacks
            print(f"fio with {way[0]}: {error.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return min(trials, key=lambda way: min(trials[way]), default=None)


# --- The clock


def timed_s(work: Callable[[str], None], path: str) -> float:
    begin = time.perf_counter()
    work(path)
    return time.perf_counter() - begin


def evict(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def reading_s(work: Callable[[str], None], path: str, *, warm: bool) -> float:
    """Seconds of one reading that begins in that state of the page cache."""
    evict(path)
    if warm:
        cat(path)
    return timed_s(work, path)


def medians(n_rounds: int, *measures: Callable[[], float]) -> list[float]:
    """One for each measure; they take turns."""
    values = [[measure() for measure in measures] for _ in range(n_rounds)]
    return [statistics.median(column) for column in zip(*values, strict=True)]


class Figures:
    """The rows and curves of this run; each is printed as it comes."""

    def __init__(self, n_rounds: int):
        self.rows: list[dict] = []
        self.growth: dict[str, list] = {}
        self.n_rounds = n_rounds

    def add(self, work: str, ours: float, rival: str | None, rival_value: float | None, target: float | None, unit="s"):
        """A row; less is better in all of them, and the ratio is above 1 where ours is."""
        ratio = rival_value / ours if rival_value is not None else None
        row = {"work": work, "unit": unit, "rival": rival, "ratio": ratio, "target": target, "rounds": self.n_rounds}
        row |= {"ours_s": ours, "rival_s": rival_value} if unit == "s" else {"ours": ours, "rival_value": rival_value}
        self.rows.append(row)
        beside = f"; {rival} {rival_value:.3f} {unit}, ratio {ratio:.2f}" if ratio is not None else ""
        goal = f", target {target:.2f}" if ratio is not None and target is not None else ""
        print(f"{work}: {ours:.3f} {unit}{beside}{goal}", flush=True)


# --- What is measured


def measure_save(figures: Figures, conversation: Conversation, path: str) -> None:
    """To a new name, as fio writes, and over an older file. Leaves a file at `path`."""
    way, beside = best_fio(f"{path}.fio", FILE_BYTES), None

    def save_new() -> float:
        pathlib.Path(path).unlink(missing_ok=True)
        return timed_s(conversation.save, path)

    measures = [save_new, lambda: timed_s(conversation.save, path)]
    if way:
        beside = f"fio, {way[0]}, blocks of {way[1]}"
        measures.append(lambda: fio_s(f"{path}.fio", FILE_BYTES, way))
    else:
        print("fio is not installed: nothing is beside the save")
    new, over, *fio = medians(figures.n_rounds, *measures)
    figures.add("1.2 GB saved, durably", new, beside, *(fio or [None]), 1 / 1.3)
    figures.add("1.2 GB saved over an older file", over, beside, *(fio or [None]), None)


def measure_reading(figures: Figures, conversation: Conversation, path: str) -> None:
    conversation.restore(path)  # compiles what is compiled once
    for work, ours, rival, warm, target in (
        ("1.2 GB restored, cold", conversation.restore, dd, False, 1 / 1.5),
        ("1.2 GB restored, warm", conversation.restore, cat, True, 1 / 3),
        ("1.2 GB verified, cold", verify_session, cat, False, 0.95),
        ("1.2 GB verified, warm", verify_session, cat, True, 0.6),
    ):
        measures = [lambda f=f, warm=warm: reading_s(f, path, warm=warm) for f in (ours, rival)]
        beside = "dd, direct, blocks of 16M" if rival is dd else "cat"
        ours_s, rival_s = medians(figures.n_rounds, *measures)
        figures.add(work, ours_s, beside, rival_s, target)


def measure_memory(figures: Figures, conversation: Conversation, path: str, n_tokens: int) -> None:
    peak = max(conversation.extra_mib(path) for _ in range(3))
    work = f"memory of a restore of {n_tokens:,} tokens above pools and state"
    figures.add(work, peak, "its bound", MOST_EXTRA_MIB, 1.0, unit="MiB")


def restored_s(path: str, size_bytes: float, n_rounds: int) -> tuple[int, float, float]:
    """Size of a file of about so many bytes, and median seconds of a cold and of a warm restore."""
    share = size_bytes / FILE_BYTES
    conversation = Conversation(round(N_TOKENS * share), share)
    conversation.save(path)
    conversation.restore(path)
    ways = [lambda warm=warm: reading_s(conversation.restore, path, warm=warm) for warm in (False, True)]
    return os.path.getsize(path), *medians(n_rounds, *ways)


def measure_growth(figures: Figures, path: str, largest_bytes: float) -> None:
    """Seconds of a restore against the size of the file, and the power of the size that fits them."""
    sizes = [size for size in GROWTH_BYTES if size <= largest_bytes]
    points = [restored_s(path, size, figures.n_rounds) for size in sizes]
    for column, state in ((1, "cold"), (2, "warm")):
        curve = [[point[0] / 1e9, point[column]] for point in points]
        figures.growth[f"restore, {state}"] = curve
        for size_gb, seconds in curve:
            print(f"restore of {size_gb:.2f} GB, {state}: {seconds:.3f} s")
        work = f"restore of {curve[0][0]:.1f} to {curve[-1][0]:.1f} GB, {state}: grows as that power of the size"
        figures.add(work, power(curve), "in proportion", 1.0, STRAIGHT, unit="")


def power(curve: list[list[float]]) -> float:
    """The slope of a line through the logarithms: 1 is growth in proportion."""
    logarithms = [[math.log(value) for value in point] for point in curve]
    return statistics.linear_regression(*zip(*logarithms, strict=True)).slope


def run(figures: Figures, folder: str, deepest: int) -> None:
    path = os.path.join(folder, "bench.bin")
    conversation = Conversation(N_TOKENS)
    measure_save(figures, conversation, path)
    assert os.path.getsize(path) == FILE_BYTES
    measure_reading(figures, conversation, path)
    measure_memory(figures, conversation, path, N_TOKENS)
    del conversation
    deep = Conversation(deepest)
    deep.save(path)
    deep.restore(path)
    measure_memory(figures, deep, path, deepest)
    largest_bytes = os.path.getsize(path)
    del deep
    measure_growth(figures, path, largest_bytes)


def main() -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="not used: every bench takes it")
    parser.add_argument("--folder", help="where the temporary folder goes, to choose the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deepest", type=int, default=DEEPEST, help="tokens of the largest file, at 16 KB each")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    machine = machine_facts()
    print(f"machine: {', '.join(f'{name} {value}' for name, value in machine.items())}")
    figures = Figures(args.rounds)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run(figures, folder, args.deepest)
    if args.json:
        write_figures(args.json, machine, figures.rows, figures.growth, ("file, GB", "seconds"))


if __name__ == "__main__":
    main()
