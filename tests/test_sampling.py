"""The choice of a token, against its definition."""

import numpy as np
import pytest

import sampling
from given_engine import ask, ids, joined, new_session
from sampling import next_token
from verbs import SamplingOptions

CONTEXT = np.array([3, 1, 4], np.int32)


def pick(logits, context=CONTEXT, seed=0, **options):
    return next_token(np.array(logits, np.float32), context, SamplingOptions(**options), seed)


def draws(logits, n=4000, **options) -> np.ndarray:
    """How often each token is chosen at `n` different positions."""
    context = np.zeros(n, np.int32)
    chosen = [pick(logits, context[:position], seed=7, **options) for position in range(n)]
    return np.bincount(chosen, minlength=len(logits)) / n


def softmax(logits, temperature=1.0):
    weights = np.exp((np.array(logits) - np.max(logits)) / temperature)
    return weights / weights.sum()


# --- greedy


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_greedy_takes_the_most_probable_token_and_the_lowest_id_of_equals(temperature):
    assert pick([0.5, 2.0, -1.0], temperature=temperature) == 1
    assert pick([0.5, 2.0, 2.0, 2.0], temperature=temperature) == 1
    assert pick([1.0] * 50, temperature=temperature) == 0


def test_greedy_looks_at_no_seed_and_no_filter():
    logits = [0.1, 0.3, 0.2]
    assert {pick(logits, seed=seed, top_k=2, top_p=0.1, min_p=0.9) for seed in range(20)} == {1}


# --- the draw


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_draws_follow_the_probabilities_at_a_temperature(temperature):
    logits = [1.0, 0.0, 2.0, -1.0, 0.5]
    assert np.abs(draws(logits, temperature=temperature) - softmax(logits, temperature)).max() < 0.03


def test_a_draw_depends_on_seed_and_position_alone():
    logits = np.random.default_rng(1).normal(size=200)
    long = np.arange(64, dtype=np.int32)
    first = [pick(logits, long[:n], seed=5, temperature=1) for n in range(1, 65)]
    assert first == [pick(logits, long[:n], seed=5, temperature=1) for n in range(1, 65)]
    assert first[::-1] == [pick(logits, long[:n][::-1], seed=5, temperature=1) for n in range(64, 0, -1)]
    assert first != [pick(logits, long[:n], seed=6, temperature=1) for n in range(1, 65)]
    assert len(set(first)) > 20


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_every_64_bit_seed_can_be_used(seed):
    assert pick([1.0, 1.0, 1.0], seed=seed, temperature=1) in (0, 1, 2)


def test_a_hair_of_temperature_is_greedy():
    for temperature in (1e-6, 1e-300, 5e-324):
        assert {pick([0.0, 1.0, 0.5], seed=seed, temperature=temperature) for seed in range(50)} == {1}


def test_logits_of_minus_infinity_are_never_drawn():
    share = draws([0.0, -np.inf, 0.0, -np.inf], n=500, temperature=2.0)
    assert share[[1, 3]].tolist() == [0, 0]
    assert share.min() == 0
    assert share[0] > 0.3


# --- filters


def test_top_k_keeps_the_k_most_probable():
    logits = [1.0, 5.0, 3.0, 4.0, 2.0]
    assert np.flatnonzero(draws(logits, 400, temperature=50, top_k=3)).tolist() == [1, 2, 3]
    assert set(draws(logits, 400, temperature=50, top_k=1).tolist()) == {0.0, 1.0}
    for off in (0, 5, 6, 2**31 - 1):
        assert np.count_nonzero(draws(logits, 400, temperature=50, top_k=off)) == 5


def test_top_k_takes_the_lowest_ids_of_equals():
    logits = np.zeros(100)
    logits[7] = 1
    assert np.flatnonzero(draws(logits, 300, temperature=50, top_k=4)).tolist() == [0, 1, 2, 7]


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = np.log([0.1, 0.5, 0.15, 0.25])
    assert np.flatnonzero(draws(logits, 300, temperature=20, top_p=0.49)).tolist() == [1]
    assert np.flatnonzero(draws(logits, 300, temperature=20, top_p=0.74)).tolist() == [1, 3]
    assert np.flatnonzero(draws(logits, 300, temperature=20, top_p=0.76)).tolist() == [1, 2, 3]
    assert np.flatnonzero(draws(logits, 300, temperature=20, top_p=0.0)).tolist() == [1]
    assert np.count_nonzero(draws(logits, 300, temperature=20, top_p=1.0)) == 4


def test_min_p_drops_what_is_too_far_below_the_best():
    logits = np.log([0.1, 0.5, 0.15, 0.25])
    assert np.flatnonzero(draws(logits, 300, temperature=20, min_p=0.4)).tolist() == [1, 3]
    assert np.flatnonzero(draws(logits, 300, temperature=20, min_p=1.0)).tolist() == [1]


def test_filters_look_at_probabilities_before_the_temperature():
    logits = np.log([0.9, 0.06, 0.04])
    for temperature in (0.01, 100):
        assert np.flatnonzero(draws(logits, 100, temperature=temperature, top_p=0.8)).tolist() == [0]


def test_filters_apply_one_after_the_other():
    # Of the two most probable top_p sees 2/3 and 1/3, so 0.6 leaves one; of all four it would leave two.
    logits = np.log([0.4, 0.2, 0.2, 0.2])
    assert np.flatnonzero(draws(logits, 200, temperature=20, top_k=2, top_p=0.6)).tolist() == [0]
    assert np.flatnonzero(draws(logits, 200, temperature=20, top_p=0.6)).tolist() == [0, 1]


# --- penalties


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits():
    logits = np.array([2.0, -2.0, 1.5, -1.0], np.float32)
    sampling._penalise(logits, np.array([0, 1, 1], np.int32), SamplingOptions(repeat_penalty=2.0))
    assert logits.tolist() == [1.0, -4.0, 1.5, -1.0]


def test_presence_counts_once_and_frequency_every_time():
    logits = np.zeros(4, np.float32)
    recent = np.array([2, 2, 2, 1], np.int32)
    sampling._penalise(logits, recent, SamplingOptions(presence_penalty=0.5, frequency_penalty=0.25))
    assert logits.tolist() == [0.0, -0.75, -1.25, 0.0]


def test_penalties_see_the_last_tokens_only():
    context = np.array([0, 1, 2, 3], np.int32)
    logits = [1.0, 0.9, 0.8, 0.7]
    assert pick(logits, context, presence_penalty=5.0, repeat_last_n=3) == 0
    assert pick(logits, context, presence_penalty=5.0, repeat_last_n=4) == 0  # all alike again
    assert pick(logits, context[:2], presence_penalty=5.0, repeat_last_n=64) == 2
    assert pick(logits, context, presence_penalty=5.0, repeat_last_n=0) == 0


def test_a_penalty_changes_a_greedy_choice():
    assert pick([1.0, 0.99], np.array([0], np.int32), repeat_penalty=1.1) == 1
    assert pick([1.0, 0.99], np.array([1], np.int32), repeat_penalty=1.1) == 0
    assert pick([1.0, 0.99], np.array([0], np.int32), frequency_penalty=-1.0) == 0


# --- in a session

STEERED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repeat_penalty": 1.2, "frequency_penalty": 0.1}


def test_the_same_seed_gives_the_same_answer_and_another_one_does_not():
    def tokens(seed):
        return ask(new_session(), ids(20), 24, temperature=1.0, seed=seed).tokens

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)
    assert tokens(0) == tokens(0)


def test_without_a_seed_answers_differ():
    answers = {tuple(ask(new_session(), ids(20), 24, temperature=2.0).tokens) for _ in range(3)}
    assert len(answers) == 3


def test_a_draw_goes_on_where_it_was_cut():
    """The random number belongs to the position: two requests give together what one would have given."""
    whole = ask(new_session(), ids(20), 24, seed=9, **STEERED).tokens
    session = new_session()
    first = ask(session, ids(20), 10, seed=9, **STEERED).tokens
    rest = ask(session, joined(ids(20), first), 14, seed=9, **STEERED)
    assert first + rest.tokens == whole
    assert rest.reused == 29
