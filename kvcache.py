"""What a conversation leaves behind in memory: K/V pools, running state, checkpoints.

It owns layout, capture and apply; it knows no file and no model (the sizes come in as a `CacheShape`). Invariant: the
number of cells held changes only together with the state that folds the same tokens (`commit`, `rewind`, `zero`), so a
K/V cut without its recurrent state cannot be written. Pools and running state are the backend's arrays, snapshots are
NumPy's. Read next: engine.py, which decides when; sessionfile.py, which reads and fills the pools piece by piece.
"""

import math
from typing import NamedTuple

import numpy as np

from cells import PAGE, CellFormat, KvHeader, Residency, head_bytes, scale_bytes

GEOMETRY_SLOTS = (
    "n_embd", "n_layers", "qsa_interval", "ssm_state_size", "ssm_k_heads", "ssm_v_heads", "ssm_d_conv",
    "ssm_conv_channels", "ssm_value_dim", "n_head", "n_head_kv", "head_dim", "idx_q_heads", "idx_key_dim", "hc",
    "hc_lr", "n_expert", "n_ff",
)  # fmt: skip
DRAFT_WINDOW = 32768  # cells that the draft layer looks back over where not all are kept at hand


class StateArray(NamedTuple):
    """One array of the running state, flat; one that no kernel reads stays in the host's memory."""

    name: str
    dtype: type
    size: int
    read_by_kernels: bool = True


class CacheShape(NamedTuple):
    """All that decides how large the cache of a model is."""

    geometry: tuple[int, ...]  # 18 numbers, GEOMETRY_SLOTS
    n_attention: int  # attention layers of the trunk
    n_recurrent: int  # gated delta net layers
    has_draft: bool
    n_head_kv: int
    head_dim: int
    index_dim: int  # width of the indexer's keys, 0 without an indexer
    history_bytes: int  # the n-gram layer's convolution history
    n_cells: int  # a multiple of PAGE
    cell_format: CellFormat
    draft_format: CellFormat

    @property
    def recurrent_floats(self) -> int:
        """float32 values of one gated delta net layer: the recurrent state, then the rows of its convolution."""
        g = dict(zip(GEOMETRY_SLOTS, self.geometry, strict=True))
        taps = max(g["ssm_d_conv"] - 1, 0)
        return g["ssm_state_size"] ** 2 * g["ssm_v_heads"] + g["ssm_conv_channels"] * taps

    @property
    def state(self) -> tuple[StateArray, ...]:
        """What folds a prefix into fixed size, in the order of a session file."""
        indexed = self.n_attention if self.index_dim else 0
        return (
            StateArray("gdn", np.float32, self.n_recurrent * self.recurrent_floats),
            StateArray("ple", np.float32, self.history_bytes // 4),
            StateArray("tails", np.float32, indexed * (PAGE - 1) * self.index_dim),
            StateArray("dead", np.float32, indexed * self.index_dim),
            StateArray("block_pos", np.int32, indexed, read_by_kernels=False),
        )

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Bytes of each array of the running state."""
        return tuple(array.size * np.dtype(array.dtype).itemsize for array in self.state)

    @property
    def folds_nothing(self) -> bool:
        """Whether cells are all there is, so that a conversation may be cut behind any of its tokens."""
        return not any(self.state_sizes)

    def device_bytes(self, n_resident: int = 0) -> int:
        """Bytes that a `Cache` of this shape takes where it computes; `n_resident` is that of the cache."""

        def cells(n: int, form: CellFormat) -> int:
            kinds = form.k_storage, form.v_storage
            return n * self.n_head_kv * sum(f(kind, self.head_dim) for f in (head_bytes, scale_bytes) for kind in kinds)

        trunk = min(n_resident // PAGE * PAGE or self.n_cells, self.n_cells)
        draft = min(DRAFT_WINDOW if n_resident else self.n_cells, self.n_cells) if self.has_draft else 0
        pooled = 4 * (self.n_cells // PAGE + 1) * self.index_dim
        layers = self.n_attention * (cells(trunk, self.cell_format) + pooled) + cells(draft, self.draft_format)
        return layers + sum(self.state_sizes)


class LayerPool:
    """The cells of one attention layer: codes [page][kv head][cell][bytes], their scales, and pooled index keys.

    A conversation's first cells are a prefix of each array, so a part of a session file is a plain range of bytes.
    """

    def __init__(self, shape: CacheShape, cell_format: CellFormat, index_dim: int, ops, residency=None):
        """`residency`, the backend's, tells which pages lie on a device; None: all where the backend computes."""
        pages, width = shape.n_cells // PAGE, shape.head_dim
        self.format, self.head_dim, self.index_dim, self.ops = cell_format, width, index_dim, ops
        storages = (cell_format.k_storage, cell_format.v_storage)
        sizes = [size(storage, width) for size in (head_bytes, scale_bytes) for storage in storages]
        self.k, self.v, self.k_scale, self.v_scale = ops.cells(pages, shape.n_head_kv, sizes, residency)
        # One row a page and the spare row of the open block behind the last one.
        self.pooled = ops.zeros((pages + 1 if index_dim else 0, index_dim))

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in (self.k, self.v, self.k_scale, self.v_scale, self.pooled))

    def window(self, n_tokens: int) -> "PoolWindow":
        """The cells of the first `n_tokens` tokens, as a session file stores them."""
        return PoolWindow(self, n_tokens)


class PoolWindow:
    """A layer's first cells as five ranges of bytes: what sessionfile reads in SAVE and fills in RESTORE."""

    def __init__(self, pool: LayerPool, n_tokens: int):
        pages = -(-n_tokens // PAGE)
        rows = n_tokens // PAGE + 1 if pool.index_dim and n_tokens else 0
        self.header = KvHeader(
            pool.format.code, pages * PAGE, pool.k.shape[1], pool.head_dim, PAGE, rows, pool.index_dim
        )
        self._ops, self._arrays = pool.ops, (pool.k, pool.v, pool.k_scale, pool.v_scale, pool.pooled)
        used = (pages, pages, pages, pages, rows)
        self.part_sizes = tuple(
            n * array.dtype.itemsize * math.prod(array.shape[1:]) for n, array in zip(used, self._arrays, strict=True)
        )

    def read(self, part: int, offset: int, out: np.ndarray) -> None:
        """Copy len(out) bytes of part `part` from `offset` into the uint8 array `out`."""
        self._ops.read_bytes(self._arrays[part], offset, out)

    def write(self, part: int, offset: int, data: np.ndarray) -> None:
        """Copy the uint8 array `data` over part `part` at `offset`."""
        self._ops.write_bytes(self._arrays[part], offset, data)


class Snapshot(NamedTuple):
    """Everything that folds a prefix into fixed size, with the prefix itself; immutable.

    `arrays` are NumPy copies of those of `RunningState`, in the order of `CacheShape.state`.
    """

    ids: np.ndarray
    arrays: tuple[np.ndarray, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def size_bytes(self) -> int:
        return self.ids.nbytes + sum(array.nbytes for array in self.arrays)

    @property
    def folds_nothing(self) -> bool:
        """Whether there is no state beside the tokens, so that every start of them is a snapshot too."""
        return not any(array.nbytes for array in self.arrays)

    def start(self, n_tokens: int) -> "Snapshot":
        """The snapshot of the first `n_tokens`; where state is folded, there is no other than the whole."""
        assert self.folds_nothing or n_tokens == self.n_tokens, "a folded state cannot be cut"
        return self._replace(ids=self.ids[:n_tokens])


class RunningState:
    """The arrays that every token changes; flat, so that a capture is one copy each."""

    def __init__(self, shape: CacheShape, ops):
        self._ops = ops
        self._arrays = {a.name: (ops if a.read_by_kernels else np).zeros(a.size, a.dtype) for a in shape.state}
        self._placed = [(self._arrays[a.name], a.read_by_kernels) for a in shape.state]
        self.gdn, self.ple, self.block_pos = (self._arrays[name] for name in ("gdn", "ple", "block_pos"))
        g = dict(zip(GEOMETRY_SLOTS, shape.geometry, strict=True))
        self._layer_floats = shape.recurrent_floats
        self._recurrent = (g["ssm_v_heads"], g["ssm_state_size"], g["ssm_state_size"])
        self._channels, self._index_dim = g["ssm_conv_channels"], shape.index_dim

    @property
    def arrays(self) -> tuple:
        return tuple(self._arrays.values())

    def on_host(self) -> tuple[np.ndarray, ...]:
        """The arrays as NumPy ones, the state's own where the backend works on the host's memory."""
        return tuple(self._ops.to_host(a) if there else a for a, there in self._placed)

    def capture(self) -> tuple[np.ndarray, ...]:
        """The arrays as NumPy copies."""
        return tuple(self._ops.host_copy(a) if there else a.copy() for a, there in self._placed)

    def fill(self, saved) -> None:
        """Overwrite the arrays with NumPy ones of the same sizes."""
        for (array, there), data in zip(self._placed, saved, strict=True):
            if there:
                self._ops.assign(array, data)
            else:
                array[:] = data

    def zero(self) -> None:
        for array, there in self._placed:
            self._ops.clear(array) if there else array.fill(0)

    def recurrent(self, index: int):
        """State [value heads, S_key, S_value] of the index-th gated delta net layer, a view."""
        start = index * self._layer_floats
        return self.gdn[start : start + math.prod(self._recurrent)].reshape(*self._recurrent)

    def conv(self, index: int):
        """The last convolution inputs [taps - 1, channels] of the index-th gated delta net layer, a view."""
        start, end = index * self._layer_floats + math.prod(self._recurrent), (index + 1) * self._layer_floats
        return self.gdn[start:end].reshape((end - start) // self._channels, self._channels)

    def tail(self, index: int):
        """Raw index keys [3, D] of the open block of the index-th attention layer, a view."""
        size = (PAGE - 1) * self._index_dim
        return self._arrays["tails"][index * size : (index + 1) * size].reshape(PAGE - 1, self._index_dim)

    def dead_key(self, index: int):
        """The key [D] that stands for the open block of the index-th attention layer, a view."""
        return self._arrays["dead"][index * self._index_dim : (index + 1) * self._index_dim]


class Cache:
    """One timeline: pools, running state and the tokens they hold.

    `steered` says whether the control vector enters the passes over it.
    """

    def __init__(self, shape: CacheShape, ops, n_resident: int = 0):
        """`ops` is the backend whose arrays hold it all; of each layer it keeps n_resident cells at hand, 0: all."""
        self.shape, self._ops = shape, ops
        trunk = Residency(n_resident // PAGE) if n_resident else None
        draft = Residency(DRAFT_WINDOW // PAGE, ring=True) if n_resident else None
        self.pools = [
            LayerPool(shape, shape.cell_format, shape.index_dim, ops, trunk) for _ in range(shape.n_attention)
        ]
        self.draft_pool = LayerPool(shape, shape.draft_format, 0, ops, draft) if shape.has_draft else None
        self.state = RunningState(shape, ops)
        self._ids = np.empty(shape.n_cells, np.int32)
        self._n_tokens = 0
        self.steered = True

    @property
    def n_tokens(self) -> int:
        return self._n_tokens

    @property
    def ids(self) -> np.ndarray:
        """The tokens held, a view int32 [n_tokens] that cannot be written: state and cells would not follow."""
        view = self._ids[: self._n_tokens]
        view.flags.writeable = False
        return view

    @property
    def _all_pools(self) -> list[LayerPool]:
        """Every layer's pool, the draft layer last, in the order of a session file."""
        return self.pools + ([self.draft_pool] if self.draft_pool else [])

    @property
    def size_bytes(self) -> int:
        """Bytes of pools and running state."""
        return sum(pool.size_bytes for pool in self._all_pools) + sum(array.nbytes for array in self.state.arrays)

    def cell_bytes(self, n_tokens: int) -> int:
        """Bytes of the cells of the first `n_tokens` tokens."""
        return sum(sum(window.part_sizes) for window in self.windows(n_tokens))

    def windows(self, n_tokens: int) -> list[PoolWindow]:
        """Every layer's cells of the first `n_tokens` tokens, the draft layer last, in the order of a session file."""
        return [pool.window(n_tokens) for pool in self._all_pools]

    def commit(self, ids: np.ndarray) -> None:
        """Count `ids` as held; the forward pass has just written their cells and folded them into the state."""
        end = self._n_tokens + len(ids)
        self._ids[self._n_tokens : end] = ids
        self._n_tokens = end
        self.state.block_pos[:] = end // PAGE * PAGE
        self._place_dead_keys()

    def capture(self) -> Snapshot:
        """A copy of the running state and its tokens; cells are not in it, they are addressed by position."""
        return Snapshot(self.ids.copy(), self.state.capture())

    def rewind(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot whose cells the pools still hold; later cells are overwritten by what is read next."""
        self.state.fill(snapshot.arrays)
        self._n_tokens = snapshot.n_tokens
        self._ids[: self._n_tokens] = snapshot.ids
        for pool in self._all_pools:
            self._ops.settle(pool.k, self._n_tokens)
        self._place_dead_keys()

    def zero(self) -> None:
        """Forget everything."""
        self.state.zero()
        self._n_tokens = 0

    def _place_dead_keys(self) -> None:
        # The row behind the last complete block stands for the open one; longer or discarded text may have used it.
        if self.shape.index_dim:
            for index, pool in enumerate(self.pools):
                self._ops.assign(pool.pooled[self._n_tokens // PAGE], self.state.dead_key(index))
