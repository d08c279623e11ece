"""Experts of which a part lies on the device: slots, counted use, exchanges, and products over both sides.

It owns which expert lies where and who multiplies its rows; it knows no model, no token and no file. All experts lie in
host memory; a layer has slots on the device for some, an expert's three matrices together. The device multiplies the
rows of those that have a slot, the host the others meanwhile. Invariant: the bits of a product do not depend on where
it was made (see cpuexperts.py), and slots change between two passes alone. Read next: cpuexperts.py.
"""

import contextlib
import weakref
from collections.abc import Callable

import numpy as np
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

import cpuexperts
import cpuproducts
import cudapools
import cudaproducts
from cputeam import Team
from cudaproducts import Pack, matrix_bytes, multiply_tiles, room_for, seen_as, tile_rows, to_device
from packs import ROWS

MARGIN_BYTES = 1 << 30  # left free beside weights and cells: a chunk's activations take some 300 MiB, the context more
PERIOD_TOKENS = 32  # between two looks at what was used
DECAY = 0.7  # of a count, each period
LEAST_USE, LEAST_GAIN = 2.0, 1.5  # an expert has to be used so often, and so much more than the one it replaces
MAX_SWAPS = 32  # a period: some 90 MB over the bus where an expert has 3
# An expert with so many rows in one product is brought to the device for it: the bus takes less time than a processor.
LENT_ROWS = 4
LENT = 8  # matrices that are brought in for one launch


def pack_experts(kind, raw, n_cols, *, round_x=False):
    """`pack` for the experts of a layer, in host memory: `place_experts` finds out how many the device takes."""
    return cpuproducts.pack(kind, raw, n_cols)


def expert_matmul(weights, x, offsets, out):
    """Rows offsets[e]..offsets[e + 1] of x times expert e; x [n, n_cols], out [n, n_rows], offsets int64 [E + 1]."""
    if isinstance(weights, Pack):
        cudaproducts.expert_matmul(weights, x, offsets, out)
    else:
        weights.multiply(x, offsets, out)


class ExpertPack:
    """One of the three matrices of each of a layer's experts."""

    def __init__(self, layer: "ExpertLayer", host: cpuproducts.Pack, n_slots: int, lent):
        self.layer, self.host = layer, host
        self.device = room_for(host, n_slots) if n_slots else None
        self.lent = seen_as(host, lent, LENT)  # memory that is every pack's in turn
        self.n_rows, self.n_cols, self.n_matrices = host.n_rows, host.n_cols, host.n_matrices

    def fill(self, room: Pack, place: int, expert: int) -> None:
        """Copy an expert's matrix to a place on the device; in turn with the kernels before and behind it."""
        size = matrix_bytes(self.host)
        target, source = (slice(i * size, (i + 1) * size) for i in (place, expert))
        room.bytes[target].copy_to_device(self.host.data[source])

    def multiply(self, x, offsets, out) -> None:
        """`expert_matmul`: the device multiplies what it holds, the host the rest at the same time."""
        starts = offsets.copy_to_host()  # waits for what chose the experts
        n_rows = np.diff(starts)
        used = np.flatnonzero(n_rows)
        slots = self.layer.slot_of[used]
        here, away = used[slots >= 0], used[slots < 0]
        lent, left = away[n_rows[away] >= LENT_ROWS], away[n_rows[away] < LENT_ROWS]
        if self is self.layer.packs[0]:  # the three matrices of an expert are used together
            self.layer.count(n_rows, here, away, lent)
        runs = _runs(starts, left)
        rows = [x[first:end].copy_to_host() for first, end in runs]  # before the launch: they would wait for its end
        self._launch(self.device, slots[slots >= 0], here, starts, x, out)
        if runs:
            self._on_host(np.concatenate(rows), left, n_rows[left], runs, out)
        for first in range(0, len(lent), LENT):
            some = lent[first : first + LENT]
            for place, expert in enumerate(some):
                self.fill(self.lent, place, expert)
            self._launch(self.lent, range(len(some)), some, starts, x, out)

    def _launch(self, room: Pack, places, experts, starts, x, out) -> None:
        """The rows of some experts times the matrices at their places."""
        if not len(experts):
            return
        tile = tile_rows(int((starts[experts + 1] - starts[experts]).sum()), len(experts))
        tiles = [
            (place, row, min(row + tile, starts[expert + 1]))
            for place, expert in zip(places, experts, strict=True)
            for row in range(starts[expert], starts[expert + 1], tile)
        ]
        multiply_tiles(room, x, cuda.to_device(np.array(tiles, np.int32)), tile, out)

    def _on_host(self, rows, experts, n_rows, runs, out) -> None:
        """`rows` lie one behind the other, expert by expert; their results go where the runs say."""
        active = np.stack([experts, np.cumsum(n_rows) - n_rows, n_rows], axis=1)
        results = np.empty((len(rows), self.n_rows), np.float32)
        slices = cudapools.THREADS // min(ROWS, cudapools.THREADS)
        cpuexperts.multiply(self.layer.team, self.host, rows, active, slices, results)
        done = 0
        for first, end in runs:
            out[first:end].copy_to_device(results[done : done + end - first])
            done += end - first


def _runs(starts, experts) -> list[tuple[int, int]]:
    """First row and end of the rows of some experts, neighbours joined."""
    runs: list[tuple[int, int]] = []
    for expert in experts:
        first, end = int(starts[expert]), int(starts[expert + 1])
        if runs and runs[-1][1] == first:
            first = runs.pop()[0]
        runs.append((first, end))
    return runs


class ExpertLayer:
    """The experts of one layer: which lie in which slot, and how often each was used."""

    def __init__(self, n_experts: int, ranking: list[int], n_slots: int):
        self.slot_of = np.full(n_experts, -1)
        self.slot_of[ranking[:n_slots]] = np.arange(n_slots)
        self.rank = np.argsort(ranking)  # place of each expert in the order that was given
        self.uses = np.zeros(n_experts)  # rows, decayed each period
        self.packs: tuple = ()
        self.team: Team | None = None
        self.n_used = self.n_found = self.n_copied = 0

    def fill(self) -> None:
        """Put every expert that has a slot there."""
        for expert in np.flatnonzero(self.slot_of >= 0):
            for pack in self.packs:
                pack.fill(pack.device, self.slot_of[expert], expert)

    def count(self, n_rows, here, away, lent) -> None:
        """Note the experts of one pass: rows of each, those found on the device, those not, those lent to it."""
        self.uses += n_rows
        self.n_used += len(here) + len(away)
        self.n_found += len(here)
        self.n_copied += len(lent)

    def better(self) -> list[tuple[float, int, int]]:
        """Exchanges that are worth it, best first: how much more often used, the expert, the one it replaces."""
        is_here = self.slot_of >= 0
        away, here = (np.flatnonzero(side) for side in (~is_here, is_here))
        away = away[np.argsort(-self.uses[away], kind="stable")]
        here = here[np.argsort(self.uses[here], kind="stable")]
        pairs = zip(away.tolist(), here.tolist(), strict=False)
        gains = [(self.uses[new] - self.uses[old], new, old) for new, old in pairs if self.uses[new] >= LEAST_USE]
        return [gain for gain in gains if gain[0] >= LEAST_GAIN]

    def exchange(self, new: int, old: int) -> None:
        """Give the slot of one expert to another."""
        slot, self.slot_of[old] = self.slot_of[old], -1
        for pack in self.packs:
            pack.fill(pack.device, slot, new)
        self.slot_of[new] = slot
        self.n_copied += 1

    def ranking(self) -> list[int]:
        """Experts in the order in which they are worth a slot: those that have one, then by use, then as given."""
        return np.lexsort((self.rank, -self.uses, self.slot_of < 0)).tolist()


class ExpertCache:
    """The experts of all layers."""

    def __init__(self, layers: list[ExpertLayer]):
        self.layers = layers
        self.is_resident = all((layer.slot_of >= 0).all() for layer in layers)  # for good; then nothing is counted
        self._pins = contextlib.ExitStack()
        self._n_tokens = 0  # since the last period

    @property
    def n_copied(self) -> int:
        """Experts brought to the device since `forget`."""
        return sum(layer.n_copied for layer in self.layers)

    @property
    def n_used(self) -> int:
        """Experts used since `forget`, once for each pass through their layer."""
        return sum(layer.n_used for layer in self.layers)

    @property
    def n_found(self) -> int:
        """How many of those the device held."""
        return sum(layer.n_found for layer in self.layers)

    def forget(self) -> None:
        """Count from nothing."""
        for layer in self.layers:
            layer.uses[:] = 0
            layer.n_used = layer.n_found = layer.n_copied = 0

    def tokens_read(self, n: int) -> None:
        """To be called between passes: at the end of a period, exchange what is used little for what is used more."""
        self._n_tokens += n
        if self._n_tokens < PERIOD_TOKENS or self.is_resident:
            return
        self._n_tokens = 0
        gains = [(gain, number, new, old) for number, layer in enumerate(self.layers)
                 for gain, new, old in layer.better()]  # fmt: skip
        for _, number, new, old in sorted(gains, key=lambda entry: -entry[0])[:MAX_SWAPS]:
            self.layers[number].exchange(new, old)
        for layer in self.layers:
            layer.uses *= DECAY

    def ranking(self) -> list[list[int]]:
        """Of each layer, its experts in the order in which they are worth a slot."""
        return [layer.ranking() for layer in self.layers]

    def pin(self, log: Callable[[str], None]) -> None:
        """Have the device copy straight out of the experts' memory, where the driver lets it."""
        try:
            for layer in self.layers:
                for pack in layer.packs:
                    self._pins.enter_context(cuda.pinned(pack.host.data))
        except CudaAPIError as error:
            log(f"not all experts could be pinned in RAM ({error}): copies of the others are slower")


# --- placing ------------------------------------------------------------------------------------------------------


def place_experts(parts: list, ranking: list[list[int]] | None, asked_bytes: int, reserved_bytes: int, n_threads: int,
                  log: Callable[[str], None]) -> ExpertCache:  # fmt: skip
    """Put as many experts on the device as there is room for, and all packs where they belong.

    `parts` have packs gate_up (two) and down, which are replaced; `ranking` lists each part's experts, those first that
    are worth a slot. Room is asked_bytes, or, where 0, all that is free but reserved_bytes and a margin.
    Raises ValueError where asked_bytes hold no expert of each layer.
    """
    n_experts = parts[0].down.n_matrices
    of_matrices = [[matrix_bytes(pack) for pack in (*part.gate_up, part.down)] for part in parts]
    sizes, lent_bytes = [sum(matrices) for matrices in of_matrices], LENT * max(map(max, of_matrices))
    room = asked_bytes or max(0, free_bytes() - reserved_bytes - MARGIN_BYTES)
    n_slots = _slots(sizes, n_experts, room, lent_bytes)
    if asked_bytes and not n_slots[-1]:
        raise ValueError(
            f"{asked_bytes >> 20} MiB are too few for one expert of each of {len(parts)} layers:"
            f" {-(-(sum(sizes) + lent_bytes) >> 20)} are the least"
        )
    ranking = ranking or [list(range(n_experts))] * len(parts)
    layers = [ExpertLayer(n_experts, order, n) for order, n in zip(ranking, n_slots, strict=True)]
    cache = ExpertCache(layers)
    if cache.is_resident:
        for part in parts:
            *part.gate_up, part.down = (to_device(pack) for pack in (*part.gate_up, part.down))
        return cache
    _share_out(cache, parts, lent_bytes, n_threads)
    cache.pin(log)
    for layer in layers:
        layer.fill()
    shown = f"{min(n_slots)} to {max(n_slots)}" if min(n_slots) < max(n_slots) else f"{n_slots[0]}"
    held = sum(size * n for size, n in zip(sizes, n_slots, strict=True))
    log(f"experts: {shown} of {n_experts} a layer on the device ({held >> 20} MiB), the others on {n_threads} threads")
    return cache


def free_bytes() -> float:
    """Free memory of the device."""
    return cuda.current_context().get_memory_info().free


def _slots(sizes: list[int], n_experts: int, room: float, lent_bytes: int) -> list[int]:
    """Slots of each layer: all where they fit, else as many for each, and one more for the first of them."""
    if sum(sizes) * n_experts <= room:
        return [n_experts] * len(sizes)
    room = max(0, int(room) - lent_bytes)
    n = room // sum(sizes)
    rest, slots = room - n * sum(sizes), []
    for size in sizes:
        more = size <= rest
        rest -= size * more
        slots.append(n + more)
    return slots


def _share_out(cache: ExpertCache, parts: list, lent_bytes: int, n_threads: int) -> None:
    """Give each layer its packs with empty slots, and the memory and threads that all have in common."""
    lent, team = cuda.device_array(lent_bytes, np.uint8), Team(n_threads)
    weakref.finalize(cache, team.close)
    for layer, part in zip(cache.layers, parts, strict=True):
        layer.team, n_slots = team, int((layer.slot_of >= 0).sum())
        layer.packs = tuple(ExpertPack(layer, pack, n_slots, lent) for pack in (*part.gate_up, part.down))
        *part.gate_up, part.down = layer.packs
