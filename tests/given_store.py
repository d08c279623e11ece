"""A model of which only the bytes count: cells and states that follow from the tokens, for the tests of the store.

It owns the pools, and what their bytes must be; it knows no file. Invariant: a cell and a state follow from all tokens
up to them and from nothing else, so that bytes that reached the wrong place are found.
"""

import hashlib
import itertools
import random

import numpy as np

from storefile import StoreWriter, arrays_of, cells_of
from storeflush import Flush, Kept, OfferedState, segments_of, state_at
from storefolder import LOCK_NAME, Store
from storelayout import PAGE, ROOT, Head, Shape, State

IDENTITY = bytes(range(32))
SHAPE = Shape(((32, 32, 8, 8, 12), (16, 0, 0, 4, 0), (8, 8, 0, 0, 0)), True, (40, 8, 0, 4, 4))
BIG = SHAPE._replace(state_sizes=(60_000, 0, 0, 0, 0))
PLAIN = Shape(((16, 16, 4, 4, 0),), False, (0, 0, 0, 0, 0))  # folds nothing
NO_QUOTA = 1 << 40


def ids_of(n_tokens: int, seed: int = 0, start=()) -> np.ndarray:
    """Token ids that begin with `start`."""
    rng = np.random.default_rng(seed)
    return np.concatenate([np.asarray(start, np.int32), rng.integers(0, 1000, n_tokens - len(start), np.int32)])


def names_of(ids: np.ndarray) -> list[bytes]:
    """A name for every start of some ids."""
    chain = itertools.accumulate(ids.tolist(), lambda name, i: hashlib.blake2b(name + b"%d" % i).digest(), initial=b"")
    return list(chain)


def stream(name: bytes, size: int, *what: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(name + repr(what).encode()).digest(size), np.uint8)


class Window:
    """One layer's pool as `Cache.windows` shows it."""

    def __init__(self, units: tuple[int, ...], n_tokens: int):
        pages, rows = -(-n_tokens // PAGE), n_tokens // PAGE + 1 if units[4] else 0
        self.header = (0, pages * PAGE, 1, 1, PAGE, rows, 0)
        counts = (pages, pages, pages, pages, rows)
        self.parts = [np.zeros(n * unit, np.uint8) for n, unit in zip(counts, units, strict=True)]
        self.part_sizes = tuple(part.size for part in self.parts)

    def read(self, part: int, offset: int, out: np.ndarray) -> None:
        assert offset + out.size <= self.part_sizes[part]
        out[:] = self.parts[part][offset : offset + out.size]

    def write(self, part: int, offset: int, data: np.ndarray) -> None:
        assert offset + data.size <= self.part_sizes[part]
        self.parts[part][offset : offset + data.size] = data


def empty_windows(shape: Shape, n_tokens: int) -> list[Window]:
    return [Window(units, n_tokens) for units in shape.layers]


def filled_windows(shape: Shape, ids: np.ndarray) -> list[Window]:
    """The pools after these tokens were read; nothing is said of the cells behind the last one."""
    windows, names = empty_windows(shape, len(ids)), names_of(ids)
    for layer, (window, units) in enumerate(zip(windows, shape.layers, strict=True)):
        for part, unit in enumerate(units):
            if not unit:
                continue
            step, size = (1, unit // PAGE) if part < 4 else (PAGE, unit)
            for at in range(step, len(ids) + 1, step):
                offset = (at // step - 1) * size
                window.parts[part][offset : offset + size] = stream(names[at], size, layer, part)
    return windows


def same_cells(shape: Shape, windows, ids: np.ndarray, n_drafted: int | None = None) -> bool:
    """Whether pools hold the cells of these tokens, of the draft layer those of the first `n_drafted`."""
    expected = filled_windows(shape, ids)
    for layer, (window, right) in enumerate(zip(windows, expected, strict=True)):
        is_draft = shape.has_draft and layer == len(shape.layers) - 1
        n = len(ids) if n_drafted is None or not is_draft else n_drafted
        for part, unit in enumerate(shape.layers[layer]):
            size = n * (unit // PAGE) if part < 4 else n // PAGE * unit
            if not np.array_equal(window.parts[part][:size], right.parts[part][:size]):
                return False
    return True


class StateSink:
    def __init__(self, shape: Shape):
        self.parts = [np.zeros(size, np.uint8) for size in shape.state_sizes]

    def write(self, part: int, offset: int, data: np.ndarray) -> None:
        self.parts[part][offset : offset + data.size] = data


def state_arrays(shape: Shape, ids: np.ndarray) -> list[np.ndarray]:
    """The state behind these tokens."""
    name = names_of(ids)[-1]
    return [stream(name, size, part) for part, size in enumerate(shape.state_sizes)]


def same_state(shape: Shape, sink: StateSink, ids: np.ndarray) -> bool:
    return all(map(np.array_equal, sink.parts, state_arrays(shape, ids)))


def kept(ids, states=(), *, shape=SHAPE, identity=IDENTITY, n_drafted=1 << 30, root=0, label="", replay=0) -> Kept:
    """A conversation with states at some positions, that at `root` being the end of its system prompt."""
    offered = [
        OfferedState(n, lambda n=n: state_arrays(shape, ids[:n]), ROOT if n == root else 0) for n in states
    ]
    return Kept(identity, shape, ids, filled_windows(shape, ids), offered, n_drafted, label, replay)


def flush(store: Store, what: Kept) -> Flush:
    """Write a conversation in one go."""
    done = Flush(store, what)
    while done.step():
        pass
    return done


def writer_of(path, what: Kept, segments=None) -> StoreWriter:
    """A writer of one file with all segments of a conversation, or some, and all its states."""
    segments = segments_of(what) if segments is None else segments
    states = [state_at(what, offer) for offer in what.states]
    head = Head(what.identity, what.shape, tuple(segments), tuple(states), what.label)
    sources = [cells_of(segment, what.shape, what.windows) for segment in segments]
    return StoreWriter(str(path), head, sources + [arrays_of(offer.arrays()) for offer in what.states])


def write(path, what: Kept, segments=None) -> Head:
    writer = writer_of(path, what, segments)
    while writer.step():
        pass
    return writer.head


def new_store(folder, quota_bytes: int = NO_QUOTA, floor_bytes: int = 0, log=None) -> Store:
    return Store(str(folder), quota_bytes, floor_bytes, log or (lambda line: None))


def check_prompt(store: Store, ids: np.ndarray, *, shape=SHAPE, identity=IDENTITY) -> tuple[int, State | None]:
    """Look a prompt up and load it; nothing wrong may arrive. Returns the tokens that can be gone on from."""
    hit = store.lookup(identity, ids)
    windows, sink = empty_windows(shape, max(len(ids), 1)), StateSink(shape)
    loaded = store.load(hit, len(ids), shape, windows, sink)
    assert loaded.n_tokens <= hit.n_tokens <= len(ids)
    assert same_cells(shape, windows, ids[: loaded.n_tokens], min(hit.n_drafted, loaded.n_tokens))
    if loaded.state:
        assert loaded.state.position <= loaded.n_tokens
        assert same_state(shape, sink, ids[: loaded.state.position])
    return loaded.n_tokens, loaded.state


def random_shape(rng: random.Random) -> Shape:
    """Any sizes, among them none; bytes of a page in fours, as it has four cells."""
    layers = tuple(
        (*(rng.choice((0, 4, 8, 36)) for _ in range(4)), rng.choice((0, 3, 16))) for _ in range(rng.randrange(1, 5))
    )
    sizes = tuple(rng.choice((0, 5, 64)) for _ in range(5))
    return Shape(layers, rng.random() < 0.5, sizes)


def files(folder) -> dict[str, int]:
    """Names and sizes of all but the lock."""
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != LOCK_NAME}


def position(found: tuple[int, State | None]) -> tuple[int, int]:
    return found[0], found[1].position if found[1] else 0
