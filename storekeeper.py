"""Every answered conversation kept in a store as it grows, and found again by any prompt that begins like it.

It owns when something is written, and what a hit is worth; it knows no bytes of files and no sampling. Invariant: what
the store holds is what the pools held, so no cell that is still to be written is overwritten before; and nothing here
fails a request: what cannot be written or read is one log line and a number in the counters. Read next: storeflush.py
for the writing, storefolder.py for the reading, conversations.py for who asks.
"""

import struct
import time
from collections.abc import Callable

import numpy as np

import sessionstate
from fingerprint import Config, config_fingerprint
from kvcache import Cache, Snapshot
from promptcache import Offer, Parked, Timeline
from storeflush import Flush, Kept, OfferedState
from storefolder import Store
from storeindex import Hit
from storelayout import ROOT, TURN, Shape, State, StoreError
from verbs import Stored

# Raised when, and only when, the same tokens leave other bits in pools or state.
ARITHMETIC = 2
FIRST_TOKEN_S = 1 / 500  # per prompt token, until prompts have been read
FIRST_BYTES_PER_S = 500e6  # until something was read from the store
OLD_SHARE = 0.7  # of a rate that was measured before, in the next one


def identity_of(model: int, config: Config) -> bytes:
    """What bits depend on, 32 bytes: the model and the arithmetic, not the release, the context or its residency."""
    switches = (*config.switches, ("arithmetic", ARITHMETIC))
    arithmetic = config._replace(engine="", max_context=0, kv_resident=0, mtp_window=0, switches=switches)
    return struct.pack("<QQ16x", model, config_fingerprint(arithmetic))


def shape_of(cache: Cache) -> Shape:
    """What decides how many bytes a conversation of such a cache takes."""
    return Shape.of(cache.windows(1), cache.draft_pool is not None, cache.shape.state_sizes)


def kept_of(held: Timeline | Parked, cache: Cache, identity: bytes, drafts: bool, label: str, n_replayed: int) -> Kept:
    """What is kept of a conversation: all cells, and the states at its end, its deepest checkpoint and its root.

    `cache` is any of its shape; `drafts`: cells of the draft layer are computed; `n_replayed`: tokens that may as well
    be read again.
    """
    chain = [c for c in held.checkpoints.chain if c.root or c is held.checkpoints.deepest()]
    states = {held.n_tokens: OfferedState(held.n_tokens, held.live_arrays, TURN, held.used)}
    for c in chain:
        states[c.n_tokens] = OfferedState(
            c.n_tokens, lambda c=c: c.snapshot.arrays, ROOT if c.root else TURN, c.used
        )  # fmt: skip
    n_drafted = held.n_tokens if drafts and held.drafted else 0
    ids, sources = np.array(held.ids, np.int32), sessionstate.sources_of(held, cache)
    return Kept(identity, shape_of(cache), ids, sources, list(states.values()), n_drafted, label, n_replayed)


def fill(cache: Cache, store: Store, hit: Hit, ids: np.ndarray) -> tuple[Snapshot | None, State | None]:
    """Have an empty cache hold the first `ids`, which a hit begins with, or as many of them as can be read.

    Returns the state that the cache is in then, None where nothing could be read, and what the store knows of it.
    """
    sink = sessionstate.checkpoint_sink(cache)
    loaded = store.load(hit, len(ids), shape_of(cache), cache.windows(len(ids)), sink)
    n_tokens = loaded.n_tokens if cache.shape.folds_nothing else loaded.state.position if loaded.state else 0
    if not n_tokens:
        return None, None
    snapshot = Snapshot(np.array(ids[:n_tokens], np.int32), tuple(sink.arrays))
    cache.rewind(snapshot)
    return snapshot, loaded.state


def _blended(old: float, new: float) -> float:
    """A rate that follows what is measured, without jumping with each of it."""
    return OLD_SHARE * old + (1 - OLD_SHARE) * new


class Keeper:
    """The store of one session. Call `changed` behind an answer, `step` when there is time, `finish` before an end."""

    def __init__(self, store: Store, identity: Callable[[bool], bytes], *, drafts: bool, min_tokens: int,
                 replay_s: float, log: Callable[[str], None], errors: tuple[type[Exception], ...] = ()):  # fmt: skip
        """`identity` gives that of conversations with (True) or without the control vector; `drafts`: cells of the
        draft layer are computed; `errors` are what a failing device raises."""
        self.store, self.identity, self._drafts = store, identity, drafts
        self._min_tokens, self._replay_s, self._log = min_tokens, replay_s, log
        self._errors = (StoreError, MemoryError, *errors)
        self._waiting: Timeline | Parked | None = None  # has something that is not being written yet
        self._flush: Flush | None = None
        self._source: tuple[Timeline | Parked, int] | None = None  # whose cells the flush reads, and how many tokens
        self._cache: Cache | None = None
        self._label = ""
        self._token_s, self._bytes_per_s = FIRST_TOKEN_S, FIRST_BYTES_PER_S
        self.counters = Stored()

    # --- writing

    def changed(self, held: Timeline | Parked, cache: Cache, label: str = "") -> None:
        """A conversation has an answer more; `cache` is the live one, which has the shape of all."""
        if held.n_tokens >= self._min_tokens:
            if self._waiting is not None and self._waiting is not held:
                self.finish()  # the other one is written first
            self._waiting, self._cache, self._label = held, cache, label

    def step(self) -> bool:
        """Write a block; whether there is more to do."""
        try:
            if self._flush is None:
                self._begin()
            elif not self._flush.step():
                self._ended()
        except self._errors as error:
            self._failed(error)
        return self._flush is not None or self._waiting is not None

    def finish(self) -> None:
        """Write all that waits: before it is overwritten, and before an end."""
        while self.step():
            pass

    def before_change(self, timeline: Timeline, n_kept: int) -> None:
        """Cells of a timeline behind the first `n_kept` tokens are about to be overwritten."""
        waits = self._waiting is timeline and n_kept < timeline.n_tokens
        reads = self._source is not None and self._source[0] is timeline and n_kept < self._source[1]
        if waits or reads:
            self.finish()

    def _begin(self) -> None:
        held, self._waiting = self._waiting, None
        if held is None or held.n_tokens < self._min_tokens:  # it was cut since, or is forgotten
            return
        identity, n_replayed = self.identity(held.steered), int(self._replay_s / self._token_s)
        kept = kept_of(held, self._cache, identity, self._drafts, self._label, n_replayed)
        self.store.live = (kept.identity, kept.ids)
        self._flush, self._source = Flush(self.store, kept), (held, len(kept.ids))

    def _ended(self) -> None:
        c, size_bytes = self.counters, self._flush.size_bytes
        if size_bytes:  # else the store had it all
            self.counters = c._replace(written_bytes=c.written_bytes + size_bytes, n_flushes=c.n_flushes + 1)
        self._flush = self._source = None

    def _failed(self, error: Exception) -> None:
        if self._flush is not None:
            self._flush.close()
        self.counters = self.counters._replace(n_failures=self.counters.n_failures + 1)
        self._flush = self._source = None
        self._log(f"store: a conversation is not kept: {error}")

    # --- reading

    def read_prompt(self, n_tokens: int, seconds: float) -> None:
        """So many prompt tokens took so long to read: what a hit saves is measured against it."""
        self._token_s = _blended(self._token_s, seconds / n_tokens)

    def offer(self, prompt: np.ndarray, steered: bool, best: Offer, cache: Cache) -> Offer:
        """The better of an offer of memory and what the store holds of a prompt."""
        try:
            hit = self.store.lookup(self.identity(steered), prompt)
        except StoreError as error:
            self._log(f"store: {error}")
            return best
        n_tokens = min(hit.n_tokens, len(prompt) - 1)
        if not cache.shape.folds_nothing:
            positions = [place.piece.position for place in hit.states if place.piece.position <= n_tokens]
            n_tokens = max(positions, default=0)
        n_tokens = min(n_tokens, cache.shape.n_cells)
        gained_s = (n_tokens - best.n_tokens) * self._token_s
        if n_tokens <= best.n_tokens or gained_s < self._size_of(n_tokens, cache) / self._bytes_per_s:
            return best
        return Offer("store", n_tokens, hit=hit)

    def _size_of(self, n_tokens: int, cache: Cache) -> int:
        return cache.cell_bytes(n_tokens) + sum(cache.shape.state_sizes)

    def distrust(self, offer: Offer) -> None:
        """What a request that failed has read is set aside: it would fail again."""
        for name in sorted(offer.hit.files):
            text = "numbers that are not finite came of what is in it"
            self.store.refused(StoreError("invalid", "not-finite", self.store.path_of(name), text))

    def load(self, timeline: Timeline, offer: Offer, prompt: np.ndarray, used: int) -> int:
        """Make a timeline hold what was offered of a prompt, and nothing else; returns how many tokens came back."""
        timeline.forget()
        cache, started = timeline.cache, time.perf_counter()
        try:
            snapshot, state = fill(cache, self.store, offer.hit, prompt[: offer.n_tokens])
        except StoreError as error:
            self._log(f"store: {error}")
            return 0
        if snapshot is None:
            return 0
        n_tokens = snapshot.n_tokens
        timeline.drafted = offer.hit.n_drafted >= n_tokens
        if state:
            timeline.checkpoints.add(snapshot, used, root=state.kind == ROOT)
        seconds = time.perf_counter() - started
        self._bytes_per_s = _blended(self._bytes_per_s, self._size_of(n_tokens, cache) / seconds)
        c = self.counters
        self.counters = c._replace(n_hits=c.n_hits + 1, n_tokens=c.n_tokens + n_tokens)
        return n_tokens
