"""The text of a real model: SmolLM2-135M-Instruct against float64 NumPy over the same file."""

import numpy as np
import pytest

from engine import Engine, Session
from options import EngineOptions
from reference import ReferenceModel
from tokenizer import Tokenizer
from verbs import GenRequest, Token

pytestmark = pytest.mark.slow

TEXT = "Water boils at"
N_TOKENS = 32


@pytest.fixture(scope="module")
def answer(request):
    """All ids, how many of them are the answer, and the logits [answer, V] it was chosen from; K/V is fp16."""
    path = request.getfixturevalue("real_model")
    prompt = np.array(Tokenizer.load(path).encode(TEXT, bos=True), np.int32)
    engine = Engine.load(EngineOptions(model=path, max_context=128, kv="fp16", activations="float", backend="cpu"))
    events = Session(engine).generate(GenRequest(prompt, N_TOKENS))
    ids = np.append(prompt, [event.id for event in events if isinstance(event, Token)]).astype(np.int32)
    window = engine.model.append(engine.new_cache(), ids[:-1])
    logits = engine.model.ops.to_host(engine.model.logits(window.residual[len(prompt) - 1 :]))
    return ids, len(ids) - len(prompt), logits


@pytest.fixture(scope="module")
def expected(request, answer):
    """The float64 logits [answer, V] of the same tokens."""
    ids, n_answer, _ = answer
    return ReferenceModel(request.getfixturevalue("real_model")).logits(ids[:-1])[-n_answer:]


def test_every_token_is_the_one_that_float64_chooses(answer, expected):
    ids, n_answer, _ = answer
    assert n_answer == N_TOKENS
    assert ids[-n_answer:].tolist() == expected.argmax(axis=1).tolist()


def test_logits_are_those_of_float64(answer, expected):
    logits = answer[2]
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() < 2e-2
    assert np.abs(expected).max() > 10


def test_the_answer_is_text(request, answer):
    ids, n_answer, _ = answer
    assert "100°C" in Tokenizer.load(request.getfixturevalue("real_model")).decode(ids[-n_answer:].tolist())
