"""Whole conversations on the CUDA backend in Numba's simulator; run by test_kernels_cuda.py in its own process.

Owns: that the device's tokens are the CPU's, that a saved conversation goes on bitwise in every residency mode, that
no file crosses backends, and what a failing device does. Where products are not what is tested they are taken from the
CPU, which reads the simulator's memory: a pass takes seconds otherwise. Read next: test_kernels_cuda.py.
"""

import given_simulator  # first: it turns the simulator on
from given_simulator import small_blocks

# isort: split

import numpy as np
import pytest
from numba.cuda.cudadrv.driver import CudaAPIError

import backend
import cpuproducts
import kernels_cuda
import kvcache
import options as options_module
from engine import Session
from generation import FatalError
from given_engine import ask, ids, new_engine, next_turn
from modelconfig import ModelError
from options import OptionRefused
from sessionlayout import SessionError

assert given_simulator.config.ENABLE_CUDASIM

CONTEXT = 48
MODES = {"resident": {}, "streamed": {"kv_resident": 4}}  # one page of the trunk; the draft layer in a ring of one


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_blocks(monkeypatch, 1)
    monkeypatch.setattr(options_module, "LEAST_RESIDENT", 4)
    monkeypatch.setattr(kvcache, "DRAFT_WINDOW", 4)


def _host_pack(weights) -> cpuproducts.Pack:
    return cpuproducts.Pack(weights.kind, weights.bytes._ary, weights.n_rows, weights.n_cols, weights.n_matrices)


@pytest.fixture
def products_of_the_cpu(monkeypatch):
    def matmul(weights, x, out):
        cpuproducts.matmul(_host_pack(weights), x._ary, out._ary)

    def expert_matmul(weights, x, offsets, out):
        cpuproducts.expert_matmul(_host_pack(weights), x._ary, offsets._ary, out._ary)

    monkeypatch.setattr(kernels_cuda, "matmul", matmul)
    monkeypatch.setattr(kernels_cuda, "expert_matmul", expert_matmul)


def new_session(name: str = "qwen4exp", **options) -> Session:
    return Session(new_engine(name, **({"backend": "cuda", "max_context": CONTEXT} | options)))


def held(session: Session) -> tuple:
    """Tokens, running state and cells as a session file holds them, up to the last complete page."""
    cache = session.cache
    parts = []
    for window in cache.windows(cache.n_tokens // 4 * 4):
        for part, size in enumerate(window.part_sizes):
            out = np.empty(size, np.uint8)
            window.read(part, 0, out)
            parts.append(out.tobytes())
    return cache.ids.tolist(), [array.tobytes() for array in cache.state.on_host()], parts


@pytest.mark.parametrize(("name", "n_prompt"), [("qwen2", 6), ("qwen4exp", 3)])
def test_greedy_tokens_are_those_of_the_cpu(name, n_prompt):
    prompt = ids(n_prompt)
    on_cpu = new_session(name, backend="cpu", activations="float")
    expected = ask(on_cpu, prompt, 3)
    session = new_session(name)
    assert session.engine.ops.name == "cuda"
    assert ask(session, prompt, 3).tokens == expected.tokens
    for found, wanted in zip(session.cache.state.on_host(), on_cpu.cache.state.on_host(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3next", "qwen35moe", "qwen4exp-8layers"])
def test_every_kind_of_layer_gives_the_tokens_of_the_cpu(name, products_of_the_cpu):
    expected = ask(new_session(name, backend="cpu", activations="float"), ids(7), 2)
    assert ask(new_session(name), ids(7), 2).tokens == expected.tokens


def test_a_sampled_answer_is_that_of_the_cpu(products_of_the_cpu):
    options = {"temperature": 0.7, "seed": 5, "top_p": 0.9}
    expected = ask(new_session(backend="cpu", activations="float"), ids(5), 3, **options)
    assert ask(new_session(), ids(5), 3, **options).tokens == expected.tokens


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_conversation_goes_on_bitwise(mode, tmp_path, products_of_the_cpu):
    through = new_session(**MODES[mode])
    prompt = ids(9)
    reply = ask(through, prompt, 3)
    saved = through.save(str(tmp_path / "a.bin"))
    restarted = new_session(**MODES[mode])
    ask(restarted, ids(13, 7), 1)  # what the device holds of another conversation must not be read again
    assert restarted.restore(str(tmp_path / "a.bin")).n_tokens == saved.n_tokens
    assert held(restarted) == held(through)
    turn = next_turn(prompt, reply, 3, 2)
    first, second = ask(through, turn, 2), ask(restarted, turn, 2)
    assert (second.tokens, second.reused) == (first.tokens, first.reused) == (first.tokens, saved.n_tokens)
    assert (second.done.n_drafts_offered, second.done.n_drafts_accepted) == (
        first.done.n_drafts_offered, first.done.n_drafts_accepted,
    )  # fmt: skip
    assert held(restarted) == held(through)


@pytest.mark.parametrize("mode", MODES)
def test_a_stored_conversation_goes_on_bitwise(mode, tmp_path, products_of_the_cpu):
    """Nobody saves it: the device's cells and states go into the store and come back into another engine."""
    kept = {"store": str(tmp_path), "store_min_tokens": 8, "store_replay_s": 0, "conversation_cache_mib": 0}
    chat = new_session(**MODES[mode], **kept)
    prompt = ids(13)
    following = next_turn(prompt, ask(chat, prompt, 3), 1, 3)
    chat.rest(lambda: False)
    n_held = chat.n_tokens
    expected = ask(chat, following, 2)
    again = new_session(**MODES[mode], **kept)
    reply = ask(again, following, 2, source=True)
    assert (reply.source.source, reply.reused) == ("store", n_held)
    assert reply.tokens == expected.tokens
    assert held(again) == held(chat)


def test_residency_changes_no_bit_of_an_answer(products_of_the_cpu):
    sessions = [new_session(**options) for options in MODES.values()]
    replies = [ask(session, ids(13), 2) for session in sessions]
    assert replies[0].tokens == replies[1].tokens
    # The draft layer looks back over a window in one mode and over everything in the other.
    assert held(sessions[0])[:2] == held(sessions[1])[:2]


def test_no_file_crosses_backends(tmp_path, products_of_the_cpu):
    sessions = [new_session("qwen2", backend=name) for name in ("cpu", "cuda")]
    for number, session in enumerate(sessions):
        ask(session, ids(5), 2)
        session.save(str(tmp_path / f"{number}.bin"))
    for number, session in enumerate(sessions):
        before = held(session)
        with pytest.raises(SessionError, match="config") as caught:
            session.restore(str(tmp_path / f"{1 - number}.bin"))
        assert caught.value.kind == "invalid"
        assert held(session) == before


def test_a_device_that_fails_in_a_request_is_fatal(monkeypatch):
    def fail(*_):
        raise CudaAPIError("CUDA_ERROR_ECC_UNCORRECTABLE")

    session = new_session("qwen2")
    monkeypatch.setattr(session.engine.ops, "rms_norm", fail)
    with pytest.raises(FatalError, match="the device failed in a request: CUDA_ERROR_ECC_UNCORRECTABLE"):
        ask(session, ids(5), 2)
    assert session.n_tokens == 0


def test_cells_that_do_not_fit_the_device_are_refused_at_start(monkeypatch):
    def fail(*_):
        raise CudaAPIError("CUDA_ERROR_OUT_OF_MEMORY")

    engine = new_engine("qwen2", backend="cuda", max_context=CONTEXT)
    monkeypatch.setattr(engine.ops, "cells", fail)
    with pytest.raises(ModelError, match=r"cells of 48 tokens do not fit the device .*OUT_OF_MEMORY.*--kv-resident"):
        engine.new_cache()


def test_too_few_resident_cells_are_refused():
    with pytest.raises(OptionRefused, match="--kv-resident: at least 4, or 0 for all, found 3"):
        new_engine("qwen2", backend="cuda", kv_resident=3)


@pytest.mark.parametrize(("widths", "text"), [((320, 0, 0), "attention head"), ((64, 512, 0), "index key"),
                                              ((64, 32, 256), "recurrent head")])  # fmt: skip
def test_heads_wider_than_the_kernels_are_refused(widths, text):
    with pytest.raises(backend.BackendError, match=f"{text} of width {max(widths)} does not fit"):
        backend.load("cuda", 1, print).check_widths(*widths)
