"""How long commands take until they are of use: the help, a look into a session file, the engine ready to be asked.

Each is a process of its own, medians, kernels compiled before. The engine loads the embedded model; the file holds a
few tokens, as the size of a file does not count for a look. The rival of each is the time that it may take.

Usage: start.py [--model PATH] [--rounds N] [--json FILE]
"""

import argparse
import functools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
from machine import machine_facts, write_figures

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from sessionfile import write_session
from sessionlayout import Identity, Image, Record

COMMAND = (sys.executable, str(pathlib.Path(__file__).resolve().parent.parent / "strata.py"))
ALLOWED_S = {"strata --help": 0.15, "strata session inspect": 0.6, "strata --serve until READY": 2.0}


def run_s(*arguments: str) -> float:
    begin = time.perf_counter()
    subprocess.run([*COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def ready_s() -> float:
    """Seconds until the engine says that it is ready; it ends when its input does."""
    begin = time.perf_counter()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*COMMAND, "--serve"], **pipes) as engine:
        ready = any(line.startswith(b"READY ") for line in engine.stdout)
        seconds = time.perf_counter() - begin
        engine.stdin.close()
    if not ready:
        raise SystemExit(f"strata --serve ended with exit code {engine.returncode} before it was ready")
    return seconds


def row(work: str, start_s: Callable[[], float], n_rounds: int) -> dict:
    """Run it once more than it counts: the first start may compile."""
    start_s()
    seconds, allowed = statistics.median(start_s() for _ in range(n_rounds)), ALLOWED_S[work]
    print(f"{work}: {seconds:.3f} s; at most {allowed:g} s, ratio {allowed / seconds:.2f}", flush=True)
    return {
        "work": work,
        "rival": "at most",
        "ours_s": seconds,
        "rival_s": allowed,
        "ratio": allowed / seconds,
        "target": 1.0,
        "rounds": n_rounds,
    }


def main() -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="not used: every bench takes it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    machine = machine_facts()
    print(f"machine: {', '.join(f'{name} {value}' for name, value in machine.items())}")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "bench.bin")
        image = Image((1,) * 18, 0, 1, False, Record(np.arange(5, dtype=np.int32)))
        write_session(path, image, Identity(1, 2))
        starts = (functools.partial(run_s, "--help"), functools.partial(run_s, "session", "inspect", path), ready_s)
        rows = [row(work, start_s, args.rounds) for work, start_s in zip(ALLOWED_S, starts, strict=True)]
    if args.json:
        write_figures(args.json, machine, rows, {}, ("", ""))


if __name__ == "__main__":
    main()
