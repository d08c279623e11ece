"""Which conversations are in memory, and where a request is read so that none of them is lost.

It owns the live conversation, those parked, and one that ran beside the live one; it knows no lines, no files and no
sampling. Invariant: what a request would overwrite is parked, kept beside, or told to be given up. Read next:
promptcache.py for what serves a prompt, generation.py for a request on its way, engine.py for the files.
"""

import time
from collections.abc import Callable

import numpy as np

import resources
from generation import CHUNK, DraftLayer, Resumed
from kvcache import Cache, Snapshot
from modelconfig import ModelError
from promptcache import LEAST_BRANCH, NOTHING, Checkpoints, Offer, Parked, ParkingLot, Timeline, best_offer
from storekeeper import Keeper
from verbs import SPARE_CELLS, GenRequest, Stored

MIB = 1 << 20
FREE_SHARE = 4  # parked conversations may take this part of the RAM that is free at the start
LONG_ANSWER = 1024  # tokens of an answer for which RAM is asked ahead; more is rarely written
LAST_STAMP = 2**64 - 1  # a file has room for no greater one, and may have come with it


class Conversations:
    """The conversation that is live, those parked beside it, and room for a request that is to leave both alone."""

    def __init__(self, engine):
        options = engine.options
        self.engine = engine
        self.drafter = DraftLayer(engine.model, engine.spec)
        self.live = Timeline(engine.new_cache(), options.prompt_cache)
        self.beside: Parked | None = None  # the latest conversation, where it ran beside the live one
        self.parking = ParkingLot(
            self._parking_mib() * MIB,
            options.conversation_cache_slots,
            options.conversation_cache_min_free_mib * MIB,
            lambda: resources.available_bytes(),
        )
        self._clock = 0  # stamp of the latest use
        self._n_latest = 0  # prompt tokens of the latest request, where something of it is kept
        self._shown = np.empty(0, np.int32)  # tokens that the live conversation is to hold again, see `keep`
        self.n_requests = self.n_hits = 0
        self.keeper: Keeper | None = None  # with --store

    def _parking_mib(self) -> int:
        """RAM for parked conversations: what was asked for, else a quarter of what is free now."""
        options = self.engine.options
        if not options.prompt_cache:
            return 0
        asked = options.conversation_cache_mib
        return resources.available_bytes() // MIB // FREE_SHARE if asked is None else asked

    @property
    def cache(self) -> Cache:
        return self.live.cache

    @property
    def checkpoints(self) -> Checkpoints:
        return self.live.checkpoints

    @property
    def held(self) -> Timeline | Parked | None:
        """The latest conversation: what SAVE writes."""
        return self.beside or (self.live if self.live.complete else None)

    @property
    def n_tokens(self) -> int:
        """Tokens of the latest conversation, 0 if none is held."""
        return self.beside.n_tokens if self.beside else max(self.live.n_tokens, len(self._shown))

    @property
    def stored(self) -> Stored | None:
        """What the store has done so far, None without one."""
        return self.keeper.counters if self.keeper else None

    def held_ids(self) -> np.ndarray:
        """The tokens of the latest conversation, int32."""
        self.settle()
        return self.held.ids if self.held else np.empty(0, np.int32)

    def all_held(self) -> list[Timeline | Parked]:
        """Every conversation held, the longest first."""
        self.settle()
        held = [*([self.live] if self.live.complete else []), *([self.beside] if self.beside else [])]
        return sorted([*held, *self.parking.entries], key=lambda one: one.n_tokens, reverse=True)

    # --- a request begins and ends

    def tick(self) -> int:
        """The stamp of a new use."""
        self._clock = min(self._clock + 1, LAST_STAMP)
        return self._clock

    def resume(self, request: GenRequest) -> Resumed:
        """Make a timeline hold the longest start of the prompt that anything held offers."""
        self.n_requests += 1
        if not request.checkpoint:
            self.settle()
        self._shown = self._shown[:0]  # what the live cache holds is whole, and the rest is read with this prompt
        if not self.engine.options.prompt_cache:
            self.live.forget()
            self.cache.steered = request.steered
            return Resumed(self.live, NOTHING, 0)
        places = [*([self.beside] if self.beside else []), self.live, *reversed(self.parking.entries)]
        offer, diverged_at = best_offer(places, request.prompt, request.steered)
        if self.keeper:
            offer = self.keeper.offer(request.prompt, request.steered, offer, self.cache)
            diverged_at = max(diverged_at, offer.n_tokens)
        self._explain(request, offer, diverged_at)
        if self.beside and request.checkpoint:
            going_on = offer.parked is self.beside and offer.is_whole
            if not going_on and not self.parking.park(self.beside):
                self._give_up(self.beside.n_tokens, "that ran beside the conversation held")
            self.beside = None
        timeline, offer, back = self._make_room(request, offer)
        if self.keeper:
            self.keeper.before_change(timeline, 0 if offer.comes_in else offer.n_tokens)
        if offer.hit:
            n_tokens = self.keeper.load(timeline, offer, request.prompt, self.tick())
            offer = offer._replace(n_tokens=n_tokens) if n_tokens else NOTHING
        else:
            timeline.take(offer, self.tick() if offer.record else 0)
        timeline.cache.steered = request.steered
        self.n_hits += offer.n_tokens > 0
        return Resumed(timeline, offer, diverged_at, back)

    def _make_room(self, request: GenRequest, offer: Offer) -> tuple[Timeline, Offer, Snapshot | None]:
        """Where the request is to be read, what it can take there, and the state to go back to behind it.

        What the live conversation would lose is parked first. Where it cannot be, a request that is cheaper to read
        than that runs beside it, and so does one of which nothing is to be kept.
        """
        live, kept = self.live, request.checkpoint
        loss = live.n_tokens - (0 if offer.comes_in else offer.n_tokens)
        if kept and offer.parked in self.parking.entries and offer.is_whole:
            self.parking.remove(offer.parked)
        if not loss:
            return live, offer, self.cache.capture() if live.complete and not kept else None
        beside = None if kept else self._beside(request)
        if beside is None:
            if (kept and loss <= LEAST_BRANCH * live.n_tokens) or self.parking.park(live):
                return live, offer, None
            beside = self._beside(request) if kept and len(request.prompt) < loss else None
        if beside is None:
            self._give_up(loss, "of the conversation held")
            return live, offer, None
        return beside, offer if offer.comes_in else NOTHING, None

    def _give_up(self, n_tokens: int, which: str) -> None:
        parked = "too little RAM" if not self.parking.entries else "too little RAM, or what is parked is worth more"
        self.engine.log(f"{n_tokens} tokens {which} are given up: {parked}")
        self.parking.give_up(n_tokens)

    def _beside(self, request: GenRequest) -> Timeline | None:
        """Room for one request beside the live conversation; None where there is too little RAM.

        The floor that parking leaves free does not count: a short request takes little, and soon gives it back.
        """
        n_tokens = len(request.prompt) + request.max_new + SPARE_CELLS
        n_likely = min(n_tokens, len(request.prompt) + LONG_ANSWER)
        try:
            if self.engine.cache_bytes(n_likely) <= resources.available_bytes() // 2:
                return Timeline(self.engine.new_cache(n_tokens), self.engine.options.prompt_cache)
        except (ModelError, MemoryError) as error:
            self.engine.log(f"no room for a request beside the conversation held: {error}")
        return None

    def _explain(self, request: GenRequest, offer: Offer, diverged_at: int) -> None:
        """One line about a prompt that leaves what is held; a request that asks for its source says it itself."""
        prompt, held = request.prompt, self.held
        if request.source or held is None or offer.n_tokens == held.n_tokens:
            return
        line = f"{offer.n_tokens} of {len(prompt)} prompt tokens are reused ({offer.source})"
        if held.steered != request.steered:
            self.engine.log(f"{line}: what is held was computed with another setting of cvec")
            return
        at = held.common_start(prompt, request.steered)
        if at < min(len(prompt), held.n_tokens):
            line += f"; the prompt parts from what was held at token {at}: {prompt[at]} in place of {held.ids[at]}"
        if offer.n_tokens < min(diverged_at, len(prompt) - 1):
            line += "; no state was kept closer to there"
        self.engine.log(line)

    def finish(self, request: GenRequest, resumed: Resumed) -> None:
        """End a request: what its cache holds is a conversation now, or is forgotten where nothing is to be kept."""
        timeline = resumed.timeline
        self._n_latest = len(request.prompt) if request.checkpoint else 0
        if resumed.back is not None:
            timeline.cache.rewind(resumed.back)
        elif not request.checkpoint:
            timeline.forget()
        timeline.complete = timeline.cache.n_tokens > 0
        timeline.used = self.tick()
        if timeline is not self.live and timeline.complete:
            self.beside = timeline.copy()
        if self.keeper and request.checkpoint and self.held:
            self.keeper.changed(self.held, self.cache, request.label)

    def forget(self, resumed: Resumed) -> None:
        """Drop what a request that failed has used: its state may be what made it fail."""
        resumed.timeline.forget()
        if resumed.offer.parked in self.parking.entries:
            self.parking.remove(resumed.offer.parked)
        if resumed.offer.parked is self.beside:
            self.beside = None
        if resumed.offer.hit:
            self.keeper.distrust(resumed.offer)

    def erase(self) -> int:
        """Forget the latest conversation and its checkpoints; returns how many tokens it had."""
        n_tokens = self.n_tokens
        if self.keeper:
            self.keeper.finish()
        self._shown, self._n_latest = self._shown[:0], 0
        if self.beside:
            self.beside = None
        else:
            self.live.forget()
        return n_tokens

    # --- tokens are read

    def read(self, timeline: Timeline, ids: np.ndarray, last: int):
        """Append ids[held:last] to a timeline, with the draft layer's cells; returns their residual [T, C, N]."""
        first, started = timeline.cache.n_tokens, time.perf_counter()
        residual = self.engine.model.append(timeline.cache, ids[first:last]).residual
        self.engine.tokens_read(last - first)
        if self.keeper and last > first:
            self.keeper.read_prompt(last - first, time.perf_counter() - started)
        self.fill_draft(timeline, residual, ids[first + 1 : last + 1], first)
        return residual

    def fill_draft(self, timeline: Timeline, residual, next_ids: np.ndarray, first_cell: int):
        """Cells of the draft layer for every token whose successor is known; returns their residual."""
        if self.engine.spec == 1 or not len(next_ids) or not timeline.drafted:
            return None
        return self.engine.model.draft(timeline.cache, residual[: len(next_ids)], next_ids, first_cell)

    def keep(self, n_answer: int) -> None:
        """Have the latest conversation end behind so many tokens of its answer: no more of it was shown to anybody.

        Cells are cut at once. A folded state goes back to the checkpoint before, and `settle` reads the rest again.
        """
        live, n_tokens = self.live, self._n_latest + n_answer
        if not self._n_latest or self.beside or n_tokens >= live.n_tokens:
            return  # what ran beside is short, and its checkpoints serve
        shown = live.cache.ids[:n_tokens].copy()
        offer = live.offer(np.append(shown, -1), live.cache.steered)
        if offer.n_tokens:
            live.take(offer, self.tick() if offer.record else 0)
            live.complete, self._shown = True, shown

    def rest(self, interrupted: Callable[[], bool]) -> None:
        """What there is to do between two commands, until the next one comes."""
        self.settle(interrupted)
        while self.keeper and not interrupted() and self.keeper.step():
            pass

    def settle(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Read again what `keep` left out; between two chunks the cache holds a whole prefix, and it may end there."""
        while self.cache.n_tokens < len(self._shown) and not interrupted():
            self.read(self.live, self._shown, min(self.cache.n_tokens + CHUNK, len(self._shown)))
        if self.cache.n_tokens >= len(self._shown):
            self._shown = self._shown[:0]
