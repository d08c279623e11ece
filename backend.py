"""What computes: the operations that a backend owes, and the choice of one.

It owns the contract between a forward pass and the machine; it knows no model file and no session. Invariant: nothing
of Numba's CUDA part is loaded on a machine without a driver. Read next: kernels_cpu.py, kernels_cuda.py.

A backend keeps arrays where it computes. All of its operations take such arrays, write into arrays that are given or
return new ones, and come back before the device is done; only what returns NumPy arrays waits. What is computed for a
token depends neither on which other tokens stand in the same call nor on how a machine shares out the work.
Shapes stand with the functions of kernels_cpu.py. A new operation is a line here and a function in each of the two.
"""

import ctypes
import importlib
import importlib.util
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numba

import kernels_cpu


class BackendError(Exception):
    """A backend that was asked for and cannot be had, in one line."""


@dataclass(eq=False)
class Backend:
    """One loaded backend."""

    name: str  # "cpu" or "cuda"
    n_threads: int  # of the processor
    own_memory: bool  # whether it has a memory of its own, so that cells and experts may wait in another
    max_head: int | None  # widest attention head and index key, None for any
    max_state: int | None  # widest head of a gated delta net, None for any
    errors: tuple[type[Exception], ...]  # what a failing device raises
    close: Callable  # ends its threads

    # arrays
    empty: Callable  # an array of any content
    zeros: Callable  # an array of zeros
    from_host: Callable  # a NumPy array, where it computes
    to_host: Callable  # an array as a NumPy one; it may be the same
    host_copy: Callable  # an array as a NumPy one of its own
    copy: Callable  # a copy
    assign: Callable  # out = source, which may be NumPy's
    clear: Callable  # zeros from now on

    # K/V pools
    cells: Callable  # the pools of one layer
    settle: Callable  # after a rewind or a restore: what is held elsewhere is as the pool says
    read_bytes: Callable  # bytes of an array into NumPy's
    write_bytes: Callable  # NumPy's bytes into an array
    append_cells: Callable  # K or V of some tokens into one pool
    store_heads: Callable  # norm and rotate q and k, then append k and v

    # weights and products
    pack: Callable  # matrices of a file, as the products read them
    pack_experts: Callable  # the same for experts, which may wait elsewhere
    place_experts: Callable | None  # decides which lie where; only of a backend with a memory of its own
    together: Callable  # packs that are multiplied with the same x
    gather_rows: Callable  # rows as float32
    matmul: Callable
    matmul_each: Callable  # with each of the packs put together
    expert_matmul: Callable  # each expert times its rows
    expert_matmul_each: Callable
    swiglu: Callable  # a feed-forward layer

    # rows and heads
    rms_norm: Callable
    silu_mul: Callable
    silu_scaled: Callable
    sigmoid_mul: Callable
    add_rows: Callable
    add_scaled_rows: Callable
    add_bias: Callable
    split_gate: Callable
    rope_table: Callable
    norm_rope_heads: Callable
    hadamard_heads: Callable

    # attention
    attention: Callable
    attention_selected: Callable  # over chosen pages alone
    pool_keys: Callable  # the indexer's keys of complete pages
    select_blocks: Callable  # which pages to attend to

    # gated delta nets
    conv_silu: Callable
    delta_net: Callable
    norm_gate_heads: Callable

    # residual streams
    mix_streams: Callable
    inject_streams: Callable
    repeat_streams: Callable
    add_to_streams: Callable

    # experts
    route: Callable  # weights and numbers of the chosen experts
    order_by_expert: Callable
    gather_assigned: Callable
    combine_experts: Callable

    # n-gram embeddings
    ngram_rows: Callable  # on the host, where the table lies
    ngram_gate: Callable
    ngram_conv: Callable
    push_rows: Callable

    # the choice of a token
    greedy: Callable
    greedy_with_share: Callable  # and its probability

    def check_widths(self, head_dim: int, index_dim: int, state: int) -> None:
        """Raise BackendError where a model's heads are wider than a kernel has room for."""
        for part, width, most in (
            ("an attention head", head_dim, self.max_head),
            ("an index key", index_dim, self.max_head),
            ("a recurrent head", state, self.max_state),
        ):
            if most is not None and width > most:
                raise BackendError(f"{part} of width {width} does not fit the CUDA backend ({most}): use --backend cpu")


def load(asked: str, n_threads: int, log: Callable[[str], None]) -> Backend:
    """The backend for `asked` (auto, cpu or cuda), on `n_threads` of the processor; auto says why it is not cuda.

    Raises BackendError where there is no such device.
    """
    if choose(asked, log) == "cpu":
        return _closing(Backend("cpu", n_threads, **kernels_cpu.operations(n_threads)))
    if reason := _why_no_device():
        raise BackendError(f"no CUDA backend: {reason}")
    import kernels_cuda

    return _closing(Backend("cuda", n_threads, **kernels_cuda.operations()))


def choose(asked: str, log: Callable[[str], None]) -> str:
    """The name of the backend for `asked`; auto is cuda where there is a device, else it says why not."""
    if asked != "auto":
        return asked
    if reason := _why_no_device():
        log(f"{reason}: computing on the CPU")
    return "cpu" if reason else "cuda"


def _closing(loaded: Backend) -> Backend:
    """The same, whose threads end with it."""
    weakref.finalize(loaded, loaded.close)
    return loaded


def _why_no_device() -> str | None:
    if not numba.config.ENABLE_CUDASIM:
        try:
            ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        except OSError:
            return "no CUDA driver was found"
        missing = _missing_package()
        if missing:
            return f"{missing} is not installed (pip install 'strata-engine[cuda]')"
    from numba import cuda

    return None if cuda.is_available() else f"no CUDA device answers ({cuda.cuda_error() or 'the driver reports none'})"


def _missing_package() -> str | None:
    """What the kernels' compilation lacks, None where it is all there."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda"
    pathfinder = importlib.import_module("cuda.pathfinder")  # comes with it
    try:
        pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except pathfinder.DynamicLibNotFoundError:
        return "CUDA's run-time compiler (NVRTC)"
    return None
