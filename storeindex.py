"""What the files of a store hold, as one index in memory: lookup by token ids, and what depends on what.

It owns the trees of segments and states, one for each identity, made from heads alone; it knows no disk and no clock.
Invariant: a piece is found only by its own ids and those of every segment before it, so that a key that two texts
should share is a miss. Read next: storefolder.py, which keeps it in line with a folder.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from storelayout import (
    ID_BYTES,
    ROOT,
    SEGMENT_TOKENS,
    Head,
    Segment,
    State,
    child_key,
    id_bytes,
    root_key,
)

SEGMENT_ID_BYTES = SEGMENT_TOKENS * ID_BYTES

Piece = Segment | State


@dataclass(eq=False)
class StoreFile:
    """One file as its head shows it."""

    name: str
    head: Head
    hash: bytes
    size_bytes: int
    used_ns: int  # when it was written or last touched

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return *self.head.segments, *self.head.states


class Place(NamedTuple):
    """Where a piece lies: the `number`-th segment, or the `number`-th state, of a file."""

    file: StoreFile
    number: int
    piece: Piece


class Hit(NamedTuple):
    """What is held of a prompt's start: cells of `n_tokens` tokens, and states at positions up to there.

    The last segment may be longer than what the prompt shares with it.
    """

    n_tokens: int = 0
    segments: tuple[Place, ...] = ()
    states: tuple[Place, ...] = ()  # the deepest first

    @property
    def n_drafted(self) -> int:
        """Tokens from the start on whose cells of the draft layer are held."""
        first = next((place.piece.start for place in self.segments if not place.piece.has_draft), self.n_tokens)
        return min(first, self.n_tokens)

    @property
    def files(self) -> set[str]:
        return {place.file.name for place in (*self.segments, *self.states)}


class Conversation(NamedTuple):
    """A text that nothing continues, for lists: where its last segment lies, and all that is held of it."""

    last: Place
    ids: np.ndarray  # int32, from the first token on whose segment is held
    hit: Hit  # what a prompt of these ids finds; nothing where the start is not held
    pieces: tuple[Place, ...]  # all that is held of it

    @property
    def id(self) -> str:
        """16 hexadecimal digits, which the name of the file begins with that was written when it ended here."""
        return self.last.piece.key[:8].hex()

    @property
    def n_tokens(self) -> int:
        return self.last.piece.end

    @property
    def is_whole(self) -> bool:
        """Whether the cells of all its tokens are held."""
        return self.hit.n_tokens == self.n_tokens

    @property
    def files(self) -> list[StoreFile]:
        return list({place.file.name: place.file for place in self.pieces}.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all files that hold something of it."""
        return sum(file.size_bytes for file in self.files)


Slot = tuple[bytes, int]  # the key of the segment before a piece, and where the piece starts
Held = dict[Slot, dict[bytes, list[Place]]]  # by slot, then by ids: where it lies


class _Tree:
    """The pieces of one identity."""

    def __init__(self):
        self.segments: Held = {}
        self.states: Held = {}
        self.named: dict[Slot, Segment] = {}  # every full segment by what stands behind it
        self.leaning: dict[Slot, list[Place]] = {}  # segments that leave out cells

    @property
    def both(self) -> tuple[Held, Held]:
        return self.segments, self.states


def _slot(piece: Piece) -> Slot:
    return piece.parent, piece.start


def _goes_on(tree: _Tree, state: State) -> bool:
    """Whether a segment holds more than the tokens that a state folds."""
    segments = tree.segments.get(_slot(state), {})
    return any(len(ids) > len(state.ids) and ids.startswith(state.ids) for ids in segments)


def _behind(segment: Segment) -> Slot:
    return segment.key, segment.end


def _common_tokens(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b)) // ID_BYTES
    differs = np.frombuffer(a, "<i4", n) != np.frombuffer(b, "<i4", n)
    return int(differs.argmax()) if differs.any() else n


class StoreIndex:
    """All files of a folder; `add` and `remove` keep it, everything else only looks."""

    def __init__(self):
        self.files: dict[str, StoreFile] = {}
        self._trees: dict[bytes, _Tree] = {}

    def add(self, file: StoreFile) -> None:
        self.files[file.name] = file
        tree = self._trees.setdefault(file.head.identity, _Tree())
        for held, pieces in zip(tree.both, (file.head.segments, file.head.states), strict=True):
            for number, piece in enumerate(pieces):
                held.setdefault(_slot(piece), {}).setdefault(piece.ids, []).append(Place(file, number, piece))
        for number, segment in enumerate(file.head.segments):
            if segment.is_full:
                tree.named[_behind(segment)] = segment
            if segment.n_skipped:
                tree.leaning.setdefault(_slot(segment), []).append(Place(file, number, segment))

    def remove(self, name: str) -> None:
        """Forget a file, if it is known."""
        file = self.files.pop(name, None)
        if file is None:
            return
        tree = self._trees[file.head.identity]
        for held, pieces in zip(tree.both, (file.head.segments, file.head.states), strict=True):
            for piece in pieces:
                by_ids = held.get(_slot(piece), {})
                left = [place for place in by_ids.pop(piece.ids, []) if place.file is not file]
                if left:
                    by_ids[piece.ids] = left
                elif not by_ids:
                    held.pop(_slot(piece), None)
        for segment in file.head.segments:
            if segment.is_full and segment.ids not in tree.segments.get(_slot(segment), {}):
                tree.named.pop(_behind(segment), None)
            if segment.n_skipped:
                left = [place for place in tree.leaning.pop(_slot(segment), []) if place.file is not file]
                tree.leaning |= {_slot(segment): left} if left else {}
        if not tree.segments and not tree.states:
            del self._trees[file.head.identity]

    # --- lookup

    def _path(self, identity: bytes, ids: np.ndarray) -> Iterator[tuple[_Tree, Slot, bytes]]:
        """The slots along some ids, as far as full segments are held, each with the ids that would fill it."""
        tree, parent, raw = self._trees.get(identity), root_key(identity), id_bytes(ids)
        if tree is None:
            return
        for at in range(0, len(raw) + 1, SEGMENT_ID_BYTES):
            mine, slot = raw[at : at + SEGMENT_ID_BYTES], (parent, at // ID_BYTES)
            yield tree, slot, mine
            if mine not in tree.segments.get(slot, {}):
                return
            parent = child_key(parent, mine)

    def find(self, identity: bytes, ids: np.ndarray) -> Hit:
        """The longest start of some ids that is held from their beginning on, and every state in it."""
        n_tokens, segments, states = 0, [], []
        for tree, slot, mine in self._path(identity, ids):
            states += [places[-1] for tail, places in tree.states.get(slot, {}).items() if mine.startswith(tail)]
            common, chain = _best_chain(tree.segments.get(slot, {}), mine)
            segments += chain
            n_tokens = slot[1] + common if chain else n_tokens
            if common < SEGMENT_TOKENS:
                break
        states = [place for place in states if place.piece.position <= n_tokens]
        states.sort(key=lambda place: place.piece.position, reverse=True)
        return Hit(n_tokens, tuple(segments), tuple(states))

    def along(self, identity: bytes, ids: np.ndarray) -> set[str]:
        """Names of all files with a piece that is a start of these ids."""
        names = set()
        for tree, slot, mine in self._path(identity, ids):
            for held in tree.both:
                for tail, places in held.get(slot, {}).items():
                    if mine.startswith(tail):
                        names |= {place.file.name for place in places}
        return names

    # --- what depends on what

    def covered(self, identity: bytes, piece: Piece, without: Collection[str]) -> bool:
        """Whether a file that is not one of `without` holds all that a piece is good for."""
        tree = self._trees.get(identity)
        if tree is None:
            return False
        if isinstance(piece, State):
            places = tree.states.get(_slot(piece), {}).get(piece.ids, [])
            return any(place.file.name not in without for place in places)
        by_ids = tree.segments.get(_slot(piece), {})
        if piece.is_full:
            places = by_ids.get(piece.ids, [])
        else:
            places = [place for ids, found in by_ids.items() if ids.startswith(piece.ids) for place in found]
        return any(
            place.file.name not in without
            and (place.piece.has_draft or not piece.has_draft)
            and _chain(by_ids, place, piece.n_skipped, without)
            for place in places
        )

    def beginning(self, identity: bytes, segment: Segment) -> int:
        """Tokens that it shares with a shorter piece of the same text, so that the others alone need be written."""
        tree = self._trees.get(identity)
        by_ids = tree.segments.get(_slot(segment), {}) if tree else {}
        mine = [place.piece for ids, places in by_ids.items() if segment.ids.startswith(ids) for place in places]
        usable = [piece for piece in mine if not piece.n_skipped and (piece.has_draft or not segment.has_draft)]
        return max((piece.n_tokens for piece in usable), default=0)

    def is_continued(self, file: StoreFile) -> bool:
        """Whether a piece of another file needs a segment that this one alone holds, as it lies behind it or leaves out
        its cells; or a text goes on behind the end of a system prompt whose state is here."""
        identity, tree = file.head.identity, self._trees[file.head.identity]
        if any(state.kind == ROOT and _goes_on(tree, state) for state in file.head.states):
            return True
        for segment in file.head.segments:
            needy = [place for place in tree.leaning.get(_slot(segment), []) if _begins(segment, place.piece)]
            if segment.is_full:
                needy += [place for held in tree.both for places in held.get(_behind(segment), {}).values()
                          for place in places]  # fmt: skip
            others = any(place.file is not file for place in needy)
            if others and not self.covered(identity, segment, (file.name,)):
                return True
        return False

    def before(self, file: StoreFile) -> set[str]:
        """Names of the files with the segments and states that stand right before pieces of this one, or begin them."""
        tree = self._trees[file.head.identity]
        names = set()
        for piece in file.pieces:
            if segment := tree.named.get(_slot(piece)):
                names |= {place.file.name for place in tree.segments[_slot(segment)][segment.ids]}
            for ids, places in tree.states.get(_slot(piece), {}).items():
                names |= {place.file.name for place in places if piece.ids.startswith(ids)}
            if isinstance(piece, Segment) and piece.n_skipped:
                others = itertools.chain.from_iterable(tree.segments.get(_slot(piece), {}).values())
                names |= {place.file.name for place in others if _begins(place.piece, piece)}
        return names - {file.name}

    def conversations(self) -> list[Conversation]:
        """Every text that no other one begins with, last used first."""
        found = [
            self._conversation(identity, tree, max(places, key=lambda place: place.file.used_ns))
            for identity, tree in self._trees.items()
            for by_ids in tree.segments.values()
            for places in _ends(tree, by_ids)
        ]
        return sorted(found, key=lambda conversation: conversation.last.file.used_ns, reverse=True)

    def _conversation(self, identity: bytes, tree: _Tree, last: Place) -> Conversation:
        slot, chain = _slot(last.piece), [last]
        while segment := tree.named.get(slot):
            slot = _slot(segment)
            chain.append(tree.segments[slot][segment.ids][-1])
        ids = np.frombuffer(b"".join(place.piece.ids for place in reversed(chain)), "<i4")
        hit = self.find(identity, ids) if not slot[1] else Hit()
        return Conversation(last, ids, hit, (*hit.states, *hit.segments, *chain))


def _ends(tree: _Tree, by_ids: dict[bytes, list[Place]]) -> Iterator[list[Place]]:
    """Where the segments of one slot lie that nothing continues and no longer one begins with."""
    in_order = sorted(by_ids)  # what begins with a text comes right behind it
    for ids, following in itertools.zip_longest(in_order, in_order[1:], fillvalue=b""):
        places = by_ids[ids]
        if not following.startswith(ids) and _behind(places[0].piece) not in tree.segments:
            yield places


def covers(held: Piece, piece: Piece) -> bool:
    """Whether one piece alone has all that another one of the same kind and slot is good for."""
    if isinstance(piece, State):
        return held.ids == piece.ids
    has_cells = held.n_skipped <= piece.n_skipped and (held.has_draft or not piece.has_draft)
    return held.ids.startswith(piece.ids) and has_cells


def _begins(one: Segment, piece: Segment) -> bool:
    """Whether a segment has the cells that another one of its slot leaves out, or the last of them."""
    n_bytes = piece.n_skipped * ID_BYTES
    return (
        one.n_skipped < piece.n_skipped <= one.n_tokens
        and one.ids[:n_bytes] == piece.ids[:n_bytes]
        and (one.has_draft or not piece.has_draft)
    )


def _chain(
    by_ids: dict[bytes, list[Place]], last: Place, n_skipped: int = 0, without: Collection[str] = ()
) -> list[Place]:
    """The pieces that have the cells of a segment but for so many at its start, the first one first; else none."""
    chain = [last]
    while chain[0].piece.n_skipped > n_skipped:
        piece, places = chain[0].piece, itertools.chain.from_iterable(by_ids.values())
        usable = [place for place in places if place.file.name not in without and _begins(place.piece, piece)]
        if not usable:
            return []
        chain.insert(0, max(usable, key=lambda place: piece.ids.startswith(place.piece.ids)))  # of no other text
    return chain


def _best_chain(by_ids: dict[bytes, list[Place]], mine: bytes) -> tuple[int, list[Place]]:
    """The pieces that share most tokens with `mine`, those with the draft layer's cells before those without."""
    exact = by_ids.get(mine)
    candidates = [
        (common, place.piece.has_draft, -place.piece.n_skipped, place)
        for ids, places in ([(mine, exact)] if exact else by_ids.items())
        if (common := _common_tokens(ids, mine))
        for place in reversed(places)
    ]
    for common, _, _, place in sorted(candidates, key=lambda candidate: candidate[:3], reverse=True):
        if chain := _chain(by_ids, place):
            return common, chain
    return _best_chain({ids: places for ids, places in by_ids.items() if ids != mine}, mine) if exact else (0, [])
