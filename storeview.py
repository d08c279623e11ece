"""A store as those see it who run no engine: its conversations by their ids, and one of them taken out.

It owns what an id means and what goes with a conversation; it knows no tokens' meaning and no engine. Invariant: what
another conversation needs stays, and of what is taken out no sound file has a byte. Read next: storefolder.py for the
folder, storeindex.py for what is found in it.
"""

import os
import threading
from collections.abc import Callable, Collection

from printable import one_line
from storefile import StoreWriter
from storeflush import Carrier
from storefolder import Store, survey
from storeindex import Conversation, Piece, StoreFile, StoreIndex
from storelayout import Head, Segment, StoreError

MODEL_DIGITS = 16  # of an identity in hex: the fingerprint of the model
LEAST_ID = 4  # digits that may stand for a whole id where no other one begins with them


def find(conversations: list[Conversation], name: str, folder: str) -> Conversation:
    """The one whose id is this or begins like this; raises StoreError."""
    found = [one for one in conversations if one.id.startswith(name)] if len(name) >= LEAST_ID else []
    if len(found) != 1:
        how_many = f"{len(found)} conversations begin" if found else "no conversation begins"
        raise StoreError("invalid", "id", folder, f"{how_many} with the id {name!r}; `strata store list` shows all")
    return found[0]


def entry(conversation: Conversation, identities: Collection[str]) -> dict:
    """A conversation as JSON; `identities` are those of the engine that would resume it, in hex, none if unknown."""
    file = conversation.last.file
    mine = file.head.identity.hex()
    return {
        "kind": "conversation",
        "id": conversation.id,
        "label": one_line(file.head.label),
        "n_tokens": conversation.n_tokens,
        "n_bytes": conversation.size_bytes,
        "modified": file.used_ns / 1e9,
        "match": mine in identities if identities else None,
        "model_match": mine[:MODEL_DIGITS] in {one[:MODEL_DIGITS] for one in identities} if identities else None,
        "problem": None if conversation.is_whole else "a part of it is missing",
    }


class StoreView:
    """The folder of a store, in which engines read and write meanwhile. The methods block, so call them in a thread.

    Each may raise StoreError.
    """

    def __init__(self, folder: str, log: Callable[[str], None]):
        self.folder, self._log = folder, log
        self._index = StoreIndex()
        self._lock = threading.Lock()

    def conversations(self) -> list[Conversation]:
        """All that is kept, last used first; a folder that is not there yet is empty."""
        with self._lock:
            if not os.path.isdir(self.folder):
                return []
            return survey(self.folder, self._index)[0].conversations()

    def find(self, name: str) -> Conversation:
        return find(self.conversations(), name, self.folder)

    def remove(self, name: str) -> int:
        """Take a conversation out, and return how many bytes that gave back."""
        with self._lock:
            store = Store(self.folder, 0, 0, self._log)
            with store.locked():
                return _remove(store, find(store.index.conversations(), name, self.folder))


def _remove(store: Store, wanted: Conversation) -> int:
    others = [one for one in store.index.conversations() if one.last != wanted.last]
    needed = {_name_of(place.piece) for one in others for place in one.pieces}
    names = {file.name for file in wanted.files} | store.index.along(wanted.last.file.head.identity, wanted.ids)
    labels = {"", *(one.last.file.head.label for one in others)}
    n_bytes = 0
    for name in sorted(names):
        file = store.index.files[name]
        stays = [index for index, piece in enumerate(file.pieces) if _name_of(piece) in needed]
        label = file.head.label if file.head.label in labels else ""  # else it has words of what is taken out
        if len(stays) < len(file.pieces) or label != file.head.label:
            n_bytes -= _write_anew(store, file, stays, label) if stays else 0
            n_bytes += store.remove(name)
    return n_bytes


def _name_of(piece: Piece) -> tuple:
    return type(piece), piece.parent, piece.start, piece.ids


def _write_anew(store: Store, file: StoreFile, stays: list[int], label: str) -> int:
    """A file with some pieces of another one; returns its size in bytes."""
    pieces, sizes, carrier = file.pieces, file.head.sizes, Carrier(store)
    segments = tuple(pieces[index] for index in stays if isinstance(pieces[index], Segment))
    states = tuple(pieces[index] for index in stays if not isinstance(pieces[index], Segment))
    head = Head(file.head.identity, file.head.shape, segments, states, label)
    last = max(stays, key=lambda index: pieces[index].end)
    name = store.new_name(getattr(pieces[last], "key", pieces[last].parent))
    writer = StoreWriter(store.path_of(name), head, [carrier.source(file, index, sizes[index]) for index in stays])
    try:
        while writer.step():
            pass
        store.take_in(name, writer)
    finally:
        writer.close()
        carrier.close()
    return head.file_bytes
