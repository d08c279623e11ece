"""The demo's story, told by a scripted engine with a real store: what it checks, and that a broken promise fails."""

import io
import pathlib

import pytest
from rich.console import Console

import demo
from demostage import DemoError, Turn
from given_demo import broken, telling
from given_tokenizer import CHATML

# It answers as `strata --serve --store` does; the tokens depend on the whole prompt, what is held on what was kept.
ENGINE = """
import sys
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/tests"]
import numpy as np
from given_store import IDENTITY, PLAIN, flush, kept, new_store
fault = sys.argv[1]
store = new_store(sys.argv[sys.argv.index("--store") + 1]) if "--store" in sys.argv else None
again = bool(store and store.index.files)
held = []
def say(text): print(text, flush=True)
if fault == "no start":
    print("model.gguf: no such tensor", file=sys.stderr)
    sys.exit(1)
say("READY %d stop" % (300 if fault == "small" else 16000))
for line in sys.stdin:
    _, count, keys, ids = (line.split() + [""])[:4] if "source" in line else (*line.split()[:2], "", line.split()[2])
    ids = [int(token) for token in ids.split(",")]
    n = store.lookup(IDENTITY, np.array(ids, np.int32)).n_tokens if store else 0
    reused = 0 if fault == "forget" and again else min(n, len(ids) - 1)
    source = "live" if fault == "live" and again else "store" if reused else "none"
    shift = 1 if fault == "differ" and again else 0
    say(f"RESUME {reused}"); say(f"PP {len(ids)} {len(ids)} 1.0 1.0"); say(f"REUSED {reused}")
    if keys: say(f"SOURCE {source} {reused} {reused}")
    answer = [97 + (sum(ids) + i + shift) % 26 for i in range(int(count))]
    for token in answer: say(f"T {token}")
    held = (ids + answer)[:-1]
    if keys: say(f"HELD {len(held)}")
    accepted = 3 if fault == "drafts" and again else 4
    say(f"DONE {count} {len(ids)} 1 1 length {accepted} 5 {reused} 0 0 0 0 0 {len(ids) - reused} 0")
    if store and fault != "not kept":
        flush(store, kept(np.array(held, np.int32), shape=PLAIN))
"""
ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def tell(tmp_path):
    return telling(demo, tmp_path, ENGINE, str(ROOT))


def test_a_good_engine_keeps_its_promises(tell):
    _, printed = tell("none")
    assert printed.count("ready after") == 4
    assert "SIGKILL" in printed
    slow = [line for line in broken(printed) if "sooner" in line]  # which is not asked of a script
    assert broken(printed) == slow
    assert printed.count("yes ") >= 4


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("forget", "tokens held are used by a new process"),
        ("differ", "greedy tokens of both equal those"),
        ("live", "they came from the store"),
        ("drafts", "6 of 10 drafts are accepted after the kill"),
    ],
)
def test_a_broken_promise_fails(tell, fault, promise):
    told, printed = tell(fault)
    assert not told
    assert [line for line in broken(printed) if promise in line]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no start", r"exit code 1; its log ends: model\.gguf: no such tensor"),
        ("small", "the context is too small for the story"),
        ("not kept", "the store does not hold both conversations"),
    ],
)
def test_an_engine_that_fails_is_quoted(tell, fault, message, monkeypatch):
    monkeypatch.setattr(demo, "STORED_S", 0.2)
    with pytest.raises(DemoError, match=message):
        tell(fault)


def test_a_template_that_rewrites_answers_is_refused(tell):
    with pytest.raises(DemoError, match="rewrites earlier answers"):
        tell("none", template=CHATML.replace("message.content", "message.content | upper"))


FIRST = Turn([1], 0, 2000, 20.0, 0, 0, n_held=2000)
SECOND = Turn([2], 2000, 20, 0.5, 0, 0, n_held=2020, source="live")
THIRD = Turn([3], 2020, 20, 0.5, 4, 5, n_held=2040, source="store")


@pytest.mark.parametrize(
    ("change", "held"),
    [
        ({}, True),
        ({"ids": [4]}, False),
        ({"n_reused": 2019}, False),
        ({"source": "parked"}, False),
        ({"n_drafts_accepted": 3}, False),
        ({"first_token_s": 20.0}, False),
    ],
)
def test_success_needs_every_promise(change, held):
    good = [FIRST, SECOND, THIRD]
    story = demo.Story([good, [FIRST, SECOND, THIRD._replace(**change)]], [good, good])
    assert demo._report(story, Console(file=io.StringIO(), width=120)) is held
