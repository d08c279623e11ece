"""The CUDA backend without a device: its tests in the simulator, and what the compiler makes of its kernels.

Owns: starting the simulator's test files in processes of their own, since a process is in the simulator or not, and the
compilation of every kernel for the oldest and the newest capability that is supported. Read next: simulated_kernels.py.
"""

import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

import backend

TESTS = pathlib.Path(__file__).resolve().parent
TOOLS = TESTS.parent / "tools"
CAPABILITIES = ("7.5", "8.6", "9.0")
# Rotary angles are taken in float64; everywhere else double precision would be a slip, and slow.
IN_FLOAT64 = {"_rope_table_kernel", "_pool_kernel"}

needs_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed (pip install '.[cuda]')"
)
MISSING = backend._missing_package()
needs_compiler = pytest.mark.skipif(MISSING is not None, reason=f"{MISSING} is not installed (pip install '.[cuda]')")


@needs_numba_cuda
@pytest.mark.simulator
@pytest.mark.parametrize(
    "name", ["simulated_kernels", "simulated_residency", "simulated_experts", "simulated_sessions"]
)
def test_in_the_simulator(name):
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"{TESTS / name}.py"],
        cwd=TESTS.parent,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert re.search(r"\d+ passed", ran.stdout) or "[100%]" in ran.stdout


@needs_compiler
@pytest.mark.compiler
def test_every_kernel_compiles_for_every_supported_capability():
    """In a process of its own: it replaces what launches and allocates."""
    ran = subprocess.run(
        [sys.executable, str(TOOLS / "cuda_kernels.py"), "--cc", *CAPABILITIES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows = [line.split() for line in ran.stdout.splitlines()[1:]]
    compiled = {(name, capability) for name, capability, *_ in rows}
    assert compiled == {(name, capability) for name in kernel_names() for capability in CAPABILITIES}
    for name, _, n_float64, *figures in rows:
        assert int(n_float64) == 0 or name in IN_FLOAT64, f"{name} computes in float64"
        if len(figures) == 5:  # ptxas was there
            _, _, spill_stores, spill_loads, _ = map(int, figures)
            assert (spill_stores, spill_loads) == (0, 0), f"{name} spills"


def test_a_machine_without_a_driver_computes_on_the_cpu_and_says_so(monkeypatch):
    def no_driver(name):
        raise OSError(name)

    monkeypatch.setattr(backend.ctypes, "CDLL", no_driver)
    lines = []
    assert backend.load("auto", 1, lines.append).name == "cpu"
    assert lines == ["no CUDA driver was found: computing on the CPU"]
    assert backend.load("cpu", 1, lines.append).name == "cpu"
    assert len(lines) == 1
    with pytest.raises(backend.BackendError, match="no CUDA backend: no CUDA driver was found"):
        backend.load("cuda", 1, lines.append)


def test_a_driver_without_its_package_is_named(monkeypatch):
    monkeypatch.setattr(backend.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    lines = []
    assert backend.load("auto", 1, lines.append).name == "cpu"
    assert lines == ["numba-cuda is not installed (pip install 'strata-engine[cuda]'): computing on the CPU"]


@needs_numba_cuda
def test_a_driver_without_the_compiler_is_named(monkeypatch):
    pathfinder = importlib.import_module("cuda.pathfinder")

    def not_found(name):
        raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(backend.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)
    with pytest.raises(backend.BackendError, match=r"CUDA's run-time compiler \(NVRTC\) is not installed"):
        backend.load("cuda", 1, print)


@needs_compiler
def test_a_driver_without_a_device_is_named(monkeypatch):
    """Where there is a driver and all packages, Numba's own answer decides; here no device gives one."""
    cuda = importlib.import_module("numba.cuda")
    monkeypatch.setattr(backend.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "cuda_error", lambda: "CUDA_ERROR_NO_DEVICE")
    lines = []
    assert backend.load("auto", 1, lines.append).name == "cpu"
    assert lines == ["no CUDA device answers (CUDA_ERROR_NO_DEVICE): computing on the CPU"]


def kernel_names() -> set[str]:
    """Every kernel in the sources of the backend."""
    sources = (path.read_text() for path in TESTS.parent.glob("*cuda*.py"))
    return {name for source in sources for name in re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE)}
