"""Engines over the small models of tests/data/model, and what a session holds as values that compare.

Nothing here depends on how much RAM or disk the machine has free: the floors are 0 unless a test sets them.
"""

import functools
import hashlib
import pathlib
from typing import NamedTuple

import numpy as np

from engine import Engine, Session
from options import EngineOptions
from verbs import Done, GenRequest, PromptProgress, Resume, Reused, SamplingOptions, Source, Token

MODELS = pathlib.Path(__file__).parent / "data" / "model"
KINDS = ["llama", "qwen35", "qwen3next", "qwen35moe", "qwen4exp", "qwen4exp-8layers"]
FORMATS = ["fp16", "int8", "q4_0", "k8v4"]
CONTEXT = 256
TURN = 5  # starts a turn in every model here; most have no tokenizer that would name one
DEFAULTS = {
    "max_context": CONTEXT,
    "backend": "cpu",
    "threads": 1,
    "conversation_cache_min_free_mib": 0,
    "session_min_free_mib": 0,
}


def new_engine(name: str, **options) -> Engine:
    """An engine of its own, as a new process would load it."""
    engine = Engine.load(EngineOptions(model=str(MODELS / f"{name}.gguf"), **(DEFAULTS | options)))
    engine.turn_start_id = TURN
    return engine


@functools.cache
def shared_engine(name: str, **options) -> Engine:
    """An engine never changes, so tests share it; what one wants to change in it, it takes `new_engine` for."""
    return new_engine(name, **options)


def new_session(name: str = "qwen4exp", **options) -> Session:
    return Session(shared_engine(name, **options))


def storing_session(folder, name: str = "llama", **options) -> Session:
    """A session of its own with a store, which keeps every state."""
    settings = {"store": str(folder), "store_replay_s": 0, "max_context": 1024}
    return Session(new_engine(name, **(settings | options)))


def ids(n: int, seed: int = 0) -> np.ndarray:
    """`n` arbitrary token ids below every vocabulary's size, none of which starts a turn or ends an answer."""
    return np.random.default_rng(seed).integers(6, 96, n, dtype=np.int32)


def joined(*parts) -> np.ndarray:
    return np.concatenate([np.atleast_1d(np.asarray(part, np.int32)) for part in parts])


class Reply(NamedTuple):
    """What one request answered."""

    tokens: list[int]
    done: Done
    events: list

    @property
    def reused(self) -> int:
        return self.done.n_reused

    @property
    def source(self) -> Source:
        """Where the reused tokens came from, if the request asked for it."""
        return next(event for event in self.events if isinstance(event, Source))


def ask(
    session: Session, prompt, max_new: int = 8, *, stopped=lambda: False, stop=(), checkpoint=True, steered=True,
    source=False, label="", **sampling,
):  # fmt: skip
    """Run a request to its end and hold the order of its events and what they count against each other."""
    prompt = joined(prompt)
    sampled = SamplingOptions(**sampling)
    request = GenRequest(prompt, max_new, sampled, frozenset(stop), checkpoint, steered, source, label)
    events = list(session.generate(request, stopped))
    done, tokens = events[-1], [event.id for event in events if isinstance(event, Token)]
    kinds = [type(event) for event in events]
    n_chunks = kinds.count(PromptProgress)
    told = [Source] * source
    assert kinds == [Resume, *[PromptProgress] * n_chunks, Reused, *told, *[Token] * len(tokens), Done]
    assert (events[0].n_reused, events[n_chunks + 1].n_reused) == (done.n_reused, done.n_reused)
    assert (done.n_generated, done.n_prompt) == (len(tokens), len(prompt))
    return Reply(tokens, done, events)


def next_turn(prompt, reply: Reply, seed: int, n: int = 9) -> np.ndarray:
    """The prompt of the turn behind an answered one: its tokens, the whole answer, and a new message."""
    return joined(prompt, reply.tokens, TURN, ids(n - 1, seed))


def conversation(session, turns=3, n=30, max_new=7):
    """The last prompt and reply of a conversation of some turns."""
    prompt, reply = joined(TURN, ids(n - 1)), None
    for turn in range(turns):
        if reply:
            prompt = next_turn(prompt, reply, turn)
        reply = ask(session, prompt, max_new)
    return prompt, reply


def assert_like_fresh(session, prompt, reply, max_new, **sampling):
    """Hold tokens and bits of an answered request to those of a session that knows nothing else."""
    fresh = Session(session.engine)
    expected = ask(fresh, prompt, max_new, **sampling)
    assert reply.tokens == expected.tokens
    assert trunk(session) == trunk(fresh)


# --- what is held


def cells(pool, n_tokens: int) -> bytes:
    """The first `n_tokens` cells of a layer, and its pooled keys with the spare row."""
    parts = []
    for array in (pool.k, pool.v, pool.k_scale, pool.v_scale):
        pages, heads, page, width = array.shape
        parts.append(array.swapaxes(1, 2).reshape(pages * page, heads * width)[:n_tokens].tobytes())
    rows = n_tokens // 4 + 1 if pool.index_dim else 0
    return b"".join([*parts, pool.pooled[:rows].tobytes()])


def trunk(session: Session) -> tuple:
    """Everything the next logits depend on: tokens, running state, the trunk's cells."""
    cache = session.cache
    state = tuple(array.tobytes() for array in cache.state.arrays)
    return cache.ids.tolist(), state, tuple(cells(pool, cache.n_tokens) for pool in cache.pools)


def draft_cells(session: Session) -> bytes:
    return cells(session.cache.draft_pool, session.cache.n_tokens)


def held(session: Session) -> dict:
    """All that a refused operation must leave alone: every byte of the pools, live, used or not, and all records."""
    cache = session.cache
    pools = [*cache.pools, *([cache.draft_pool] if cache.draft_pool else [])]
    digest = hashlib.sha256()
    for pool in pools:
        for array in (pool.k, pool.v, pool.k_scale, pool.v_scale, pool.pooled):
            digest.update(array.tobytes())
    return {
        "pools": digest.hexdigest(),
        "live": (session.n_tokens, cache.ids.tolist(), *(array.tobytes() for array in cache.state.arrays)),
        "checkpoints": [record(checkpoint) for checkpoint in session.checkpoints.chain],
        "parked": [parked_record(entry) for entry in session.parking.entries],
        "stats": session.stats() | {"counters": None},
    }


def record(checkpoint) -> tuple:
    arrays = (checkpoint.snapshot.ids, *checkpoint.snapshot.arrays)
    return checkpoint.used, checkpoint.root, *(array.tobytes() for array in arrays)


def parked_record(entry) -> list:
    return [record(c) for c in (entry.live, *entry.checkpoints.chain)] + [
        [p.tobytes() for p in layer] for layer in entry.cells
    ]


def marks(session: Session) -> list[int]:
    """The lengths of the live conversation's checkpoints."""
    return [checkpoint.n_tokens for checkpoint in session.checkpoints.chain]


def tree(folder: pathlib.Path) -> dict:
    """Every entry of a folder: its bytes, where its link points, or its kind."""
    found = {}
    for path in sorted(folder.rglob("*")):
        value = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else path.is_dir()
        found[str(path.relative_to(folder))] = value
    return found
