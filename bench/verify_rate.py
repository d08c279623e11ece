"""How fast a session file is verified beside `dd` reading it: cold and warm, medians, the two in turn.

The cold runs begin with the file out of the page cache, the warm ones with all of it there. Prints a table and one line
of JSON. The file (1.2 GB) lies in a temporary folder and goes at the end.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import referencesession  # noqa: E402

from sessionfile import verify_session, write_session  # noqa: E402


def evict(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def dd(path: str) -> None:
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M", "status=none"], check=True)


def command(path: str) -> None:
    subprocess.run([sys.executable, str(ROOT / "strata.py"), "session", "verify", "--quiet", path], check=True)


def rate(read, path: str, *, warm: bool) -> float:
    """GB/s of one reading."""
    evict(path)
    if warm:
        dd(path)
    begin = time.perf_counter()
    read(path)
    return os.path.getsize(path) / (time.perf_counter() - begin) / 1e9


def measure(path: str, *, warm: bool, n_rounds: int) -> dict[str, float]:
    rates = {"dd": [], "verify": []}
    for _ in range(n_rounds):
        rates["dd"].append(rate(dd, path, warm=warm))
        rates["verify"].append(rate(verify_session, path, warm=warm))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [v / d for v, d in zip(rates["verify"], rates["dd"], strict=True)]
    return medians | {"ratio": medians["verify"] / medians["dd"], "median_of_ratios": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the temporary folder goes, to choose the disk")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = os.path.join(folder, "bench.bin")
        begin = time.perf_counter()
        size = write_session(path, referencesession.image(), referencesession.IDENTITY, referencesession.layers())
        write_gbs = size / (time.perf_counter() - begin) / 1e9
        assert size == referencesession.FILE_BYTES
        verify_session(path)  # compiles what is compiled once
        results = {kind: measure(path, warm=kind == "warm", n_rounds=args.rounds) for kind in ("cold", "warm")}
        results["command_s"] = size / rate(command, path, warm=True) / 1e9
    results |= {"file_bytes": size, "write_gb_per_s": write_gbs, "rounds": args.rounds}
    for kind in ("cold", "warm"):
        row = results[kind]
        print(f"{kind}: dd {row['dd']:.2f} GB/s, verify {row['verify']:.2f} GB/s, ratio {row['ratio']:.2f}")
    print(f"write {write_gbs:.2f} GB/s; the whole command, warm: {results['command_s']:.2f} s")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
