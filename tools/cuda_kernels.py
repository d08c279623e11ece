"""What the compiler makes of every CUDA kernel, without a device: registers, local memory, spills.

    python tools/cuda_kernels.py [--cc 7.5 8.6 9.0] [--case NAME]

It owns compiling; the argument types come from running the cases of cuda_cases.py with launches that only note them.
Needs numba-cuda and NVRTC; where `ptxas` is at hand its figures are printed, else only that a kernel compiled.
"""

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numba import cuda
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.simulator.cudadrv import devicearray

CAPABILITIES = ((7, 5), (8, 6), (9, 0))
FIGURES = ("registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes", "shared_bytes")


def argument_type(value):
    """Numba's type of a launch argument; every array of the backend is C-contiguous, an empty one too."""
    found = getattr(value, "_numba_type_", None)
    return cuda.types.Array(found.dtype, found.ndim, "C") if found else cuda.typing.typeof.typeof(value)


@contextlib.contextmanager
def launches_noted(noted: dict):
    """Inside, device memory is the host's, and a launch puts (kernel, argument types) into `noted` and does nothing."""

    def note(dispatcher, _configuration):
        def launch(*args):
            signature = tuple(argument_type(value) for value in args)
            noted.setdefault(dispatcher.py_func.__name__, (dispatcher, []))[1].append(signature)

        return launch

    def device_array(shape, dtype, **_):
        return devicearray.FakeCUDAArray(np.zeros(shape, dtype))

    with contextlib.ExitStack() as stack:
        for name, value in {
            "device_array": device_array,
            "to_device": lambda array: devicearray.FakeCUDAArray(np.array(array)),
            "mapped_array": device_array,
            "pinned_array": lambda shape, dtype: np.empty(shape, dtype),
            "stream": lambda: types.SimpleNamespace(synchronize=lambda: None),
            "synchronize": lambda: None,
        }.items():
            stack.enter_context(mock.patch.object(cuda, name, value))
        stack.enter_context(mock.patch.object(CUDADispatcher, "__getitem__", note))
        yield


def noted_kernels(only: str = "") -> dict:
    """Kernel name -> (dispatcher, distinct signatures) over all cases."""
    import cuda_cases

    import backend
    import cudapools
    import kernels_cuda

    noted: dict = {}
    ops = backend.Backend("cuda", 1, **kernels_cuda.operations())
    with launches_noted(noted), mock.patch.object(cudapools, "SIMULATED", True):
        for item in cuda_cases.CASES:
            if only in item.name:
                # Few and many tokens, and more cells than one segment, take kernels of their own.
                for n in (2, 33, 300 if "attention" in item.name else 33):
                    cuda_cases.run_case(item, ops, cuda_cases.SMALL._replace(n=n))
        if not only:
            for ring in (False, True):
                cuda_cases.residency_round(ops, np.random.default_rng(0), cuda_cases.SMALL, ring)
    return {name: (dispatcher, list(dict.fromkeys(signatures))) for name, (dispatcher, signatures) in noted.items()}


def compile_ptx(dispatcher, signature, capability) -> str:
    """PTX of a kernel; a device function asks for the current device, of which only the capability matters."""
    device = mock.Mock(return_value=types.SimpleNamespace(compute_capability=capability))
    with (
        mock.patch("numba.cuda.dispatcher.get_current_device", device),
        mock.patch("numba.cuda.compiler.get_current_device", device),
    ):
        return cuda.compile_ptx(dispatcher.py_func, signature, cc=capability)[0]


def figures(ptx: str, capability) -> dict[str, int] | None:
    """What ptxas says of one kernel's PTX, None without ptxas; raises RuntimeError where it refuses."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        architecture = f"-arch=sm_{capability[0]}{capability[1]}"
        command = [ptxas, architecture, "-v", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"ptxas: {ran.stderr.strip()}")
    patterns = (r"Used (\d+) registers", r"(\d+) bytes stack frame", r"(\d+) bytes spill stores",
                r"(\d+) bytes spill loads", r"(\d+) bytes smem")  # fmt: skip
    found = (re.search(pattern, ran.stderr) for pattern in patterns)
    return dict(zip(FIGURES, (int(match[1]) if match else 0 for match in found), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cc", nargs="+", default=[f"{a}.{b}" for a, b in CAPABILITIES], metavar="X.Y")
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    options = parser.parse_args()
    print(f"{'kernel':28}{'cc':>5}{'float64':>10}" + "".join(f"{name:>20}" for name in FIGURES))
    for name, (dispatcher, signatures) in sorted(noted_kernels(options.case).items()):
        for text in options.cc:
            capability = tuple(int(part) for part in text.split("."))
            for signature in signatures:
                ptx = compile_ptx(dispatcher, signature, capability)
                row, n_float64 = figures(ptx, capability), len(re.findall(r"\.f64\b", ptx))
                shown = "".join(f"{value:>20}" for value in row.values()) if row else "   compiled"
                print(f"{name:28}{text:>5}{n_float64:>10}{shown}", flush=True)


if __name__ == "__main__":
    main()
