"""Everything a device can show, in one command of a few minutes: `python tools/gpu_check.py [--json FILE]`.

It runs every kernel against its CPU twin at the sizes of a real layer, measures decode and prefill rates against the
copy bandwidth found on the spot, holds layers with half of their experts on the device against layers with all, and
sends a session of 1.2 GB out of and back into the device's pools. It needs a device and the packages numba, numba-cuda,
numpy, rich and psutil, and for session files crcmod-plus beside them; exit code 1 where something is not right. Read
next: cuda_cases.py.
"""

import argparse
import dataclasses
import json
import platform
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cuda_cases
import numba
import numpy as np
import psutil
from numba import cuda
from rich.console import Console
from rich.table import Table

import backend
import cudapools
import kernels_cuda
import packs
import resources
from cells import FORMATS, Residency
from kvcache import CacheShape, LayerPool
from sessionlayout import Identity, Image, Limits, Record

ops = backend.Backend("cuda", resources.usable_cores(), **kernels_cuda.operations())
host = backend.load("cpu", resources.usable_cores(), print)
GIB = 1 << 30
SESSION_BYTES = 1_200_000_000
# The attention layer of cuda_cases.REAL: 24 query heads over 2 K/V heads of 256.
LAYER = {"heads": 24, "kv_heads": 2, "head_dim": 256}


def timed(run, *, at_least_s: float = 0.5) -> float:
    """Seconds of one run on the device, the mean over as many as take half a second; one run before warms up."""
    run()
    cuda.synchronize()
    n, started = 0, time.perf_counter()
    while time.perf_counter() - started < at_least_s or n < 3:
        run()
        n += 1
        if n % 8 == 0:
            cuda.synchronize()
    cuda.synchronize()
    return (time.perf_counter() - started) / n


# --- kernels against their twins ----------------------------------------------------------------------------------


def check_kernels(console: Console, sizes) -> list[dict]:
    """Every case on both backends, also with the sizes around a warp; a row a case."""
    rows = []
    for item in cuda_cases.CASES:
        worst, started = 0.0, time.perf_counter()
        many = cuda_cases.MANY_CELLS if item.name.startswith(("attention", "select", "pool")) else sizes.n
        for n in (1, 33, many):
            given = sizes._replace(n=n)
            expected, found = (cuda_cases.run_case(item, one, given) for one in (host, ops))
            worst = max(worst, cuda_cases.largest_error(expected, found, item.tolerance))
        row = {"case": item.name, "error": worst, "tolerance": item.tolerance, "largest_n": many,
               "ok": worst <= item.tolerance, "seconds": time.perf_counter() - started}  # fmt: skip
        rows.append(row)
        if not row["ok"]:
            console.print(f"[red]{item.name}: error {worst:g}, allowed {item.tolerance:g}[/red]")
    return rows


# --- rates --------------------------------------------------------------------------------------------------------


def measure_copies(size_bytes: int = GIB) -> dict:
    """Bytes a second within the device and over the bus, each way, pinned."""
    a, b = (cuda.device_array(size_bytes, np.uint8) for _ in range(2))
    pinned = cuda.pinned_array(size_bytes, np.uint8)
    pinned.fill(1)
    return {
        "device_gb_s": 2 * size_bytes / timed(lambda: b.copy_to_device(a)) / 1e9,
        "to_device_gb_s": size_bytes / timed(lambda: a.copy_to_device(pinned)) / 1e9,
        "to_host_gb_s": size_bytes / timed(lambda: a.copy_to_host(pinned)) / 1e9,
    }


def measure_products(device_gb_s: float, rows: int = 10240, columns: int = 2560, layers: int = 24) -> list[dict]:
    """Products with one token, as in decoding, and with 512, as in prefill; more matrices than a cache holds."""
    figures = []
    rng = np.random.default_rng(0)
    for kind in ("F16", "Q8_0", "Q4_K", "Q6_K"):
        packs = [cuda_cases.pack(ops, rng, kind, 1, rows, columns)]
        data = packs[0].bytes.copy_to_host()
        packs += [packs[0]._replace(**_views_of(cuda.to_device(data))) for _ in range(layers - 1)]
        weights_bytes = data.nbytes * layers
        for n_tokens in (1, 4, 512):
            x, out = ops.from_host(cuda_cases.normal(rng, n_tokens, columns)), ops.empty((n_tokens, rows))
            seconds = timed(lambda packs=packs, x=x, out=out: [ops.matmul(weights, x, out) for weights in packs])
            gb_s = weights_bytes / seconds / 1e9
            figures.append({"kind": kind, "tokens": n_tokens, "weights_gb_s": gb_s, "of_copy": gb_s / device_gb_s,
                            "tflops": 2 * layers * n_tokens * rows * columns / seconds / 1e12})  # fmt: skip
    return figures


def _views_of(data) -> dict:
    words, halves, floats = (data.view(dtype) for dtype in (np.int32, np.float16, np.float32))
    return {"bytes": data, "words": words, "halves": halves, "floats": floats}


def measure_attention(device_gb_s: float, n_cells: int = 131_072) -> list[dict]:
    """Dense attention of one token, and of a chunk of 256, over a long conversation."""
    figures, rng, scale = [], np.random.default_rng(0), np.float32(LAYER["head_dim"] ** -0.5)
    for name in ("fp16", "int8", "q4_0"):
        pool = new_layer(name, n_cells)
        cell_bytes = sum(array.nbytes for array in (pool.k, pool.v, pool.k_scale, pool.v_scale))
        for n_tokens in (1, 256):
            shape = (n_tokens, LAYER["heads"], LAYER["head_dim"])
            q, out = ops.from_host(cuda_cases.normal(rng, *shape)), ops.empty(shape)
            f, pools = pool.format, (pool.k, pool.k_scale, pool.v, pool.v_scale)
            seconds = timed(lambda q=q, out=out, f=f, pools=pools, n=n_tokens: ops.attention(
                f.k_storage, f.v_storage, *pools, q, n_cells - n, scale, out))  # fmt: skip
            gb_s = cell_bytes / seconds / 1e9
            figures.append({"kv": name, "tokens": n_tokens, "cells": n_cells, "ms": 1e3 * seconds, "cells_gb_s": gb_s,
                            "of_copy": gb_s / device_gb_s})  # fmt: skip
    return figures


def measure_decode_step(device_gb_s: float) -> dict:
    """One token through products, norm and attention of 24 dense layers of width 2560 in Q4_K, launches included."""
    width, n_ff, rng = 2560, 6912, np.random.default_rng(1)
    heads, kv_heads, head_dim = LAYER["heads"], LAYER["kv_heads"], LAYER["head_dim"]
    shapes = {"q": (heads * head_dim, width), "k": (kv_heads * head_dim, width), "v": (kv_heads * head_dim, width),
              "out": (width, heads * head_dim), "gate": (n_ff, width),
              "up": (n_ff, width), "down": (width, n_ff)}  # fmt: skip
    layers = [{name: cuda_cases.pack(ops, rng, "Q4_K", 1, *shape) for name, shape in shapes.items()}]
    data = {name: weights.bytes.copy_to_host() for name, weights in layers[0].items()}
    for _ in range(23):
        layers.append({name: weights._replace(**_views_of(cuda.to_device(data[name])))
                       for name, weights in layers[0].items()})  # fmt: skip
    pool, norm = new_layer("int8", 4096), ops.from_host(np.ones((1, width), np.float32))
    x = ops.from_host(cuda_cases.normal(rng, 1, width))
    seconds = timed(lambda: [_dense_layer(layer, pool, x, norm) for layer in layers])
    weights_bytes = sum(array.nbytes for array in data.values()) * 24
    return {"tokens_per_s": 1 / seconds, "weights_gb_s": weights_bytes / seconds / 1e9,
            "of_copy": weights_bytes / seconds / 1e9 / device_gb_s}  # fmt: skip


def _dense_layer(layer, pool, x, norm) -> None:
    def product(name, given):
        out = ops.empty((1, layer[name].n_rows))
        ops.matmul(layer[name], given, out)
        return out

    heads, kv_heads, head_dim = LAYER["heads"], LAYER["kv_heads"], LAYER["head_dim"]
    normed, f = ops.empty(x.shape), pool.format
    ops.rms_norm(x, norm, cuda_cases.EPS, normed)
    q = product("q", normed).reshape(1, heads, head_dim)
    k, v = (product(name, normed).reshape(1, kv_heads, head_dim) for name in ("k", "v"))
    ops.append_cells(f.k_storage, k, 4095, pool.k, pool.k_scale)
    ops.append_cells(f.v_storage, v, 4095, pool.v, pool.v_scale)
    mixed, pools = ops.empty(q.shape), (pool.k, pool.k_scale, pool.v, pool.v_scale)
    ops.attention(f.k_storage, f.v_storage, *pools, q, 4095, np.float32(1 / 16), mixed)
    ops.add_rows(x, product("out", mixed.reshape(1, heads * head_dim)))
    gate, up = product("gate", normed), product("up", normed)
    ops.silu_mul(gate, up, gate)
    ops.add_rows(x, product("down", gate))


# --- experts ------------------------------------------------------------------------------------------------------


class ExpertSizes(NamedTuple):
    """Layers of experts, and how many tokens go through them one by one, and together as a prompt."""

    layers: int = 8
    experts: int = 64
    used: int = 8
    width: int = 2560
    n_ff: int = 640
    decoded: int = 64
    prompt: int = 256


def check_experts(s: ExpertSizes) -> list[dict]:
    """The same tokens with all experts on the device and with half of them: equal bits, hit rate, tokens a second."""
    rng, rows, expected, n_threads = np.random.default_rng(5), [], None, resources.usable_cores()
    shapes = {"gate": (s.n_ff, s.width), "up": (s.n_ff, s.width), "down": (s.width, s.n_ff)}
    experts = {name: cuda_cases.random_weights(rng, "Q4_0", s.experts, *shape) for name, shape in shapes.items()}
    matrices = {name: ops.pack_experts(packs.NUMBERS["Q4_0"], raw, shapes[name][1]) for name, raw in experts.items()}
    chosen = _chosen_experts(rng, s, 2 * s.decoded + s.prompt)
    x = cuda_cases.normal(rng, 2 * s.decoded + s.prompt, s.width)
    all_bytes = s.layers * sum(pack.data.nbytes for pack in matrices.values())
    for on_device, asked_bytes in (("all", all_bytes), ("half", all_bytes // 2)):
        parts = [_copied_experts(matrices) for _ in range(s.layers)]
        cache = ops.place_experts(parts, None, asked_bytes, 0, n_threads, lambda line: None)
        outputs, row = _run_experts(s, parts, cache, chosen, x)
        expected = expected or outputs
        row["ok"] = all(np.array_equal(a, b) for a, b in zip(expected, outputs, strict=True))
        rows.append({"on_device": on_device} | row)
    return rows


def _copied_experts(matrices) -> types.SimpleNamespace:
    """A layer's packs as the loader gives them, with memory of their own."""
    gate, up, down = (dataclasses.replace(matrices[n], data=matrices[n].data.copy()) for n in ("gate", "up", "down"))
    return types.SimpleNamespace(gate_up=ops.together(gate, up), down=down)


def _chosen_experts(rng, s: ExpertSizes, n_tokens: int) -> np.ndarray:
    """Experts int32 [layers, tokens, used]: a layer's n-th favourite is taken with a weight of 1 / n."""
    taken = rng.gumbel(size=(s.layers, n_tokens, s.experts)) - np.log(np.arange(1, s.experts + 1))
    ranks = np.argsort(-taken, axis=2)[:, :, : s.used]
    names = np.argsort(rng.random((s.layers, s.experts)), axis=1)
    return np.take_along_axis(names, ranks.reshape(s.layers, -1), axis=1).reshape(ranks.shape).astype(np.int32)


def _run_experts(s: ExpertSizes, parts, cache, chosen, x) -> tuple[list[np.ndarray], dict]:
    """Tokens one by one, of which the first half is for learning, then a prompt: outputs and figures."""
    outputs, row, at = [], {}, 0
    for name, n_passes, n_tokens in (("learning", s.decoded, 1), ("decode", s.decoded, 1), ("prompt", 1, s.prompt)):
        n_used, n_found = cache.n_used, cache.n_found
        cuda.synchronize()
        started = time.perf_counter()
        for _ in range(n_passes):
            outputs.append(ops.to_host(_expert_pass(s, parts, x[at : at + n_tokens], chosen[:, at : at + n_tokens])))
            cache.tokens_read(n_tokens)
            at += n_tokens
        row[f"{name}_tokens_per_s"] = n_passes * n_tokens / (time.perf_counter() - started)
        if name == "decode" and not cache.is_resident:
            row["hit_rate"] = (cache.n_found - n_found) / (cache.n_used - n_used)
    return outputs, {"hit_rate": 1.0, "copied": cache.n_copied} | row


def _expert_pass(s: ExpertSizes, parts, x: np.ndarray, chosen: np.ndarray):
    """Tokens through all layers, as a model's pass sends them."""
    n, mixed = len(x), ops.from_host(x)
    norm = ops.from_host(np.ones((1, s.width), np.float32))
    share = ops.from_host(np.full((n, s.used), 1 / s.used, np.float32))
    for part, experts in zip(parts, chosen, strict=True):
        order, offsets = ops.empty(n * s.used, np.int64), ops.empty(s.experts + 1, np.int64)
        ops.order_by_expert(ops.from_host(experts), s.experts, order, offsets)
        normed, rows = ops.empty((n, s.width)), ops.empty((n * s.used, s.width))
        ops.rms_norm(mixed, norm, cuda_cases.EPS, normed)
        ops.gather_assigned(normed, order, rows)
        gate, up = ops.expert_matmul_each(part.gate_up, rows, offsets)
        down = ops.empty((n * s.used, s.width))
        ops.silu_mul(gate, up, gate)
        ops.expert_matmul(part.down, gate, offsets, down)
        mixed = ops.empty((n, s.width))
        ops.combine_experts(down, order, share, mixed)
    return mixed


# --- sessions -----------------------------------------------------------------------------------------------------


def new_layer(name: str, n_cells: int, residency=None) -> LayerPool:
    """Pools of one layer, filled with random cells."""
    cell_format = FORMATS[name]
    pool = LayerPool(_shape(cell_format, 1, n_cells), cell_format, 0, ops, residency)
    chunk = min(n_cells, 4096)
    cells = cuda_cases.normal(np.random.default_rng(2), chunk, LAYER["kv_heads"], LAYER["head_dim"])
    for first in range(0, n_cells, chunk):
        # Turned, since a cell in another's place would not be noticed if all chunks were the same.
        x = ops.from_host(np.roll(cells, first // chunk, axis=2)[: n_cells - first])
        ops.append_cells(cell_format.k_storage, x, first, pool.k, pool.k_scale)
        ops.append_cells(cell_format.v_storage, x, first, pool.v, pool.v_scale)
    return pool


def _shape(cell_format, n_layers: int, n_cells: int) -> CacheShape:
    return CacheShape(
        geometry=(0,) * 18, n_attention=n_layers, n_recurrent=0, has_draft=False, n_head_kv=LAYER["kv_heads"],
        head_dim=LAYER["head_dim"], index_dim=0, history_bytes=0, n_cells=n_cells, cell_format=cell_format,
        draft_format=cell_format,
    )  # fmt: skip


def check_sessions(folder: str, session_bytes: int = SESSION_BYTES, n_slots: int = 5120) -> list[dict]:
    """Write 1.2 GB of cells to a file and read them into other pools, in each residency mode; bytes are compared."""
    rows, n_layers = [], 12
    cell_bytes = 2 * LAYER["kv_heads"] * (LAYER["head_dim"] + LAYER["head_dim"] // 32)
    n_cells = session_bytes // (n_layers * cell_bytes) // 4 * 4
    modes = {"resident": None, "streamed": Residency(n_slots), "ring": Residency(n_slots, True)}
    for mode, residency in modes.items():
        pools = [new_layer("int8", n_cells, residency) for _ in range(n_layers)]
        others = [LayerPool(_shape(FORMATS["int8"], 1, n_cells), FORMATS["int8"], 0, ops, residency) for _ in pools]
        rows.append({"mode": mode} | _round_trip(f"{folder}/{mode}.bin", pools, others, n_cells))
        del pools, others
    return rows


def _round_trip(path: str, pools, others, n_cells: int) -> dict:
    from sessionfile import SessionReader, write_session

    identity = Identity(1, 2)
    empty = [np.empty(0, np.uint8)] * 5
    image = Image((0,) * 18, 0, len(pools), False, Record(np.zeros(n_cells, np.int32), [], *empty, used=1), [])
    started = time.perf_counter()
    size_bytes = write_session(path, image, identity, [pool.window(n_cells) for pool in pools])
    save_s = time.perf_counter() - started
    windows = [pool.window(n_cells) for pool in others]
    limits = Limits(max_tokens=n_cells, max_checkpoints=1, max_kv_layers=len(pools), max_state_bytes=(0,) * 5,
                    max_kv_bytes=[window.part_sizes for window in windows])  # fmt: skip
    started = time.perf_counter()
    with SessionReader(path, identity, limits) as reader:
        reader.apply(windows)
    for pool in others:
        ops.settle(pool.k, n_cells)
    cuda.synchronize()
    restore_s = time.perf_counter() - started
    same = all(_same_cells(a, b, n_cells) for a, b in zip(pools, others, strict=True))
    return {"bytes": size_bytes, "save_gb_s": size_bytes / save_s / 1e9, "restore_gb_s": size_bytes / restore_s / 1e9,
            "ok": same}  # fmt: skip


def _same_cells(a: LayerPool, b: LayerPool, n_cells: int) -> bool:
    """Every byte, and what attention reads of the last cell, which goes through the page table."""
    for part, size in enumerate(a.window(n_cells).part_sizes):
        found = [np.empty(size, np.uint8) for _ in range(2)]
        for pool, out in zip((a, b), found, strict=True):
            pool.window(n_cells).read(part, 0, out)
        if not np.array_equal(*found):
            return False
    results = []
    for pool in (a, b):
        q = ops.from_host(cuda_cases.normal(np.random.default_rng(3), 1, LAYER["heads"], LAYER["head_dim"]))
        out, f = ops.empty(q.shape), pool.format
        ops.attention(f.k_storage, f.v_storage, pool.k, pool.k_scale, pool.v, pool.v_scale, q, n_cells - 1,
                      np.float32(1 / 16), out)  # fmt: skip
        results.append(ops.to_host(out))
    return np.array_equal(*results)


# --- the report ---------------------------------------------------------------------------------------------------


def machine() -> dict:
    device = cuda.get_current_device()
    name = device.name if isinstance(device.name, str) else device.name.decode()
    return {"device": name, "compute_capability": ".".join(map(str, device.compute_capability)),
            "numba": numba.__version__, "numpy": np.__version__, "python": platform.python_version(),
            "cpu_threads": psutil.cpu_count(), "ram_bytes": psutil.virtual_memory().total,
            "threads_a_block": cudapools.THREADS}  # fmt: skip


def show(console: Console, title: str, rows: list[dict]) -> None:
    table = Table(*(str(name) for name in rows[0]), title=title)
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--folder", help="where session files are written for the check (default: a temporary folder)")
    options = parser.parse_args()
    console = Console()
    if not cuda.is_available():
        console.print(f"no CUDA device answers: {cuda.cuda_error() or 'the driver names none'}")
        return 1
    figures = {"machine": machine()}
    show(console, "machine", [figures["machine"]])
    figures["kernels"] = check_kernels(console, cuda_cases.REAL)
    show(console, "kernels against the CPU", figures["kernels"])
    figures["copies"] = measure_copies()
    rate = figures["copies"]["device_gb_s"]
    figures["products"], figures["attention"] = measure_products(rate), measure_attention(rate)
    figures["decode"] = measure_decode_step(rate)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures["sessions"] = check_sessions(folder)
    figures["experts"] = check_experts(ExpertSizes())
    for name in ("copies", "products", "attention", "decode", "experts", "sessions"):
        show(console, name, figures[name] if isinstance(figures[name], list) else [figures[name]])
    failed = [row for name in ("kernels", "experts", "sessions") for row in figures[name] if not row["ok"]]
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    console.print(f"{len(failed)} checks failed" if failed else "every check passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
