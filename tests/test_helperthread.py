"""A helper thread: its order, what comes back from it, and threads that never come."""

import _thread
import errno
import threading

import pytest

import helperthread
from helperthread import HelperThread


def test_calls_are_carried_out_in_order_beside_the_caller():
    seen, gate = [], threading.Event()
    with HelperThread() as helper:
        first = helper.submit(gate.wait)
        rest = [helper.submit(seen.append, number) for number in range(5)]
        assert seen == []
        gate.set()
        assert first.result() is True
        assert [future.result() for future in rest] == [None] * 5
    assert seen == [0, 1, 2, 3, 4]


def test_what_a_call_raises_comes_back_and_the_next_is_carried_out():
    with HelperThread() as helper:
        failed, done = helper.submit(int, "x"), helper.submit(int, "7")
        with pytest.raises(ValueError, match="x"):
            failed.result()
        assert done.result() == 7


def test_the_block_ends_when_all_is_done():
    seen = []
    with HelperThread() as helper:
        for number in range(50):
            helper.submit(seen.append, number)
    assert len(seen) == 50


@pytest.mark.parametrize("dies", [True, False])
def test_a_thread_that_does_not_come_is_a_lack_of_memory(dies, monkeypatch):
    """The system starts none, or it dies before it has run a line, which Python's own start waits for for ever."""

    def start(run, arguments):
        if not dies:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(helperthread, "START_S", 0.01)
    with pytest.raises(OSError, match="did not start" if dies else "can't start new thread") as caught:
        HelperThread()
    assert caught.value.errno == errno.ENOMEM


def test_a_thread_that_comes_too_late_goes_at_once(monkeypatch):
    late = []
    monkeypatch.setattr(_thread, "start_new_thread", lambda run, arguments: late.append(run))
    monkeypatch.setattr(helperthread, "START_S", 0.01)
    with pytest.raises(OSError, match="did not start"):
        HelperThread()
    assert late.pop()() is None  # it would wait for calls otherwise
