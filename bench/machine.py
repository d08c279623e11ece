"""What a figure was measured on, without anything that names one machine, and how a bench writes its figures down.

Read next: report.py, which makes tables of them.
"""

import json
import os
import pathlib
import platform
from importlib.metadata import version

import psutil

PACKAGES = ("numba", "llvmlite", "numpy")


def machine_facts() -> dict[str, str | int]:
    """Processor, cores, memory, Python and the packages that compile and compute."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    } | {name: version(name) for name in PACKAGES}


def _cpu_model() -> str:
    """The processor's name as Linux tells it, elsewhere what Python knows."""
    info = pathlib.Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def write_figures(path: str, machine: dict, rows: list[dict], growth: dict[str, list], axes: tuple[str, str]) -> None:
    """One JSON object with everything that a bench measured; `axes` are the names of the x and y of `growth`."""
    figures = {"machine": machine, "rows": rows, "growth": growth, "axes": axes}
    pathlib.Path(path).write_text(json.dumps(figures, indent=1) + "\n")
