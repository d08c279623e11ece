"""Values that are no numbers, in session files and in weights: refused by name, or one request ends, and no more."""

import dataclasses
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

import sessionparse
from engine import Engine, Session
from generation import RequestFailed
from given_engine import DEFAULTS, MODELS, TURN, ask, held, ids, joined, new_session
from options import EngineOptions
from sampling import NotFinite, next_token
from sessionfile import read_session, verify_session, write_session
from sessionlayout import Limits, SessionError
from verbs import SamplingOptions, Token

HOSTILE = [np.nan, np.inf, -np.inf]
WAYS = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "repeat_penalty": 1.3, "top_k": 5, "seed": 4}]


def saved(session, path) -> Path:
    ask(session, joined(TURN, ids(40), TURN, ids(9, 1)), 6)
    session.save(str(path))
    return path


# --- in the state of a file


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("array", ["gdn", "ple", "tails", "dead"])
@pytest.mark.parametrize("which", ["live", "checkpoint 0"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_file_whose_state_is_not_finite_is_refused_by_name(value, array, which, place, tmp_path):
    """One that passes every checksum, as whoever made it has sealed it."""
    session = new_session()
    path = saved(session, tmp_path / "a.bin")
    image = read_session(str(path), session.engine.identity(), Limits())
    record = image.live if which == "live" else image.checkpoints[0]
    data = getattr(record, array).copy()
    data.view(np.float32)[place] = value
    record = dataclasses.replace(record, **{array: data})
    changed = {"live": record} if which == "live" else {"checkpoints": [record]}
    write_session(str(path), dataclasses.replace(image, **changed), session.engine.identity())
    verify_session(str(path))
    before = held(session)
    with pytest.raises(SessionError, match=f"{array} of {which}.*finite") as caught:
        session.restore(str(path))
    assert (caught.value.kind, caught.value.reason) == ("invalid", "not-finite")
    assert held(session) == before


def test_the_greatest_numbers_there_are_are_welcome(tmp_path):
    session = new_session()
    path = saved(session, tmp_path / "a.bin")
    image = read_session(str(path), session.engine.identity(), Limits())
    data = image.live.gdn.copy()
    data.view(np.float32)[:4] = [np.finfo(np.float32).max, -np.finfo(np.float32).max, 1e-45, -0.0]
    image = dataclasses.replace(image, live=dataclasses.replace(image.live, gdn=data))
    write_session(str(path), image, session.engine.identity())
    assert session.restore(str(path)).n_tokens == image.live.n_tokens


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("n_bytes", [1, 2, 3, 4, 5, 64])
def test_numbers_are_looked_at_however_they_fall_into_pieces(shift, n_bytes):
    """Pieces of a file end anywhere; one bad number is found in each of its places."""

    class Pieces:
        offset = 0

        def __init__(self, data):
            self.data = np.frombuffer(b"\xff" * shift + data, np.uint8)[shift:]

        def pieces(self, size):
            assert size == self.data.size
            return (self.data[i : i + n_bytes] for i in range(0, size, n_bytes))

    for bad in range(8):
        values = np.linspace(-1, 1, 8, dtype=np.float32)
        for keep in (sessionparse.Keep.TOKENS, sessionparse.Keep.ALL):
            kept = look(Pieces(values.tobytes()), keep)
            assert keep == sessionparse.Keep.TOKENS or kept.tobytes() == values.tobytes()
            broken = values.copy()
            broken[bad] = np.nan
            with pytest.raises(SessionError, match="finite"):
                look(Pieces(broken.tobytes()), keep)


def look(source, keep):
    source.size_bytes = 10**6
    return sessionparse.Structure(source, Limits(), keep)._floats(source.data.size, "gdn of live")


# --- in the cells of a file: found where they are used


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize(("name", "kv", "part"), [
    ("llama", "fp16", "k"), ("llama", "fp16", "v"), ("qwen4exp", "fp16", "v"), ("qwen4exp", "int8", "k_scale"),
    ("qwen4exp", "int8", "v_scale"), ("qwen4exp", "q4_0", "v"), ("qwen4exp", "k8v4", "k_scale"),
    ("qwen4exp", "fp16", "pooled"),
])  # fmt: skip
def test_cells_that_are_not_finite_end_the_request_and_nothing_else(way, name, kv, part, tmp_path):
    session = new_session(name, kv=kv)
    prompt = joined(TURN, ids(40), TURN, ids(9, 1))
    reply = ask(session, prompt, 6)
    for pool in session.cache.pools:
        getattr(pool, part).reshape(-1).view(np.uint8)[:] = 0xFF  # a NaN in float16 and in float32
    session.save(str(tmp_path / "a.bin"))
    restored = new_session(name, kv=kv)
    restored.restore(str(tmp_path / "a.bin"))
    following = joined(prompt, reply.tokens, ids(5, 2))
    failed = fails(restored, following, **way)
    assert failed or part == "pooled"  # which page is looked at is no number's matter
    if failed:
        assert "send the request again" in failed
        assert restored.n_tokens == 0
        assert restored.held_ids().tolist() == []
    restored.erase()
    fresh = new_session(name, kv=kv)
    assert ask(restored, following, 6, **way).tokens == ask(fresh, following, 6, **way).tokens


def fails(session, prompt, **sampling) -> str:
    """How a request fails, empty where it does not."""
    try:
        ask(session, prompt, 6, **sampling)
    except RequestFailed as error:
        return str(error)
    return ""


def test_a_parked_conversation_that_fails_is_dropped_too():
    session = new_session("llama")
    prompt = joined(TURN, ids(40))
    ask(session, prompt, 4)
    ask(session, ids(20, 5), 4)
    for parts in session.parking.entries[0].cells:
        parts[1][:] = 0xFF
    assert "send the request again" in fails(session, joined(prompt, ids(5)))
    assert [entry.n_tokens for entry in session.parking.entries] == [23]  # the other one, which was live
    assert not fails(session, joined(prompt, ids(5)))


# --- in weights


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize(("name", "tensor"), [
    ("llama", "output_norm.weight"), ("llama", "token_embd.weight"), ("llama", "blk.0.attn_q.weight"),
    ("qwen35", "blk.0.ssm_a"), ("qwen3moe", "blk.0.ffn_gate_inp.weight"), ("qwen35moe", "blk.1.ffn_gate_inp.weight"),
    ("qwen4exp", "blk.1.ple_norm_key.weight"), ("qwen4exp", "blk.0.hc_attn_down.weight"),
])  # fmt: skip
def test_weights_that_are_not_finite_end_each_request_and_nothing_else(way, name, tensor, tmp_path):
    path = tmp_path / "nan.gguf"
    shutil.copy(MODELS / f"{name}.gguf", path)
    for found in gguf.GGUFReader(path, "r+").tensors:
        if found.name == tensor:
            found.data.reshape(-1).view(np.uint8)[:] = 0xFF
            break
    else:
        pytest.fail(f"no {tensor} in {name}")
    session = Session(Engine.load(EngineOptions(model=str(path), **DEFAULTS)))
    session.warm_up()
    for _ in range(2):
        assert "weights may be damaged" in fails(session, ids(20), **way)
        assert session.n_tokens == 0


# --- in a choice


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled", "penalised"])
def test_a_choice_among_what_is_no_number_is_refused(value, way):
    logits = np.linspace(-1, 1, 50, dtype=np.float32)
    logits[7] = value
    context = np.arange(5, dtype=np.int32)
    if value == -np.inf:
        assert next_token(logits, context, SamplingOptions(**way), 1) != 7  # 7 must not come
        logits[:] = value
    with pytest.raises(NotFinite):
        next_token(logits, context, SamplingOptions(**way), 1)


@pytest.mark.parametrize("value", HOSTILE)
def test_the_greedy_choice_of_a_backend_says_where_there_is_none(value):
    ops = new_session().engine.model.ops
    logits = np.tile(np.linspace(-1, 1, 50, dtype=np.float32), (3, 1))
    logits[1, :] = value
    assert ops.greedy(logits).tolist() == [49, -1, 49]
    chosen, share = ops.greedy_with_share(logits)
    assert (chosen.tolist(), share[1]) == ([49, -1, 49], 0)


def test_a_draft_layer_that_is_not_finite_offers_nothing():
    session, plain = new_session(), new_session(spec=1)
    reply = ask(session, ids(30), 6)
    session.cache.draft_pool.v.reshape(-1).view(np.uint8)[:] = 0xFF
    following = joined(ids(30), reply.tokens, ids(5, 1))
    again = ask(session, following, 12)
    assert again.done.n_drafts_offered == 0
    assert again.tokens == ask(plain, following, 12).tokens
    assert all(isinstance(event.id, int) for event in again.events if isinstance(event, Token))
