"""Which held prefix serves a new prompt: the live conversation, its checkpoints, and conversations parked in RAM.

It owns retention and choice; it knows no file, no model and no clock (the caller stamps uses). Invariant: every
checkpoint here is a prefix of the tokens whose cells its owner still holds. Read next: engine.py, which takes
checkpoints and resumes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvcache import Cache, Snapshot

# A branch that ends in less than this share of a conversation is read again sooner than the whole is copied and kept.
LEAST_BRANCH = 1 / 32
N_RECENT = 3  # checkpoints that stay because they were used last: those of the latest turn


def common_start(ids: np.ndarray, prompt: np.ndarray) -> int:
    """How many tokens two lists of ids have in common from their start."""
    n = min(len(ids), len(prompt))
    differs = ids[:n] != prompt[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def is_prefix(ids: np.ndarray, prompt: np.ndarray) -> bool:
    """Whether `ids` is an exact start of `prompt`, at most all of it but the last token."""
    return len(ids) < len(prompt) and common_start(ids, prompt) == len(ids)


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
        """Keep a snapshot; one of the same length is only stamped anew.

        Over the limit one goes, never the root: of those that were not used of late, the one behind which the fewest
        tokens would have to be read again. Where few are kept, it is the least recently used.
        """
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
            evictable.sort(key=lambda checkpoint: checkpoint.used)
            old = evictable[:-N_RECENT] if self.limit > N_RECENT else evictable[:1]
            self.chain.remove(min(old, key=self._gap))

    def _gap(self, checkpoint: Checkpoint) -> int:
        """Tokens between a checkpoint and the one before it, or the start."""
        index = self.chain.index(checkpoint)
        return checkpoint.n_tokens - (self.chain[index - 1].n_tokens if index else 0)

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


class Timeline:
    """A conversation in a cache, with its checkpoints; `complete`: it may be resumed, saved or parked."""

    def __init__(self, cache: Cache, n_checkpoints: int):
        self.cache = cache
        self.checkpoints = Checkpoints(n_checkpoints)
        self.complete = False
        self.used = 0  # stamp of the latest use
        self.drafted = True  # whether the draft layer's cells are those of its tokens, as far as they are computed

    @property
    def n_tokens(self) -> int:
        """Tokens of the complete conversation held, 0 if none is."""
        return self.cache.n_tokens if self.complete else 0

    @property
    def ids(self) -> np.ndarray:
        return self.cache.ids

    @property
    def steered(self) -> bool:
        return self.cache.steered

    def live_arrays(self) -> tuple[np.ndarray, ...]:
        """A copy of the running state."""
        return self.cache.state.capture()

    @property
    def size_bytes(self) -> int:
        """Bytes that a copy takes."""
        cells = self.cache.cell_bytes(self.cache.n_tokens)
        state = sum(array.nbytes for array in self.cache.state.arrays) + self.cache.ids.nbytes
        return cells + state + sum(checkpoint.snapshot.size_bytes for checkpoint in self.checkpoints.chain)

    def copy(self) -> "Parked":
        """The whole conversation in RAM."""
        checkpoints = Checkpoints(self.checkpoints.limit)
        checkpoints.chain = list(self.checkpoints.chain)
        live = Checkpoint(self.cache.capture(), self.used)
        cells = _copy_cells(self.cache.windows(self.cache.n_tokens))
        return Parked(live, checkpoints, cells, self.steered, self.drafted)

    def common_start(self, prompt: np.ndarray, steered: bool) -> int:
        """How far a prompt goes along with what is held here."""
        return common_start(self.cache.ids, prompt) if self.complete and self.cache.steered == steered else 0

    def offer(self, prompt: np.ndarray, steered: bool) -> "Offer":
        """The most of a prompt that can be taken from here."""
        if self.cache.steered != steered:
            return NOTHING
        if self.complete and is_prefix(self.cache.ids, prompt):
            return Offer("live", self.cache.n_tokens)
        if self.complete and self.cache.shape.folds_nothing:
            n_tokens = min(common_start(self.cache.ids, prompt), len(prompt) - 1)
            return Offer("live", n_tokens) if n_tokens else NOTHING
        checkpoint = self.checkpoints.longest_prefix(prompt)
        return Offer("checkpoint", checkpoint.n_tokens, checkpoint) if checkpoint else NOTHING

    def take(self, offer: "Offer", used: int) -> None:
        """Make the cache hold exactly the start of the prompt that was offered; `used` stamps its record."""
        if offer.source == "none":
            self.forget()
        elif offer.parked:
            offer.parked.copy_to(self.cache, offer.n_tokens)
            self.checkpoints.chain = list(offer.parked.checkpoints.chain)
            self.cache.steered, self.drafted = offer.parked.steered, offer.parked.drafted
        if offer.record:
            offer.record.used = used
            self.cache.rewind(offer.record.snapshot.start(offer.n_tokens))
        elif offer.n_tokens < self.cache.n_tokens:
            self.cache.rewind(self.cache.capture().start(offer.n_tokens))
        self.checkpoints.cut(offer.n_tokens)
        self.complete = False

    def forget(self) -> None:
        """Hold nothing."""
        self.cache.zero()
        self.checkpoints.chain = []
        self.complete, self.drafted = False, True


@dataclass(eq=False)
class Parked:
    """A whole conversation in RAM: its running state, its checkpoints and the bytes of its cells."""

    live: Checkpoint
    checkpoints: Checkpoints
    cells: list[list[np.ndarray]] = field(repr=False)
    steered: bool = True
    drafted: bool = True
    priority: int = 0  # the entry of least priority goes first

    @property
    def n_tokens(self) -> int:
        return self.live.n_tokens

    @property
    def ids(self) -> np.ndarray:
        return self.live.snapshot.ids

    @property
    def used(self) -> int:
        return self.live.used

    def live_arrays(self) -> tuple[np.ndarray, ...]:
        """The state behind the last token."""
        return self.live.snapshot.arrays

    @property
    def size_bytes(self) -> int:
        records = [self.live, *self.checkpoints.chain]
        return sum(r.snapshot.size_bytes for r in records) + sum(part.nbytes for layer in self.cells for part in layer)

    def offer(self, prompt: np.ndarray, steered: bool) -> "Offer":
        """The most of a prompt that can be taken from here."""
        if self.steered != steered:
            return NOTHING
        if self.live.snapshot.folds_nothing:
            n_tokens = min(common_start(self.ids, prompt), len(prompt) - 1)
            return Offer("parked", n_tokens, self.live, self) if n_tokens else NOTHING
        matching = [r for r in (*self.checkpoints.chain, self.live) if is_prefix(r.snapshot.ids, prompt)]
        longest = max(matching, key=lambda record: record.n_tokens, default=None)
        return Offer("parked", longest.n_tokens, longest, self) if longest else NOTHING

    def common_start(self, prompt: np.ndarray, steered: bool) -> int:
        """How far a prompt goes along with this conversation."""
        return common_start(self.ids, prompt) if self.steered == steered else 0

    def copy_to(self, cache: Cache, n_tokens: int) -> None:
        """Copy the first cells back; the caller then rewinds the cache to a state of so many tokens."""
        for window, parts in zip(cache.windows(n_tokens), self.cells, strict=True):
            for part, size_bytes in enumerate(window.part_sizes):
                window.write(part, 0, parts[part][:size_bytes])


class Offer(NamedTuple):
    """A start of a prompt that is held: where, how many tokens, and the record of its state where one is needed."""

    source: str  # live, checkpoint, parked, store or none
    n_tokens: int
    record: Checkpoint | None = None
    parked: Parked | None = None
    hit: object | None = None  # what a store found

    @property
    def comes_in(self) -> bool:
        """Whether it is copied into the cache, so that nothing of what is live there stays."""
        return self.parked is not None or self.hit is not None

    @property
    def is_whole(self) -> bool:
        """Whether hardly anything of what is parked is left out; else that is a branch, which stays where it is."""
        return self.parked.n_tokens - self.n_tokens <= LEAST_BRANCH * self.parked.n_tokens


NOTHING = Offer("none", 0)


def best_offer(places: Iterable[Timeline | Parked], prompt: np.ndarray, steered: bool) -> tuple[Offer, int]:
    """The longest offer, that of the first place of equals, and how far the prompt goes along with any of them."""
    best, diverged_at = NOTHING, 0
    for place in places:
        offer = place.offer(prompt, steered)
        best = offer if offer.n_tokens > best.n_tokens else best
        diverged_at = max(diverged_at, place.common_start(prompt, steered))
    return best, diverged_at


class ParkingLot:
    """Parked conversations within a budget of bytes and places.

    Where room is wanted, the entry goes whose loss costs least: tokens that nothing else holds, with an allowance for
    those that came late (GreedyDual: Cao and Irani, 1997). But none goes for a newcomer whose own loss would cost less:
    a title request must not cost a long chat its place. That holds until newcomers have been given up for as much as
    the entry's own loss would cost, so that the chats of today find room among those of last week. `available_bytes`
    tells the free RAM; `floor_bytes` of it stay free, else nothing is parked.
    """

    def __init__(self, budget_bytes: int, n_slots: int, floor_bytes: int, available_bytes: Callable[[], int]):
        self.budget_bytes, self.n_slots, self.floor_bytes = budget_bytes, n_slots, floor_bytes
        self._available_bytes = available_bytes
        self._level = 0  # priority of the entry that went last
        self._given_up = 0  # tokens that found no place since one was last made for that reason
        self.entries: list[Parked] = []  # oldest first

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    def park(self, held: Timeline | Parked) -> bool:
        """Take in a whole conversation; False where it does not fit, and then nothing was given up for it."""
        size_bytes = held.size_bytes
        if size_bytes > self.budget_bytes or not self.n_slots:
            return False
        kept = [entry for entry in self.entries if not _superseded(entry, held)]
        loss, level = _loss(held.ids, [entry.ids for entry in kept]), self._level
        given_up = self._given_up
        while len(kept) >= self.n_slots or sum(entry.size_bytes for entry in kept) + size_bytes > self.budget_bytes:
            victim = self._least(kept, held.ids, loss)
            if victim is None:
                victim, given_up = self._least(kept, held.ids, loss + given_up), 0
            if victim is None:
                return False
            kept.remove(victim)
            level = max(level, victim.priority)
        freed = self.size_bytes - sum(entry.size_bytes for entry in kept)
        copied = 0 if isinstance(held, Parked) else size_bytes
        if self._available_bytes() + freed - copied < self.floor_bytes:
            return False
        entry = held if isinstance(held, Parked) else held.copy()
        self._level, self._given_up, entry.priority = level, given_up, level + loss
        self.entries = [*kept, entry]
        return True

    def give_up(self, n_tokens: int) -> None:
        """So many tokens found no place here and are lost."""
        self._given_up += n_tokens

    @staticmethod
    def _least(entries: list[Parked], newcomer: np.ndarray, newcomers_loss: int) -> Parked | None:
        """The entry to give up for a newcomer, the oldest of equals; None where each is worth more."""
        cheap = []
        for entry in entries:
            others = [other.ids for other in entries if other is not entry]
            if _loss(entry.ids, [newcomer, *others]) <= newcomers_loss:
                cheap.append(entry)
        return min(cheap, key=lambda entry: entry.priority, default=None)

    def remove(self, entry: Parked) -> None:
        self.entries.remove(entry)


def _superseded(entry: Parked, held: Timeline | Parked) -> bool:
    return entry.steered == held.steered and common_start(entry.ids, held.ids) == entry.n_tokens


def _loss(ids: np.ndarray, others: list[np.ndarray]) -> int:
    """Tokens that would have to be read again if a conversation went and the others stayed."""
    return len(ids) - max((common_start(ids, other) for other in others), default=0)


def _copy_cells(windows) -> list[list[np.ndarray]]:
    """The five parts of every layer's window as arrays of their own."""
    copies = []
    for window in windows:
        parts = [np.empty(size, np.uint8) for size in window.part_sizes]
        for part, out in enumerate(parts):
            window.read(part, 0, out)
        copies.append(parts)
    return copies
