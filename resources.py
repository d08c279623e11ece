"""What this process may use of the machine: processors and memory, as affinity and control groups leave them to it.

It owns every question of how much there is; it knows nothing of what it is wanted for. Invariant: an answer is never
more than the machine has, and where the system does not tell, what the machine has is the answer. Read next: engine.py,
which chooses threads and floors by it.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

PROC, CPUS = "/proc/self", "/sys/devices/system/cpu"


class Group(NamedTuple):
    """A control group above this process: its folder, of version 1 or 2."""

    folder: pathlib.Path
    version: int


def all_processors() -> int:
    """Processors of the machine."""
    return os.cpu_count() or 1


def allowed_processors() -> int:
    """Processors that this process may run on, by its affinity; a group's set of processors narrows that."""
    return len(_allowed()) or all_processors()


def usable_cores(proc: str = PROC, cpus: str = CPUS) -> int:
    """Cores' worth of work that this process can do at once: physical cores it may run on, at most a group's quota.

    A quota is rounded down: a thread beyond it has all others wait for the next period.
    """
    allowed = _allowed()
    cores = len({_core(cpus, processor) for processor in allowed}) or _physical_cores()
    quotas = [quota for group in _groups(proc, "cpu") if (quota := _cpu_quota(group)) is not None]
    return max(1, min([cores, *map(int, quotas)]))


def available_bytes(proc: str = PROC) -> int:
    """Memory that can be had, of the machine and of each group above this process, taking from the page cache too."""
    import psutil  # here, as most commands never ask

    rooms = [room for group in _groups(proc, "memory") if (room := _memory_room(group)) is not None]
    return max(0, min([psutil.virtual_memory().available, *rooms]))


# --- Processors ---


def _allowed() -> list[int]:
    """Numbers of the processors that this process may run on; empty where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    import psutil

    return psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else []


def _physical_cores() -> int:
    import psutil

    return psutil.cpu_count(logical=False) or all_processors()


def _core(cpus: str, processor: int) -> str:
    """What is equal for the processors of one core; each is its own where the system does not tell."""
    for name in ("core_cpus_list", "thread_siblings_list"):  # the name of today and the one before
        if siblings := _read(pathlib.Path(cpus, f"cpu{processor}", "topology", name)):
            return siblings
    return str(processor)


def _cpu_quota(group: Group) -> float | None:
    """Processors' worth of time that a group has; None without a limit."""
    if group.version == 2:
        quota, _, period = (_read(group.folder / "cpu.max") or "max").partition(" ")
    else:
        quota, period = (_read(group.folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    quota, period = _number(quota), _number(period)
    return quota / period if quota and period else None


# --- Memory ---


def _memory_room(group: Group) -> int | None:
    """What a group may still take: up to its limit, and in place of files that it holds in the page cache."""
    if group.version == 2:
        limits, used, prefix = ("memory.max", "memory.high"), "memory.current", ""
    else:
        limits, used, prefix = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"
    limits = [limit for name in limits if (limit := _number(_read(group.folder / name))) is not None]
    used = _number(_read(group.folder / used))
    if not limits or used is None:
        return None
    words = (line.split() for line in (_read(group.folder / "memory.stat") or "").splitlines())
    held = {line[0]: int(line[1]) for line in words if len(line) == 2}
    return min(limits) - used + sum(held.get(f"{prefix}{name}_file", 0) for name in ("active", "inactive"))


# --- Control groups ---


def _groups(proc: str, controller: str) -> Iterator[Group]:
    """The groups above this process that may limit what a controller gives, its own first."""
    membership = _membership(proc)
    for line in (_read(pathlib.Path(proc, "mountinfo")) or "").splitlines():
        before, _, after = line.partition(" - ")
        kind, *_, options = after.split() or [""]
        names = options.split(",") if kind == "cgroup" else [""]
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and controller not in names):
            continue
        root, mount = (_unescaped(word) for word in before.split()[3:5])
        path = membership.get(controller if kind == "cgroup" else "", "/")
        # In a container the path may be that of the host; then the mount shows the group itself.
        below = os.path.relpath(path, root) if os.path.commonpath((path, root)) == root else "."
        folder = pathlib.Path(mount, below)
        for above in (folder, *folder.parents):
            yield Group(above, 1 if kind == "cgroup" else 2)
            if above == pathlib.Path(mount):
                break


def _membership(proc: str) -> dict[str, str]:
    """The path of this process's group for each controller; "" stands for version 2."""
    paths = {}
    for line in (_read(pathlib.Path(proc, "cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _unescaped(word: str) -> str:
    """A path of mountinfo, in which blanks and backslashes are octal."""
    for code in ("\\040", "\\011", "\\012", "\\134"):
        word = word.replace(code, chr(int(code[1:], 8)))
    return word


def _read(path: pathlib.Path) -> str | None:
    """The text of a small file of the system, None where it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return None


def _number(text: str | None) -> int | None:
    """A number; None for none, and for `max` and -1, which stand for no limit."""
    return int(text) if text is not None and text.isdigit() else None
