"""A stored conversation as a session file, and a session file as a stored conversation.

It owns the way from one to the other: through the cache of an engine, without weights where no token has to be read,
which saves and restores as any other. It knows the bytes of neither. Invariant: an exported file is what SAVE of that
conversation would write. Read next: storekeeper.py for what is kept of a conversation, engine.py for SAVE and RESTORE.
"""

from collections.abc import Callable

import numpy as np

import sessionstate
from blockfile import Progress
from engine import Engine, Session
from generation import CHUNK
from kvcache import Snapshot
from options import EngineOptions
from storeflush import Flush
from storeindex import Conversation
from storekeeper import fill, kept_of, shape_of
from storelayout import ROOT, State, StoreError
from storeview import find
from verbs import SessionDone

Log = Callable[[str], None]


def export_conversation(options: EngineOptions, name: str, path: str, log: Log, progress: Progress) -> SessionDone:
    """Write the conversation with this id to a session file for engines with these options, `store` among them.

    Raises StoreError, SessionError, or ModelError for a model or an option that cannot be used.
    """
    session = Session(Engine.outline(options, log))
    wanted = find(session.keeper.store.index.conversations(), name, options.store)
    if not _ends(wanted) and not session.cache.shape.folds_nothing:
        log("the state at its end is not kept: the weights are loaded, and its last tokens are read again")
        session = Session(Engine.load(options, log))
    _bring_in(session, wanted)
    return session.save(path, progress=progress)


def import_session(
    options: EngineOptions, path: str, label_of: Callable[[list[int]], str], log: Log, progress: Progress
) -> Conversation:
    """Keep the conversation of a session file in a store; `label_of` gives its first words from its tokens.

    Returns what it is in the store now, which may be the start of a longer one. Raises FatalError for a file that
    changed while it was read, and the same as `export_conversation`.
    """
    session = Session(Engine.outline(options, log))
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


def _ends(wanted: Conversation) -> list[State]:
    """The state behind its last token, if that is kept."""
    return [place.piece for place in wanted.hit.states if place.piece.position == wanted.n_tokens]


def _bring_in(session: Session, wanted: Conversation) -> None:
    """Make a stored conversation the live one, with its deepest checkpoint and both stamps."""
    keeper, live, n_tokens, path = session.keeper, session.live, wanted.n_tokens, wanted.last.file.name
    cache, shape = live.cache, shape_of(live.cache)
    steered = [one for one in (True, False) if keeper.identity(one) == wanted.last.file.head.identity]
    if not steered:
        text = "it is of another model or of other settings: give --model and the options that its engine had"
        raise StoreError("invalid", "identity", path, text)
    if n_tokens > session.engine.max_context:
        text = f"it has {n_tokens} tokens, and a session file for --max-context {session.engine.max_context} has fewer"
        raise StoreError("invalid", "count-limit", path, text)
    cache.steered = steered[0]
    snapshot = fill(cache, keeper.store, wanted.hit, wanted.ids)[0] if wanted.is_whole else None
    if snapshot is None or (snapshot.n_tokens < n_tokens and _ends(wanted)):
        raise StoreError("invalid", "parts", path, "a part of the conversation is missing or damaged")
    before = [place for place in wanted.hit.states if place.piece.position < n_tokens]
    sink = sessionstate.checkpoint_sink(cache)
    state = keeper.store.load_state(before, shape, sink)
    if state:
        held = Snapshot(wanted.ids[: state.position].copy(), tuple(sink.arrays))
        live.checkpoints.add(held, state.used, root=state.kind == ROOT)
    ends, stamp = _ends(wanted), state.used + 1 if state else 0  # an answer ends behind its checkpoint
    live.used = ends[0].used if ends else stamp
    if cache.n_tokens < n_tokens:
        while cache.n_tokens < n_tokens:
            session.read(live, wanted.ids, min(cache.n_tokens + CHUNK, n_tokens))
        # The draft layer's last cell stands for a token that was not kept.
        keeper.store.load(wanted.hit, n_tokens, shape, cache.windows(n_tokens), sessionstate.checkpoint_sink(cache))
    live.complete = True
