"""Which held prefix serves a new prompt: checkpoints of the live conversation, and conversations parked in RAM.

It owns retention and choice; it knows no file, no model and no clock (the caller stamps uses). Invariant: every
checkpoint here is a prefix of the tokens whose cells its owner still holds. Read next: engine.py, which takes
checkpoints and resumes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvcache import Cache, Snapshot


def is_prefix(ids: np.ndarray, prompt: np.ndarray) -> bool:
    """Whether `ids` is an exact start of `prompt`, at most all of it but the last token."""
    return len(ids) < len(prompt) and np.array_equal(ids, prompt[: len(ids)])


@dataclass(eq=False)
class Checkpoint:
    """A snapshot with the stamp of its last use; the root (end of a long system prompt) is never evicted."""

    snapshot: Snapshot
    used: int
    root: bool = False

    @property
    def n_tokens(self) -> int:
        return self.snapshot.n_tokens


class Checkpoints:
    """A chain of prefixes of one conversation, at most `limit`, shortest first."""

    def __init__(self, limit: int):
        self.limit = limit
        self.chain: list[Checkpoint] = []

    def add(self, snapshot: Snapshot, used: int, *, root: bool = False) -> None:
        """Keep a snapshot; one of the same length is only stamped anew. Over the limit the least recently used goes."""
        for checkpoint in self.chain:
            if checkpoint.n_tokens == snapshot.n_tokens:
                checkpoint.used = used
                checkpoint.root |= root
                return
        self.chain.append(Checkpoint(snapshot, used, root))
        self.chain.sort(key=lambda checkpoint: checkpoint.n_tokens)
        while len(self.chain) > self.limit:
            # With room for a single checkpoint a pinned root would shut out every later one.
            evictable = [c for c in self.chain if not (c.root and self.limit > 1)]
            self.chain.remove(min(evictable, key=lambda checkpoint: checkpoint.used))

    def longest_prefix(self, prompt: np.ndarray) -> Checkpoint | None:
        """The longest checkpoint that is an exact start of the prompt."""
        matching = [c for c in self.chain if is_prefix(c.snapshot.ids, prompt)]
        return matching[-1] if matching else None

    def deepest(self) -> Checkpoint | None:
        """The one with the most tokens."""
        return self.chain[-1] if self.chain else None

    def cut(self, n_tokens: int) -> None:
        """Drop those longer than `n_tokens`: their cells are about to be overwritten."""
        self.chain = [c for c in self.chain if c.n_tokens <= n_tokens]


@dataclass(eq=False)
class Parked:
    """A whole conversation in RAM: its running state, its checkpoints and the bytes of its cells."""

    live: Checkpoint
    checkpoints: list[Checkpoint]
    cells: list[list[np.ndarray]] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        records = [self.live, *self.checkpoints]
        return sum(r.snapshot.size_bytes for r in records) + sum(part.nbytes for layer in self.cells for part in layer)

    def longest_prefix(self, prompt: np.ndarray) -> Checkpoint | None:
        """The longest of its states that is an exact start of the prompt."""
        matching = [r for r in (*self.checkpoints, self.live) if is_prefix(r.snapshot.ids, prompt)]
        return max(matching, key=lambda record: record.n_tokens, default=None)

    def unpark(self, cache: Cache) -> None:
        """Copy the cells back; the caller then rewinds the cache to one of this conversation's states."""
        for window, parts in zip(cache.windows(self.live.n_tokens), self.cells, strict=True):
            for part, data in enumerate(parts):
                window.write(part, 0, data)


class ParkingLot:
    """Parked conversations, oldest out when bytes or places run out.

    `available_bytes` tells the free RAM; `floor_bytes` of it stay free, else nothing is parked.
    """

    def __init__(self, budget_bytes: int, n_slots: int, floor_bytes: int, available_bytes: Callable[[], int]):
        self.budget_bytes, self.n_slots, self.floor_bytes = budget_bytes, n_slots, floor_bytes
        self._available_bytes = available_bytes
        self.entries: list[Parked] = []  # oldest first

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    def park(self, cache: Cache, checkpoints: Checkpoints, used: int) -> bool:
        """Copy the whole live state to RAM; False where it does not fit, and then nothing was given up for it."""
        windows = cache.windows(cache.n_tokens)
        size_bytes = sum(sum(window.part_sizes) for window in windows) + sum(a.nbytes for a in cache.state.arrays)
        size_bytes += sum(checkpoint.snapshot.size_bytes for checkpoint in checkpoints.chain) + cache.ids.nbytes
        if size_bytes > self.budget_bytes or not self.n_slots:
            return False
        kept = [entry for entry in self.entries if not self._superseded(entry, cache.ids)]
        while kept and (len(kept) >= self.n_slots or sum(e.size_bytes for e in kept) + size_bytes > self.budget_bytes):
            kept.pop(0)
        freed = self.size_bytes - sum(entry.size_bytes for entry in kept)
        if self._available_bytes() + freed - size_bytes < self.floor_bytes:
            return False
        self.entries = kept
        self.entries.append(Parked(Checkpoint(cache.capture(), used), list(checkpoints.chain), _copy_cells(windows)))
        return True

    def best(self, prompt: np.ndarray, more_than: int) -> tuple[Parked, Checkpoint] | None:
        """The parked conversation with the longest matching state of more than `more_than` tokens, newest of equals."""
        best = None
        for entry in reversed(self.entries):
            record = entry.longest_prefix(prompt)
            if record and record.n_tokens > more_than:
                best, more_than = (entry, record), record.n_tokens
        return best

    def remove(self, entry: Parked) -> None:
        self.entries.remove(entry)

    @staticmethod
    def _superseded(entry: Parked, ids: np.ndarray) -> bool:
        held = entry.live.snapshot.ids
        return len(held) <= len(ids) and np.array_equal(held, ids[: len(held)])


def _copy_cells(windows) -> list[list[np.ndarray]]:
    """The five parts of every layer's window as arrays of their own."""
    copies = []
    for window in windows:
        parts = [np.empty(size, np.uint8) for size in window.part_sizes]
        for part, out in enumerate(parts):
            window.read(part, 0, out)
        copies.append(parts)
    return copies
