"""Experts of which a part lies on the device, in Numba's simulator; run by test_kernels_cuda.py in its own process.

Owns: that neither a product nor an answer nor a file depends on which experts lie where, what is exchanged when, and
what a start does with too little room or a bad profile. Read next: simulated_sessions.py.
"""

import given_simulator  # first: it turns the simulator on
from given_simulator import small_blocks

# isort: split

import contextlib
import pathlib
import sys
import types

import numpy as np
import pytest
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))

import cuda_cases
import gpu_check

import backend
import cudaexperts
import cudapools
import engine as engine_module
import kernels_cuda
import packs
from engine import ModelError, Session
from given_engine import MODELS, ask, ids, next_turn
from simulated_sessions import CONTEXT, held, new_session, products_of_the_cpu

assert given_simulator.config.ENABLE_CUDASIM
assert products_of_the_cpu  # a fixture

ops = backend.load("cuda", 1, print)
EXPERTS, WIDTH, HIDDEN = 5, 64, 32
MODEL = "qwen3moe"  # two layers of five experts, two used


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    small_blocks(monkeypatch, 1)


@pytest.fixture
def slots(monkeypatch):
    """Gives every layer so many slots, whatever its experts' size."""

    def give(n: int) -> None:
        monkeypatch.setattr(cudaexperts, "_slots", lambda sizes, n_experts, *_: [min(n, n_experts)] * len(sizes))

    return give


@pytest.fixture
def products_of_experts(monkeypatch, products_of_the_cpu):
    """All products but those of experts are the CPU's, since a pass takes seconds otherwise."""
    monkeypatch.setattr(kernels_cuda, "expert_matmul", cudaexperts.expert_matmul)


def model_options(name: str, **options) -> engine_module.EngineOptions:
    return engine_module.EngineOptions(model=str(MODELS / f"{name}.gguf"), threads=1, **options)


def part(kind: str, columns: int = WIDTH, rows: int = HIDDEN, seed: int = 0):
    """A layer's experts as the loader gives them to the backend."""
    rng = np.random.default_rng(seed)

    def weights(n_rows: int, n_cols: int):
        raw = cuda_cases.random_weights(rng, kind, EXPERTS, n_rows, n_cols)
        return ops.pack_experts(packs.NUMBERS[kind], raw, n_cols)

    gate_up = ops.together(weights(rows, columns), weights(rows, columns))
    return types.SimpleNamespace(gate_up=gate_up, down=weights(rows + 1, columns))


def place(parts, ranking=None, *, asked_bytes=0, log=lambda line: None) -> cudaexperts.ExpertCache:
    return ops.place_experts(parts, ranking, asked_bytes, 0, 1, log)


def product(weights, x: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    return cuda_cases.into(ops, ops.expert_matmul, (len(x), weights.n_rows), weights, x, offsets)[0]


def offsets_of(counts) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


# --- products


@pytest.mark.parametrize("n", [1, 31, 32, 33])
@pytest.mark.parametrize("kind", cuda_cases.KINDS)
def test_a_product_has_the_same_bits_wherever_experts_lie(kind, n, slots, monkeypatch):
    small_blocks(monkeypatch, 32)  # two slices
    rng = np.random.default_rng(n)
    row = packs.KINDS[packs.NUMBERS[kind]]
    columns = 256 if row.columns == 256 else 96 if row.bits <= 8 else 100
    offsets = np.searchsorted(np.sort(rng.integers(0, EXPERTS, n)), np.arange(EXPERTS + 1)).astype(np.int64)
    x, results = cuda_cases.normal(rng, n, columns), []
    for n_slots in (EXPERTS, 3, 0):
        slots(n_slots)
        mine = part(kind, columns, rows=2)
        cache = place([mine], [[4, 0, 2, 1, 3]])
        assert cache.is_resident == (n_slots == EXPERTS)
        results.append(product(mine.down, x, offsets))
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.int32), results[0].view(np.int32))


def test_many_rows_bring_an_expert_to_the_device_and_few_do_not(slots, monkeypatch):
    slots(1)
    on_host = []
    multiply = cudaexperts.cpuexperts.multiply
    monkeypatch.setattr(cudaexperts.cpuexperts, "multiply",
                        lambda team, pack, x, active, *rest: (on_host.append(active.tolist()),
                                                              multiply(team, pack, x, active, *rest)))  # fmt: skip
    mine = part("Q4_0")
    cache = place([mine])
    counts = [9, 2, cudaexperts.LENT_ROWS, 1, 3]
    x = cuda_cases.normal(np.random.default_rng(1), sum(counts), WIDTH)
    result = product(mine.gate_up[0], x, offsets_of(counts))
    assert on_host == [[[1, 0, 2], [3, 2, 1], [4, 3, 3]]]  # rows of the experts 1, 3 and 4, one behind the other
    assert (cache.n_copied, cache.n_found, cache.n_used) == (1, 1, 5)
    product(mine.gate_up[1], x, offsets_of(counts))
    assert (cache.n_copied, cache.n_found, cache.n_used) == (1, 1, 5)  # an expert's matrices count as one
    slots(EXPERTS)
    whole = part("Q4_0")
    place([whole])
    np.testing.assert_array_equal(result, product(whole.gate_up[0], x, offsets_of(counts)))


def test_more_experts_are_lent_than_there_is_memory_for_at_once(slots, monkeypatch):
    monkeypatch.setattr(cudaexperts, "LENT", 2)
    counts, results = [5, 4, 6, 4, 5], []
    x = cuda_cases.normal(np.random.default_rng(1), sum(counts), WIDTH)
    for n_slots in (0, EXPERTS):
        slots(n_slots)
        mine = part("Q8_0", rows=3)
        cache = place([mine])
        results.append(product(mine.gate_up[0], x, offsets_of(counts)))
        assert cache.n_copied == (0 if n_slots else EXPERTS)
    np.testing.assert_array_equal(*results)


# --- slots and exchanges


def exchange_after(cache, counts, n_tokens: int) -> list[int]:
    """The experts with a slot after a pass over so many tokens, in the order of the slots."""
    layer = cache.layers[0]
    layer.count(np.array(counts), np.empty(0), np.empty(0), np.empty(0))
    cache.tokens_read(n_tokens)
    here = np.flatnonzero(layer.slot_of >= 0)
    return here[np.argsort(layer.slot_of[here])].tolist()


def test_what_is_used_more_takes_the_place_of_what_is_used_less(slots):
    slots(2)
    mine = part("Q4_1")
    cache = place([mine])
    assert exchange_after(cache, [1, 5, 2.4, 0, 0], cudaexperts.PERIOD_TOKENS - 1) == [0, 1]  # within a period
    assert exchange_after(cache, [0, 0, 0, 0, 0], 1) == [0, 1]  # 2.4 is less than 1 + 1.5
    cache.forget()
    assert exchange_after(cache, [0, 5, 1.9, 0, 0], cudaexperts.PERIOD_TOKENS) == [0, 1]  # used less than twice
    cache.forget()
    assert exchange_after(cache, [1, 5, 2, 0, 2.5], cudaexperts.PERIOD_TOKENS) == [4, 1]
    assert cache.n_copied == 1
    np.testing.assert_allclose(cache.layers[0].uses, np.array([1, 5, 2, 0, 2.5]) * cudaexperts.DECAY)
    assert cache.ranking() == [[1, 4, 2, 0, 3]]
    x = cuda_cases.normal(np.random.default_rng(1), EXPERTS, WIDTH)
    slots(EXPERTS)
    whole = part("Q4_1")
    place([whole])
    for exchanged, resident in zip((*mine.gate_up, mine.down), (*whole.gate_up, whole.down), strict=True):
        found, expected = (product(pack, x, offsets_of([1] * EXPERTS)) for pack in (exchanged, resident))
        np.testing.assert_array_equal(found, expected)


def test_a_period_exchanges_only_so_many(slots, monkeypatch):
    slots(2)
    monkeypatch.setattr(cudaexperts, "MAX_SWAPS", 1)
    cache = place([part("Q4_0")])
    assert exchange_after(cache, [0, 0, 3, 0, 9], cudaexperts.PERIOD_TOKENS) == [4, 1]  # the best of two
    assert exchange_after(cache, [0, 0, 0, 0, 0], cudaexperts.PERIOD_TOKENS) == [4, 2]


def test_a_ranking_fills_the_slots(slots):
    slots(3)
    cache = place([part("Q4_0"), part("Q4_0")], [[4, 0, 2, 1, 3], [1, 2, 3, 4, 0]])
    assert cache.layers[0].slot_of.tolist() == [1, -1, 2, -1, 0]
    assert cache.layers[1].slot_of.tolist() == [-1, 0, 1, 2, -1]
    assert cache.ranking() == [[4, 0, 2, 1, 3], [1, 2, 3, 4, 0]]


# --- room


def test_slots_fill_the_room_and_leave_the_rest():
    mine = [part("Q4_0"), part("Q8_0")]
    sizes = [sum(map(cudaexperts.matrix_bytes, (*p.gate_up, p.down))) for p in mine]
    lent = cudaexperts.LENT * max(cudaexperts.matrix_bytes(p.down) for p in mine)
    of = lambda room: cudaexperts._slots(sizes, EXPERTS, room, lent)  # noqa: E731
    assert of(EXPERTS * sum(sizes)) == of(float("inf")) == [5, 5]  # nothing is lent then
    assert of(lent + 2 * sum(sizes)) == [2, 2]
    assert of(lent + 2 * sum(sizes) + sizes[0]) == [3, 2]
    assert of(lent + sum(sizes) - 1) == [1, 0]
    assert of(lent - 1) == of(0) == [0, 0]


def test_what_is_free_decides_and_a_margin_stays(monkeypatch):
    monkeypatch.setattr(cudaexperts, "LENT", 1)
    mine, lines = part("Q4_0"), []
    size = sum(map(cudaexperts.matrix_bytes, (*mine.gate_up, mine.down)))
    lent = cudaexperts.LENT * cudaexperts.matrix_bytes(mine.down)
    monkeypatch.setattr(cudaexperts, "free_bytes", lambda: cudaexperts.MARGIN_BYTES + lent + 3 * size)
    ops.place_experts([mine], None, 0, size, 1, lines.append)
    assert lines == ["experts: 2 of 5 a layer on the device (0 MiB), the others on 1 threads"]
    assert mine.gate_up[0].layer.slot_of.tolist() == [0, 1, -1, -1, -1]


def test_a_driver_that_pins_nothing_is_told_and_does_no_harm(slots, monkeypatch):
    @contextlib.contextmanager
    def refuse(*_):
        raise CudaAPIError("CUDA_ERROR_OUT_OF_MEMORY")
        yield

    slots(1)
    monkeypatch.setattr(cuda, "pinned", refuse)
    lines = []
    place([part("Q4_0")], log=lines.append)
    assert lines[0] == (
        "not all experts could be pinned in RAM (CUDA_ERROR_OUT_OF_MEMORY): copies of the others are slower"
    )


# --- engines


def test_asked_room_is_kept_and_too_little_is_refused(monkeypatch):
    monkeypatch.setattr(engine_module, "MIB", 1)
    whole = new_session(MODEL, expert_cache_mib=1 << 24)
    assert whole.engine.experts.is_resident
    with pytest.raises(ModelError, match=r"--expert-cache-mib 5000: .* too few for one expert of each of 2 layers"):
        new_session(MODEL, expert_cache_mib=5000)


def test_experts_that_do_not_fit_the_device_are_refused_at_start(monkeypatch):
    def fail(*_):
        raise CudaAPIError("CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(cudaexperts, "to_device", fail)
    with pytest.raises(ModelError, match=r"experts do not fit the device .*OUT_OF_MEMORY.*less --expert-cache-mib"):
        new_session(MODEL)


def test_cells_that_experts_leave_no_room_for_are_refused_with_both_remedies(monkeypatch):
    def fail(*_):
        raise CudaAPIError("CUDA_ERROR_OUT_OF_MEMORY")

    fail.__name__ = "cells"
    monkeypatch.setattr(cudapools, "cells", fail)
    for asked, ending in ((0, "--kv-resident"), (1, "--kv-resident, or lower --expert-cache-mib")):
        with pytest.raises(ModelError, match=f"cells of {CONTEXT} tokens do not fit the device .*{ending}$"):
            new_session(MODEL, expert_cache_mib=asked)


@pytest.mark.parametrize(
    ("name", "n_prompt", "given"), [(MODEL, 3, (100, 1, 0)), ("qwen35moe", 2, (2, 0)), ("qwen4exp-8layers", 1, (1, 0))]
)
def test_an_answer_has_the_same_bits_wherever_experts_lie(
    name, n_prompt, given, slots, products_of_experts, monkeypatch
):
    """With a period of one token in which experts always change places."""
    monkeypatch.setattr(cudaexperts, "PERIOD_TOKENS", 1)
    monkeypatch.setattr(cudaexperts, "LEAST_USE", 0.5)
    monkeypatch.setattr(cudaexperts, "LEAST_GAIN", -100)
    replies = []
    for n_slots in given:
        slots(n_slots)
        session = new_session(name)
        reply = ask(session, ids(n_prompt), 3)
        replies.append((reply.tokens, held(session)))
        moved = reply.done.n_experts_over_pcie
        assert moved == session.engine.experts.n_copied
        assert (moved > 0) == (n_slots in (1, 2))
    assert all(reply == replies[0] for reply in replies)


def test_a_saved_conversation_goes_on_bitwise_wherever_experts_lie(slots, tmp_path, products_of_experts):
    slots(1)
    through = new_session("qwen35moe")
    prompt = ids(5)
    reply = ask(through, prompt, 2)
    saved = through.save(str(tmp_path / "a.bin"))
    turn = next_turn(prompt, reply, 3, 2)
    first = ask(through, turn, 2)
    slots(0)
    restarted = new_session("qwen35moe")
    assert restarted.restore(str(tmp_path / "a.bin")).n_tokens == saved.n_tokens
    second = ask(restarted, turn, 2)
    assert (second.tokens, second.reused) == (first.tokens, saved.n_tokens)
    assert held(restarted) == held(through)


def test_a_session_counts_from_its_first_request(slots, products_of_experts):
    slots(0)
    session = new_session(MODEL)
    session.warm_up()
    assert not session.engine.experts.layers[0].uses.any()
    done = ask(session, ids(4), 2).done
    uses = session.engine.experts.layers[0].uses
    assert uses.sum() == 2 * (4 + done.n_generated - 1)  # two experts a token; the last one is never read


def test_a_profile_is_learned_and_used(slots, tmp_path, products_of_experts):
    slots(0)
    path, options = tmp_path / "profile", {"expert_profile_save": str(tmp_path / "profile")}
    session = new_session(MODEL, **options)
    ask(session, ids(4), 1)
    assert not path.exists()  # not ten minutes old yet
    ranking = session.engine.experts.ranking()
    assert ranking != [list(range(EXPERTS))] * 2
    session.close()
    lines = path.read_text().splitlines()
    model = session.engine.identity().model
    assert lines[:2] == ["strata expert profile 1", f"model {model:016x} layers 2 experts {EXPERTS}"]
    assert [[int(word) for word in line.split()] for line in lines[2:]] == ranking
    slots(2)
    again = new_session(MODEL, **options)
    for layer, order in zip(again.engine.experts.layers, ranking, strict=True):
        assert layer.slot_of[order].tolist() == [0, 1, -1, -1, -1]
    again.close()
    assert path.read_text().splitlines() == lines  # nothing was used meanwhile


def test_a_profile_is_written_between_requests_when_it_is_old(slots, tmp_path, products_of_experts, monkeypatch):
    slots(0)
    path = tmp_path / "profile"
    session = new_session(MODEL, expert_profile_save=str(path))
    monkeypatch.setattr("expertprofile.SAVE_EVERY_S", 0)
    ask(session, ids(2), 1)
    assert path.read_text().startswith("strata expert profile 1\n")


def test_a_bad_profile_is_told_and_replaced(tmp_path, slots):
    slots(1)
    path, lines = tmp_path / "profile", []
    path.write_text("strata expert profile 1\nof another model\n")
    options = {"backend": "cuda", "max_context": CONTEXT, "expert_profile_save": str(path)}
    session = Session(engine_module.Engine.load(model_options(MODEL, **options), lines.append))
    assert f"--expert-profile-save: {path} is not used" in lines[0]
    session.close()
    assert path.read_text().splitlines()[2] == "0 1 2 3 4"


def test_a_model_without_experts_says_that_the_options_have_no_effect(tmp_path):
    path, lines = tmp_path / "profile", []
    options = {"backend": "cuda", "max_context": CONTEXT, "expert_cache_mib": 9, "expert_profile_save": str(path)}
    session = Session(engine_module.Engine.load(model_options("qwen2", **options), lines.append))
    session.close()
    reason = "has no effect: this model has no experts"
    assert lines == [f"--expert-cache-mib {reason}", f"--expert-profile-save {reason}"]
    assert not path.exists()


def test_the_expert_check_for_a_device_passes():
    """tools/gpu_check.py, on one small layer."""
    sizes = gpu_check.ExpertSizes(layers=1, experts=16, used=2, width=32, n_ff=32, decoded=2, prompt=4)
    rows = gpu_check.check_experts(sizes)
    assert [(row["on_device"], row["ok"]) for row in rows] == [("all", True), ("half", True)]
    assert rows[0]["hit_rate"] == 1.0
    assert 0 <= rows[1]["hit_rate"] < 1


def test_the_expert_check_for_a_device_can_fail(monkeypatch):
    multiply = cudaexperts.cpuexperts.multiply
    monkeypatch.setattr(cudaexperts.cpuexperts, "multiply",
                        lambda *args: (multiply(*args), np.add(args[-1], np.float32(1), out=args[-1])))  # fmt: skip
    sizes = gpu_check.ExpertSizes(layers=1, experts=16, used=2, width=32, n_ff=32, decoded=2, prompt=1)
    assert [row["ok"] for row in gpu_check.check_experts(sizes)] == [True, False]
