"""Processors and memory as affinity and control groups leave them, with made-up trees of /proc and /sys/fs/cgroup."""

import os
import pathlib
import re
import subprocess
import sys
import types

import psutil
import pytest

import resources
from resources import available_bytes, usable_cores

ROOT = pathlib.Path(__file__).resolve().parent.parent
MIB, HOST_MIB = 1 << 20, 1000
GROUP_2 = "31 23 0:28 / {mount} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
GROUP_1 = "33 31 0:30 {root} {mount}/{name} rw,relatime - cgroup cgroup rw,{name}\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with eight processors in four cores and 1,000 MiB free, and a place for its files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=HOST_MIB * MIB))
    for processor in range(8):
        write(tmp_path / f"cpus/cpu{processor}/topology/core_cpus_list", f"{processor % 4},{processor % 4 + 4}")
    write(tmp_path / "proc/cgroup", "0::/\n")
    write(tmp_path / "proc/mountinfo", "24 1 259:1 / / rw - ext4 /dev/root rw\n")
    return tmp_path


def write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cores(machine) -> int:
    return usable_cores(str(machine / "proc"), str(machine / "cpus"))


def free_mib(machine) -> int:
    return available_bytes(str(machine / "proc")) // MIB


def version_2(machine, path: str, *groups: dict[str, str], root: str = "/") -> None:
    """A tree of version 2: the group at the mount, the one below it on `path`, and so on."""
    write(machine / "proc/cgroup", f"0::{path}\n")
    line = GROUP_2.format(mount=machine / "cg").replace(" / ", f" {root} ", 1)
    write(machine / "proc/mountinfo", f"24 1 259:1 / / rw - ext4 /dev/root rw\n{line}")
    folder = machine / "cg"
    for name, files in zip(["", *path.strip("/").split("/")], groups, strict=False):
        folder /= name
        for file, text in files.items():
            write(folder / file, text)


def version_1(machine, path: str, files: dict[str, str], root: str = "/") -> None:
    """One group of version 1 with the files of its controllers, where the mount's root and its path put it."""
    write(machine / "proc/cgroup", f"3:cpuset:/\n4:memory:{path}\n2:cpu,cpuacct:{path}\n0::/\n")
    lines = [GROUP_1.format(name=name, mount=machine / "cg", root=root) for name in ("memory", "cpu", "cpuset")]
    write(machine / "proc/mountinfo", "".join(lines).replace("rw,cpu\n", "rw,cpu,cpuacct\n"))
    below = path.removeprefix(root).strip("/")
    for file, text in files.items():
        write(machine / "cg" / file.partition(".")[0] / below / file, text + "\n")


def test_a_machine_without_control_groups_is_all_there_is(machine):
    assert (cores(machine), free_mib(machine)) == (4, HOST_MIB)
    for name in ("cgroup", "mountinfo"):
        os.unlink(machine / "proc" / name)
    assert (cores(machine), free_mib(machine)) == (4, HOST_MIB)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [({0}, 1), ({0, 4}, 1), ({0, 1}, 2), ({0, 1, 4}, 2), ({1, 2, 3, 7}, 3), (set(range(8)), 4)],
)
def test_cores_are_counted_that_the_process_may_run_on(machine, monkeypatch, allowed, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    assert cores(machine) == expected
    assert resources.allowed_processors() == len(allowed)


def test_a_system_that_knows_no_cores_counts_processors(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 9})
    assert usable_cores(str(machine / "proc"), str(machine / "none")) == 3


def test_the_older_name_of_the_siblings_is_known(machine):
    for path in (machine / "cpus").glob("cpu*/topology/core_cpus_list"):
        path.rename(path.with_name("thread_siblings_list"))
    assert cores(machine) == 4


def test_a_system_without_affinity_tells_what_the_machine_has(machine, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(psutil.Process, "cpu_affinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8 if logical else 6)
    assert cores(machine) == 6
    assert resources.allowed_processors() == os.cpu_count()


QUOTAS = [("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), ("max 100000", 4)]


@pytest.mark.parametrize(("quota", "expected"), [*QUOTAS, ("max", 4), ("", 4), ("nonsense 1", 4), ("1 0", 4)])
def test_a_quota_of_version_2(machine, quota, expected):
    version_2(machine, "/", {"cpu.max": quota})
    assert cores(machine) == expected


@pytest.mark.parametrize(("quota", "expected"), [*QUOTAS, ("-1 100000", 4)])
def test_a_quota_of_version_1(machine, quota, expected):
    quota, _, period = quota.replace("max", "-1").partition(" ")
    version_1(machine, "/box", {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period})
    assert cores(machine) == expected


def test_the_tightest_group_on_the_way_up_counts(machine):
    groups = ({}, {"cpu.max": "300000 100000"}, {"cpu.max": "100000 100000"}, {"cpu.max": "max 100000"})
    version_2(machine, "/a/b/c", *groups)
    assert cores(machine) == 1
    version_2(machine, "/a/b/c", {}, {"memory.max": str(500 * MIB), "memory.current": str(450 * MIB)})
    assert free_mib(machine) == 50


MEMORY_2 = {"memory.max": str(500 * MIB), "memory.current": str(300 * MIB)}
STAT = f"anon 1\nfile {250 * MIB}\ninactive_file {{0}}\nactive_file {{1}}\n"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 200),
        ({"memory.stat": STAT.format(100 * MIB, 50 * MIB)}, 350),
        ({"memory.max": "max"}, HOST_MIB),
        ({"memory.max": str(5000 * MIB)}, HOST_MIB),
        ({"memory.high": str(400 * MIB)}, 100),
        ({"memory.high": "max"}, 200),
        ({"memory.current": str(600 * MIB)}, 0),
        ({"memory.current": "?"}, HOST_MIB),
        ({"memory.stat": "inactive_file\n\n"}, 200),
    ],
)
def test_the_memory_of_version_2(machine, change, expected):
    version_2(machine, "/", MEMORY_2 | change)
    assert free_mib(machine) == expected


MEMORY_1 = {"memory.limit_in_bytes": str(500 * MIB), "memory.usage_in_bytes": str(300 * MIB)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 200),
        ({"memory.stat": f"total_inactive_file {100 * MIB}\ntotal_active_file {50 * MIB}\ninactive_file 9"}, 350),
        ({"memory.limit_in_bytes": "9223372036854771712"}, HOST_MIB),
    ],
)
@pytest.mark.parametrize("root", ["/", "/docker/0123"])
def test_the_memory_of_version_1(machine, change, expected, root):
    """Also where the path is that of the host, and the mount shows the container's own group."""
    version_1(machine, "/docker/0123", MEMORY_1 | change, root)
    assert free_mib(machine) == expected


def test_a_path_that_the_mount_does_not_show_is_the_mount_itself(machine):
    version_2(machine, "/", {"cpu.max": "100000 100000"}, root="/somewhere/else")
    write(machine / "proc/cgroup", "0::/not/shown\n")
    assert cores(machine) == 1


def test_a_mount_with_a_blank_in_its_name(machine):
    version_2(machine, "/", {"cpu.max": "100000 100000"})
    (machine / "cg").rename(machine / "c g")
    mounts = (machine / "proc/mountinfo").read_text()
    write(machine / "proc/mountinfo", mounts.replace("/cg", "/c\\040g"))
    assert cores(machine) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_real_process_that_is_pinned_uses_one_core():
    code = """if True:
        import os, resources
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        print(resources.usable_cores())
    """
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "1\n"


def test_nobody_asks_the_machine_itself():
    """Every other module asks here."""
    words = "cpu_count|virtual_memory|sched_getaffinity"
    assert [path.name for path in ROOT.glob("*.py") if re.search(words, path.read_text())] == ["resources.py"]
