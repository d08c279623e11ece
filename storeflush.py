"""A conversation on its way into the store: what of it is new, what that makes superfluous, and the writing in steps.

It owns which segments and states a flush writes, which older files it replaces, and how much it copies for that; it
knows no engine and no clock. Invariant: a file is removed only when everything in it that is still needed lies in
another one, a flush writes at most twice the bytes of what is new, and copies no more than that gives back.
Read next: storefolder.py, which makes the room; storefile.py, which writes.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from storefile import Pull, StoreReader, StoreWriter, arrays_of, cells_of
from storefolder import Store
from storeindex import Hit, Piece, StoreFile, covers
from storelayout import (
    ID_BYTES,
    MAX_LABEL_BYTES,
    PAGE,
    ROOT,
    SEGMENT_TOKENS,
    STATE,
    Head,
    Segment,
    Shape,
    State,
    StoreError,
    child_key,
    data_bytes,
    id_bytes,
    root_key,
)

LARGE_BYTES = 1 << 20  # a state of so many has a file of its own, so that it goes without anything being copied
MOST_LARGER = 4  # times: cells that come behind others of a segment, else all of them are written in one piece
OLD_SHARE = 4  # what is read again behind an older state may be this part of what was abandoned behind it


class OfferedState(NamedTuple):
    """A state that could be kept: what folds the first `position` tokens, in five arrays (`Snapshot.arrays`)."""

    position: int
    arrays: Callable[[], Sequence[np.ndarray]]  # asked at once, and only where it is to be written
    kind: int  # TURN or ROOT
    used: int = 0  # stamp of its last use


@dataclass(eq=False)
class Kept:
    """What an engine has of one conversation and wants kept."""

    identity: bytes
    shape: Shape
    ids: np.ndarray  # int32
    windows: Sequence  # of every layer, over all ids: `Cache.windows`, or the layers of a parked conversation
    states: Sequence[OfferedState] = ()
    n_drafted: int = 0  # tokens whose cells of the draft layer were computed, as far as they can be
    label: str = ""
    replay_tokens: int = 0  # what may be read again: an older state closer to the one before it is not worth its bytes


@dataclass(eq=False)
class _Plan:
    """What is to be written, and which files go behind it."""

    head: Head
    sources: list[list[Pull]]
    superseded: list[str] = field(default_factory=list)
    dropped: set[State] = field(default_factory=set)  # states that this flush makes superfluous

    def files(self) -> list[tuple[Head, list[list[Pull]]]]:
        """Heads and sources of the files that hold it, cells first: without these a state is worth nothing."""
        head, n_segments = self.head, len(self.head.segments)
        if not self.sources or head.shape.state_bytes < LARGE_BYTES:
            return [(head, self.sources)] if self.sources else []
        cells = [(head._replace(states=()), self.sources[:n_segments])] if n_segments else []
        alone = zip(head.states, self.sources[n_segments:], strict=True)
        return cells + [(head._replace(segments=(), states=(state,)), [source]) for state, source in alone]


class Carrier:
    """Pieces of older files as sources; one of these is open at a time."""

    def __init__(self, store: Store):
        self._store = store
        self._open = contextlib.ExitStack()
        self._reader: StoreReader | None = None

    def source(self, file: StoreFile, index: int, size: int) -> list[Pull]:
        def read(offset: int, out: np.ndarray) -> None:
            path = self._store.path_of(file.name)
            if self._reader is None or self._reader.path != path:
                self.close()
                self._reader = self._open.enter_context(StoreReader(path, file.hash))
            self._reader.pull(index).read(offset, out)

        return [Pull(size, read)] if size else []

    def close(self) -> None:
        self._reader = None
        self._open.close()


class Flush:
    """What is new of a conversation on its way: a file, and one for each large state. Call `step` until it is False,
    whenever there is time; `close` gives up.

    Every failure is a StoreError and ends the flush, with no unfinished file left; what is in the store stays as it
    was. A `path` in it may be that of an older file: that one is set aside already, and a new flush does without it.
    """

    def __init__(self, store: Store, kept: Kept):
        """Decide what is written and make room for it; `size_bytes` is 0 where the store has it all."""
        self.store, self._identity = store, kept.identity
        self.names: list[str] = []
        self.size_bytes, self.n_new_bytes = 0, 0
        self._writer: StoreWriter | None = None
        self._carrier = Carrier(store)
        self._pins = contextlib.ExitStack()
        store.refresh()
        segments, hit = segments_of(kept), store.index.find(kept.identity, kept.ids)
        self._key = segments[-1].key
        self._plan = self._make_plan(kept, segments, hit)
        self._files = self._plan.files()
        size_bytes = sum(head.file_bytes for head, _ in self._files)
        if not size_bytes:
            return
        try:
            self._pins.enter_context(store.pinned(_stood_on(kept, hit)))
            store.make_room(size_bytes, self._plan.superseded)
            self._begin_file()
        except BaseException:
            self.close()
            raise
        self.size_bytes = size_bytes

    def _begin_file(self) -> None:
        self.names.append(self.store.new_name(self._key))
        try:
            self._writer = StoreWriter(self.store.path_of(self.names[-1]), *self._files.pop(0))
        except ValueError as error:
            raise StoreError("storage", "too-large", self.store.folder, f"it is not kept: {error}") from error

    def step(self) -> bool:
        """Write a block more; behind the last one a file gets its name, and behind all what they replace goes."""
        try:
            if self._writer is not None:
                if self._writer.step():
                    return True
                self.store.take_in(self.names[-1], self._writer)
                if self._files:
                    self._begin_file()
                    return True
        except BaseException as error:
            self.close()
            if isinstance(error, StoreError) and os.path.basename(error.path) in self._plan.superseded:
                self.store.refused(error)  # it was to be copied from
            raise
        self.close()
        self._remove_superseded()
        return False

    def _remove_superseded(self) -> None:
        names, self._plan.superseded = self._plan.superseded, []
        try:
            if names:
                self.store.remove_superseded(names, self._is_needed)
        except StoreError as error:  # the conversation is kept all the same
            self.store.log(f"store: {error}; files that are superfluous stay until a later flush")

    def close(self) -> None:
        """Give up what is not written yet."""
        self._pins.close()
        with contextlib.suppress(StoreError):  # of files that were only read
            self._carrier.close()
        if self._writer is not None:
            self._writer.close()

    # --- what is written

    def _make_plan(self, kept: Kept, segments: list[Segment], hit: Hit) -> _Plan:
        index, identity = self.store.index, kept.identity
        segments = [self._without_beginning(s) for s in segments if not index.covered(identity, s, ())]
        held = [place.piece for place in hit.states]
        sources = [cells_of(segment, kept.shape, kept.windows) for segment in segments]
        n_cell_bytes = sum(pull.size for source in sources for pull in source)
        offers = worth_keeping(kept.states, kept.shape.state_bytes, n_cell_bytes, kept.replay_tokens)
        offered = {state_at(kept, offer): offer for offer in offers}
        states = [state for state in offered if not index.covered(identity, state, ())]
        sources += [arrays_of(offered[state].arrays()) for state in states]
        label = kept.label.encode("utf-8", "replace")[:MAX_LABEL_BYTES].decode("utf-8", "ignore")
        head = Head(identity, kept.shape, tuple(segments), tuple(states), label)
        plan = _Plan(head, sources, dropped=superfluous(held, offered, kept.replay_tokens))
        self.n_new_bytes = head.payload_bytes
        self._compact(plan, kept, self.n_new_bytes)
        return plan

    def _without_beginning(self, segment: Segment) -> Segment:
        """A segment without the cells that are kept already, where these are enough to be looked for elsewhere."""
        n_kept = self.store.index.beginning(self._identity, segment) // PAGE * PAGE
        n_new = segment.n_tokens - n_kept
        return segment._replace(n_skipped=n_kept) if 0 < n_new <= MOST_LARGER * n_kept else segment

    def _compact(self, plan: _Plan, kept: Kept, budget: int) -> None:
        """Find files that go, copying what is still needed of them within a budget of bytes."""
        names = self.store.index.along(kept.identity, kept.ids)
        files = [self.store.index.files[name] for name in names]
        files = [file for file in files if file.head.shape == kept.shape]
        carried: list[tuple[StoreFile, int, Piece, int]] = []
        gone, room = [], data_bytes() - plan.head.head_bytes

        def needed_of(file: StoreFile) -> list[tuple[StoreFile, int, Piece, int]]:
            new = (*plan.head.segments, *plan.head.states, *(piece for _, _, piece, _ in carried))
            return [(file, index, piece, size)
                    for index, (piece, size) in enumerate(zip(file.pieces, file.head.sizes, strict=True))
                    if piece not in plan.dropped and not _is_covered(piece, new)
                    and not self.store.index.covered(kept.identity, piece, {*gone, file.name})]  # fmt: skip

        for file in sorted(files, key=lambda file: (sum(p[3] for p in needed_of(file)), file.name)):
            needed = needed_of(file)
            copied = sum(size for _, _, _, size in needed)
            table = sum(STATE.size + len(piece.ids) for _, _, piece, _ in needed)
            # To copy more than that gives back is not worth it, and a table has an end.
            if copied > min(budget, file.size_bytes - copied) or table > room:
                continue
            budget, room = budget - copied, room - table
            gone.append(file.name)
            carried += needed
        segments = [entry for entry in carried if isinstance(entry[2], Segment)]
        states = [entry for entry in carried if isinstance(entry[2], State)]
        n_own = len(plan.head.segments)
        sources = [[self._carrier.source(file, index, size) for file, index, _, size in part]
                   for part in (segments, states)]  # fmt: skip
        plan.sources[n_own:n_own] = sources[0]
        plan.sources += sources[1]
        plan.head = plan.head._replace(
            segments=(*plan.head.segments, *(entry[2] for entry in segments)),
            states=(*plan.head.states, *(entry[2] for entry in states)),
        )
        plan.superseded = gone

    def _is_needed(self, file: StoreFile) -> bool:
        index = self.store.index
        return any(
            piece not in self._plan.dropped and not index.covered(self._identity, piece, (file.name,))
            for piece in file.pieces
        )


def segments_of(kept: Kept) -> list[Segment]:
    """A conversation cut into segments."""
    raw, parent, segments = id_bytes(kept.ids), root_key(kept.identity), []
    for index in range(-(-len(kept.ids) // SEGMENT_TOKENS)):
        ids = raw[index * SEGMENT_TOKENS * ID_BYTES : (index + 1) * SEGMENT_TOKENS * ID_BYTES]
        end = index * SEGMENT_TOKENS + len(ids) // ID_BYTES
        segments.append(Segment(parent, index, ids, kept.shape.has_draft and end <= kept.n_drafted))
        parent = segments[-1].key
    return segments


def state_at(kept: Kept, offer: OfferedState) -> State:
    """An offered state under the name that it has in the store."""
    whole, rest = divmod(offer.position, SEGMENT_TOKENS)
    raw, parent = id_bytes(kept.ids[: offer.position]), root_key(kept.identity)
    for index in range(whole):
        parent = child_key(parent, raw[index * SEGMENT_TOKENS * ID_BYTES : (index + 1) * SEGMENT_TOKENS * ID_BYTES])
    return State(parent, offer.position, raw[len(raw) - rest * ID_BYTES :], offer.kind, offer.used)


def worth_keeping(
    offers: Sequence[OfferedState], state_bytes: int, n_cell_bytes: int, replay_tokens: int
) -> list[OfferedState]:
    """The states that are worth their bytes: all but a large one at the end, where the new cells have fewer, and the
    tokens behind the state before it may as well be read again.

    The one before, at the start of the last answer, serves a turn that goes on with the answer, and one that does not.
    """
    offers = sorted(offers, key=lambda offer: offer.position)
    is_near = len(offers) > 1 and offers[-1].position - offers[-2].position <= replay_tokens
    return offers[:-1] if is_near and state_bytes > max(n_cell_bytes, LARGE_BYTES) else offers


def superfluous(held: Sequence[State], offered: Sequence[State], replay_tokens: int) -> set[State]:
    """Which states of a conversation are not worth their bytes any more, now that these are offered.

    What is offered stays, and so does the end of a system prompt. Of the others each stays that is more than
    `replay_tokens` behind the one before it, and more than a part of what would be abandoned by going back there: a
    long conversation has few old states. Where nothing is offered, nothing goes.
    """
    if not offered:
        return set()
    positions = {state.position for state in offered}
    end, last, dropped = max(positions), 0, set()
    for position in sorted(positions | {state.position for state in held}):
        mine = [state for state in held if state.position == position]
        is_far = position - last > max(replay_tokens, (end - position) // OLD_SHARE)
        if position in positions or any(state.kind == ROOT for state in mine) or is_far:
            last = position
        else:
            dropped |= set(mine)
    return dropped


def _is_covered(piece: Piece, new: Sequence[Piece]) -> bool:
    return any(
        type(other) is type(piece) and other.parent == piece.parent and other.start == piece.start
        and covers(other, piece) for other in new
    )  # fmt: skip


def _stood_on(kept: Kept, hit: Hit) -> set[str]:
    """Files without which a conversation would not be whole: they must not make room for what is new of it."""
    positions = {offer.position for offer in kept.states}
    states = [place for place in hit.states if place.piece.position in positions]
    return {place.file.name for place in (*hit.segments, *states)}
