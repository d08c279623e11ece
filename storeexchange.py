"""A stored conversation as a session file, and a session file as a stored conversation.

It owns the way from one to the other: through the cache of an engine without weights, which saves and restores as any
other. It knows the bytes of neither. Invariant: an exported file is what SAVE of that conversation would write. Read
next: storekeeper.py for what is kept of a conversation, engine.py for SAVE and RESTORE.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

import sessionstate
from blockfile import Progress
from engine import Engine, Session
from kvcache import Snapshot
from options import EngineOptions
from storeflush import Flush
from storeindex import Conversation
from storekeeper import fill, kept_of, shape_of
from storelayout import ROOT, StoreError
from storeview import find
from verbs import SessionDone

Log = Callable[[str], None]


def export_conversation(options: EngineOptions, name: str, path: str, log: Log, progress: Progress) -> SessionDone:
    """Write the conversation with this id to a session file for engines with these options, `store` among them.

    Raises StoreError, SessionError, or ModelError for a model or an option that cannot be used.
    """
    session = _session(options, log)
    _bring_in(session, find(session.keeper.store.index.conversations(), name, options.store))
    return session.save(path, progress=progress)


def import_session(
    options: EngineOptions, path: str, label_of: Callable[[list[int]], str], log: Log, progress: Progress
) -> Conversation:
    """Keep the conversation of a session file in a store; `label_of` gives its first words from its tokens.

    Returns what it is in the store now, which may be the start of a longer one. Raises FatalError for a file that
    changed while it was read, and the same as `export_conversation`.
    """
    session = _session(options, log)
    keeper, held = session.keeper, session.live
    session.restore(path, progress=progress)
    identity, drafts = keeper.identity(held.steered), session.engine.spec > 1
    kept = kept_of(held, held.cache, identity, drafts, label_of(held.ids.tolist()), n_replayed=0)
    flush = Flush(keeper.store, kept)
    while flush.step():
        pass
    n_tokens, known = len(kept.ids), keeper.store.index.conversations()
    mine = (one for one in known if one.last.file.head.identity == identity)
    return next(one for one in mine if np.array_equal(one.ids[:n_tokens], kept.ids))


def _session(options: EngineOptions, log: Log) -> Session:
    """A session that computes nothing, and asks for no RAM beyond what it takes."""
    return Session(Engine.outline(dataclasses.replace(options, conversation_cache_min_free_mib=0), log))


def _bring_in(session: Session, wanted: Conversation) -> None:
    """Make a stored conversation the live one, with its deepest checkpoint and both stamps."""
    keeper, live, n_tokens, path = session.keeper, session.live, wanted.n_tokens, wanted.last.file.name
    steered = [one for one in (True, False) if keeper.identity(one) == wanted.last.file.head.identity]
    if not steered:
        text = "it is of another model or of other settings: give --model and the options that its engine had"
        raise StoreError("invalid", "identity", path, text)
    if n_tokens > session.engine.max_context:
        text = f"it has {n_tokens} tokens, and a session file for --max-context {session.engine.max_context} has fewer"
        raise StoreError("invalid", "count-limit", path, text)
    ends = [place.piece for place in wanted.hit.states if place.piece.position == n_tokens]
    snapshot = fill(live.cache, keeper.store, wanted.hit, wanted.ids)[0] if wanted.is_whole and ends else None
    if snapshot is None or snapshot.n_tokens < n_tokens:
        raise StoreError("invalid", "parts", path, "a part of the conversation is missing or damaged")
    live.cache.steered, live.used, live.complete = steered[0], ends[0].used, True
    before = [place for place in wanted.hit.states if place.piece.position < n_tokens]
    sink = sessionstate.checkpoint_sink(live.cache)
    state = keeper.store.load_state(before, shape_of(live.cache), sink)
    if state:
        held = Snapshot(wanted.ids[: state.position].copy(), tuple(sink.arrays))
        live.checkpoints.add(held, state.used, root=state.kind == ROOT)
