"""Random verbs against a plain account, as bench/soak.py runs them for a minute, and broken sessions that it finds."""

import os

import pytest

from bench.soak import Disagreement, Soak, resident_rise_mib
from engine import Session
from given_engine import shared_engine
from given_faults import count
from kvcache import Cache
from sessionlayout import SessionError

pytestmark = pytest.mark.soak

N_VERBS = 150


def soak(tmp_path, seed: int) -> Soak:
    return Soak(shared_engine("qwen4exp"), str(tmp_path), seed)


def run(soaking: Soak) -> None:
    for _ in range(N_VERBS):
        soaking.step()


@pytest.mark.parametrize("seed", [1, 2])
def test_random_verbs(seed, tmp_path):
    soaking = soak(tmp_path, seed)
    run(soaking)
    assert set(soaking.n_done) == {"turn", "save", "restore", "erase", "damaged", "refused"}
    count("a verb that must be refused among random ones", soaking.n_done["refused"] + soaking.n_done["damaged"])


def test_the_resident_set_is_measured(tmp_path):
    soaking = soak(tmp_path, 0)
    assert resident_rise_mib(soaking) < 64
    assert soaking.session.stats()["counters"]["restores"] == 33


def keeps_the_old_file(monkeypatch):
    save = Session.save
    monkeypatch.setattr(
        Session, "save", lambda self, path, **named: None if os.path.exists(path) else save(self, path, **named)
    )


def forgets_nothing(monkeypatch):
    monkeypatch.setattr(Session, "erase", lambda self: self.n_tokens)


def restores_the_tokens_alone(monkeypatch):
    """As an engine that takes ids from the file and leaves the running state as it was."""
    restore = Session.restore

    def broken(self, path, **named):
        restore(self, path, **named)
        self.cache.state.gdn[:] = 0

    monkeypatch.setattr(Session, "restore", broken)


def loses_the_conversation_in_a_refusal(monkeypatch):
    restore = Session.restore

    def broken(self, path, **named):
        try:
            restore(self, path, **named)
        except SessionError:
            Cache.zero(self.cache)
            raise

    monkeypatch.setattr(Session, "restore", broken)


@pytest.mark.parametrize(
    "breaks",
    [keeps_the_old_file, forgets_nothing, restores_the_tokens_alone, loses_the_conversation_in_a_refusal],
)
def test_a_broken_session_is_found(breaks, tmp_path, monkeypatch):
    breaks(monkeypatch)
    with pytest.raises(Disagreement):
        run(soak(tmp_path, 1))
