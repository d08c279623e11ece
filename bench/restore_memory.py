"""How much the resident set rises while a session of 1.2 GB is restored into pools that lie ready: the peak, in MiB.

First with the running state going to pools as well, then with it read into arrays, as an engine that checks it before
it copies does; that one rises by the state's own size. Linux only: the peak is taken from /proc.

Usage: restore_memory.py [--folder DIR]
"""

import json
import os
import pathlib
import platform
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
from verify_rate import IDENTITY, STATE_BYTES, bench_arguments, reference_image, reference_layers

from sessionfile import Limits, SessionReader, write_session

TARGET_MIB = 48


class Pool:
    """A sink of arrays that were written to once, so that their pages are there."""

    def __init__(self, part_sizes):
        self.part_sizes = tuple(part_sizes)
        self._parts = [np.ones(size, np.uint8) for size in part_sizes]

    def write(self, part: int, offset: int, data: np.ndarray) -> None:
        self._parts[part][offset : offset + data.size] = data


def resident(field: str) -> float:
    """VmRSS, or the peak VmHWM, in MiB."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def restore(path: str, pools: list[Pool], record_pools: list[Pool], *, keep_state: bool) -> dict[str, float]:
    """Peak rise in MiB and seconds of both passes."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident now
    before, begin = resident("VmRSS"), time.perf_counter()
    with SessionReader(path, IDENTITY, Limits(), keep_state=keep_state) as reader:
        first_s = time.perf_counter() - begin
        reader.apply(pools, [] if keep_state else record_pools)
    return {
        "rise_mib": round(resident("VmHWM") - before, 1),
        "first_pass_s": round(first_s, 2),
        "both_passes_s": round(time.perf_counter() - begin, 2),
    }


def main() -> None:
    args = bench_arguments(__doc__.splitlines()[0]).parse_args()
    layers = reference_layers()
    pools = [Pool(layer.part_sizes) for layer in layers]
    record_pools = [Pool(STATE_BYTES) for _ in range(2)]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = os.path.join(folder, "bench.bin")
        write_session(path, reference_image(), IDENTITY, layers)
        restore(path, pools, record_pools, keep_state=False)  # compiles what is compiled once
        results = {
            "state_to_pools": restore(path, pools, record_pools, keep_state=False),
            "state_to_arrays": restore(path, pools, record_pools, keep_state=True),
        }
    results |= {"target_mib": TARGET_MIB, "state_mib": round(2 * sum(STATE_BYTES) / (1 << 20), 1)}
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}")
    for name in ("state_to_pools", "state_to_arrays"):
        print(f"rise, {name.replace('_', ' ')}: {results[name]['rise_mib']} MiB")
        print(f"restore, {name.replace('_', ' ')}: {results[name]['both_passes_s']} s")
    print(f"target of the first: {TARGET_MIB} MiB")
    print(f"state of both records: {results['state_mib']} MiB")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
