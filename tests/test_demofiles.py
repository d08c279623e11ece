"""The demo's story of files, told by a scripted engine: what it checks, and that it fails where a promise is broken."""

import io

import pytest
from rich.console import Console

import demofiles
from demostage import DemoError, Transfer, Turn, next_prompt
from given_demo import broken, telling
from given_tokenizer import ALPHABET, CHATML, IM_END, TOKENS, write_model
from tokenizer import Tokenizer

# It answers as `strata --serve` does. The tokens depend on the whole prompt, what is held on what was held or restored.
ENGINE = """
import pathlib, sys
fault, folder = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--slot-save-path") + 1])
held, restored = [], False
def say(text): print(text, flush=True)
if fault == "no start":
    print("model.gguf: no such tensor", file=sys.stderr)
    sys.exit(1)
say("INFO context=4096"); say("READY %d stop" % (300 if fault == "small" else 16000))
for line in sys.stdin:
    verb, _, rest = line.rstrip("\\n").partition(" ")
    path = folder / rest
    if verb == "GEN":
        count, _, ids = rest.split(" ")
        ids = [int(token) for token in ids.split(",")]
        reused = len(held) if ids[: len(held)] == held else 0
        if fault == "forget" and restored: reused = 0
        shift = 1 if fault == "differ" and restored else 0
        say(f"RESUME {reused}"); say(f"PP {len(ids)} {len(ids)} 1.0 1.0"); say(f"REUSED {reused}")
        answer = [97 + (sum(ids) + i + shift) % 26 for i in range(int(count))]
        for token in answer: say(f"T {token}")
        held = (ids + answer)[:-1]
        accepted = 3 if fault == "drafts" and restored else 4
        say(f"DONE {count} {len(ids)} 1 1 length {accepted} 5 {reused} 0 0 0 0 0 {len(ids) - reused} 0")
    elif verb == "SAVE" and fault == "full disk":
        say("SERR storage 0 no space left")
    elif verb == "SAVE":
        path.write_text(",".join(map(str, held)))
        say("SESSION 0 9"); say("SWAIT publish 60"); say(f"SAVED {len(held)} 9 0.1")
    elif verb == "RESTORE" and fault == "crash" and rest != "warm-up.bin":
        sys.exit(3)
    elif verb == "RESTORE":
        held, restored = [int(token) for token in path.read_text().split(",")], rest != "warm-up.bin"
        say("SESSION 9 9"); say(f"RESTORED {len(held)} 9 0.1")
"""


@pytest.fixture
def tell(tmp_path):
    return telling(demofiles, tmp_path, ENGINE)


def test_a_good_engine_keeps_its_promises(tell):
    _, printed = tell("none")  # whether it was fast is not asked of a script
    assert "yes  the next 32 greedy tokens equal" in printed
    assert "saved tokens restored and used" in printed
    assert printed.count("ready after") == 3


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("forget", "saved tokens restored and used"),
        ("differ", "greedy tokens equal those"),
        ("drafts", "3 of 5 drafts are accepted after the restart"),
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
        ("full disk", "SERR storage 0 no space left"),
        ("crash", "exit code 3"),
        ("small", "the context is too small for the story"),
    ],
)
def test_an_engine_that_fails_is_quoted(tell, fault, message):
    with pytest.raises(DemoError, match=message):
        tell(fault)


def test_a_template_that_rewrites_answers_is_refused(tell):
    with pytest.raises(DemoError, match="rewrites earlier answers"):
        tell("none", template=CHATML.replace("message.content", "message.content | upper"))


@pytest.mark.parametrize("ended", [True, False])
def test_the_next_prompt_continues_the_held_ids(tmp_path, ended):
    tokenizer = Tokenizer.load(write_model(tmp_path / "model.gguf"))
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.encode_chat(messages)
    answer = [ALPHABET.index(char) for char in "hello"] + ([IM_END] if ended else [])  # not the ids that encode() gives
    ids = next_prompt(tokenizer, messages, prompt, answer, "and now?")
    assert ids[: len(prompt) + len(answer)] == prompt + answer
    asked = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "and now?"}]
    assert tokenizer.decode(ids) == tokenizer.render_chat([*messages, *asked])
    assert len(TOKENS) > max(ids)


TURN = Turn([5, 6, 7], 0, 2000, first_token_s=20.0, n_drafts_accepted=0, n_drafts_offered=0)
NEXT = Turn([8, 9], 2002, 20, first_token_s=0.5, n_drafts_accepted=0, n_drafts_offered=0)
DRAFTS = NEXT._replace(n_drafts_accepted=3, n_drafts_offered=5)
FILE = Transfer(2002, 9_000_000, 0.5)


@pytest.mark.parametrize(
    ("change", "held"),
    [
        ({}, True),
        ({"after_restart": NEXT._replace(ids=[8, 10])}, False),
        ({"after_restart": NEXT._replace(n_reused=2001)}, False),
        ({"never_stopped": DRAFTS, "after_restart": DRAFTS}, True),
        ({"never_stopped": DRAFTS, "after_restart": DRAFTS._replace(n_drafts_accepted=2)}, False),
        ({"restored": FILE._replace(n_tokens=2001)}, False),
        ({"restored": FILE._replace(seconds=20.0)}, False),
    ],
)
def test_success_needs_every_promise(change, held):
    story = demofiles.Story(TURN, FILE, FILE, NEXT, NEXT)._replace(**change)
    console = Console(file=io.StringIO(), width=100)
    assert demofiles._report(story, console) is held
    assert ("20 times sooner" in console.file.getvalue()) is (
        "restored" not in change or change["restored"].seconds < 1
    )
