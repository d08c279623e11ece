"""The trial of long conversations in a store, at a small size: what it prints, and that a wrong answer is found."""

import pytest
import try_store

from given_engine import MODELS

SMALL = ["--tokens", "1500", "--places", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kv"), [("qwen3", "q4_0"), ("qwen35", "fp16"), ("qwen4exp", "k8v4")])
def test_every_place_is_resumed_to_the_right_answer(model, kv, capsys):
    assert try_store.main([*SMALL, "--model", str(MODELS / f"{model}.gguf"), "--kv", kv]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    name, shown, n_tokens, resumed, right, _ = (cell.strip() for cell in row.strip("|").split("|"))
    assert (name, shown, n_tokens) == (model, kv, "1,499")
    assert resumed.endswith("1,499 of 1,499")
    assert right.split()[0] == right.split()[-1] != "0"


def test_a_wrong_answer_is_found(monkeypatch, capsys):
    """The cells of one page are others than those that were written."""
    load = try_store.Session.resume

    def spoiled(self, request):
        resumed = load(self, request)
        if resumed.offer.source == "store":
            for pool in resumed.timeline.cache.pools:
                pool.v[:8] = 60  # as float16: 1.06 and not what was read
        return resumed

    monkeypatch.setattr(try_store.Session, "resume", spoiled)
    assert try_store.main([*SMALL, "--model", str(MODELS / "qwen3.gguf"), "--kv", "fp16"]) == 1
