"""The engine child under the front: turns, limits, a child that breaks the rules, ends or is ended."""

import asyncio
import json
import os
import signal
import time

import pytest

from given_front import RunningFront, alive, events, held, refusal, slot


@pytest.fixture(scope="module")
def shared(tokenizer_model, tmp_path_factory):
    """One front for tests that leave it as they found it."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "saved").mkdir()
    with RunningFront(folder, tokenizer_model, slot_save_path=str(folder / "saved")) as front:
        yield front


# --- Out of step ---

BAD_SESSION_LINES = [
    ["SESSION 5 4"],
    ["SESSION x 4"],
    ["SESSION +1 4"],
    ["SESSION 1"],
    ["SESSION 3 4", "SESSION 2 4"],
    ["SWAIT flush 0"],
    ["SWAIT flush 3601"],
    ["SWAIT flush 1.5"],
    ["SWAIT flush"],
    ["SWAIT flush x"],
    ["SWAIT flush -1"],
    ["SWAIT flush 5 extra"],
    ["SWAIT fl:sh 5"],
    ["SWAIT  5"],
    ["SESSION -1 10"],
    ["SESSION 1_0 20"],
    ["SAVED 1 2 inf"],
    ["SAVED 1 2 +3"],
    ["SAVED 1 2 1_0"],
    ["SAVED +1 2 3"],
    ["SAVED x y z"],
    ["SAVED 1 2 nan"],
    ["SAVED 1 2 -1"],
    ["SAVED 1 2"],
    ["SAVED -1 2 3"],
    ["SAVED 1 2 3 4"],
    ["RESTORED 1 2 3"],
    ["SERR odd 0 text"],
    ["SERR invalid 2 text"],
    ["SERR invalid"],
    ["ERR text"],
    ["T 5"],
    ["saved 1 2 3"],
    [""],
    ["@raw ff0a"],
    ["@raw " + "20" * ((1 << 20) + 10) + "0a"],
]


@pytest.mark.parametrize("lines", BAD_SESSION_LINES, ids=lambda lines: lines[-1][:20])
def test_a_save_that_leaves_the_protocol_ends_the_child(shared, lines):
    assert shared.chat().status_code == 200
    n_starts = len(shared.pids())
    shared.script("SAVE", *lines, "@deaf")
    refusal(shared.slot("save", "a.bin"), 500, "out of step")
    assert not alive(shared.pids()[-1])
    assert held(shared) == 0
    refusal(shared.slot("restore", "a.bin"), 404)
    refusal(shared.slot("save", "a.bin"), 503)
    assert shared.chat().status_code == 200
    assert len(shared.pids()) == n_starts + 1


BAD_GENERATION_LINES = [
    ["T 5"],
    ["HELLO"],
    ["RESUME"],
    ["RESUME 1 2"],
    ["@accept", "RESUME 0"],
    ["@accept", "T x"],
    ["@accept", "PP 1 2 3"],
    ["@accept", "SAVED 1 2 3"],
    ["@accept", "DONE 1 2 3"],
    ["@accept", ""],
]


@pytest.mark.parametrize("lines", BAD_GENERATION_LINES, ids=lambda lines: lines[-1][:20])
def test_a_generation_that_leaves_the_protocol_ends_the_child(shared, lines):
    shared.script("GEN", *lines, "@deaf")
    refusal(shared.chat(), 500, "out of step")
    assert not alive(shared.pids()[-1])
    assert shared.chat().status_code == 200


def test_a_token_without_text_is_an_error_and_the_answer_is_stopped(front):
    for stream in (False, True):
        front.script("GEN", "@accept", "T 99999", "@wait-stop", "@done")
        answer = front.chat(stream=stream)
        assert "has no text" in answer.text
        front.wait_for(lambda: front.verbs()[-1] == "STOP", "STOP")
        assert front.chat().status_code == 200


def test_an_erase_that_leaves_the_protocol_ends_the_child(shared):
    shared.script("ERASE", "SAVED 1 2 3")
    refusal(shared.slot("erase"), 500, "out of step")
    refusal(shared.slot("erase"), 503)
    shared.chat()
    assert shared.slot("erase").json()["n_erased"] > 0


def test_a_refused_erase_changes_nothing(front):
    front.chat()
    before = held(front)
    front.script("ERASE", "ERR not now")
    refusal(front.slot("erase"), 400, "not now")
    assert (held(front), len(front.pids())) == (before, 1)


def test_a_child_that_speaks_unasked_is_replaced(front):
    front.chat()
    front.script("GEN", "@accept", "@text x", "@done", "T 5")
    assert front.chat().status_code == 200
    front.wait_for(lambda: front.front.child._pipes.ahead, "the stray line")
    assert front.chat().json()["timings"]["cache_n"] == 0
    assert len(front.pids()) == 2


def test_a_child_out_of_step_while_idle_is_not_asked_to_save(front):
    front.script("GEN", "@accept", "@text x", "@done", "SAVED 1 2 3")
    front.chat()
    front.wait_for(lambda: front.front.child._pipes.ahead, "the stray line")
    refusal(front.slot("save", "a.bin"), 500, "out of step")
    assert "SAVE" not in " ".join(front.verbs())


def test_lines_for_the_log_are_no_answers(front):
    front.script("GEN", "@accept", "WARN hot", "@text ab", "INFO still here", "@done")
    assert front.chat().status_code == 200
    front.script("SAVE", "INFO something", "SESSION 0 4", "WARN a slow disk", "SAVED 1 2 3.0")
    assert front.slot("save", "a.bin").json()["n_saved"] == 1
    front.script("ERASE", "INFO gone soon", "@default")
    assert front.slot("erase").status_code == 200
    for line in ("WARN hot", "INFO still here", "INFO something", "WARN a slow disk", "INFO gone soon"):
        assert line in front.terminal.lines
    assert len(front.pids()) == 1


@pytest.mark.slow
def test_a_line_for_the_log_is_no_sign_of_life(make_front):
    front = make_front(silence_s=1)
    front.chat()
    front.script("SAVE", *["INFO busy", "@pause"] * 200)
    refusal(front.slot("save", "a.bin"), 500, "silent for 1 s")


def test_what_the_engine_says_moves_no_cursor(front):
    evil = "\x1b]0;title\x07\x1b[2Jred\u202e \x9bH"
    front.script("GEN", f"ERR {evil}")
    message = front.chat().json()["error"]["message"]
    front.script("SAVE", f"SERR io 0 {evil}")
    message += front.slot("save", "a.bin").json()["error"]["message"]
    front.script("GEN", "@accept", f"ERR {evil}")
    message += front.chat().json()["error"]["message"]
    front.script("GEN", f"@stderr {evil}", "@exit 3")
    message += front.chat().json()["error"]["message"]
    front.script("START", f"INFO model={evil} backend=cpu", "READY 4096 stop")
    assert front.chat().status_code == 200
    message += json.dumps(front.get("/props").json()["engine"], ensure_ascii=False)
    assert message.count("red") == 5
    assert message.isprintable()


# --- Refusals and failures of the engine ---


def test_a_failure_in_the_middle_of_a_request_keeps_the_child_and_holds_nothing(front):
    front.chat()
    for lines, stream in ((["@accept"], False), (["@accept", "@text ab"], True), (["RESUME 0"], False)):
        front.script("GEN", *lines, "ERR the logits are not finite")
        answer = front.chat(stream=stream)
        assert "the logits are not finite" in answer.text
        if not stream:
            refusal(answer, 500, "not finite")
            assert answer.headers["x-should-retry"] == "false"
        assert held(front) == 0
    assert front.chat().status_code == 200
    assert len(front.pids()) == 1


def test_the_reason_of_an_end_is_kept(front):
    front.script("GEN", "@accept", "@text ab", "FATAL the device is gone", "@exit 1")
    assert "the device is gone" in front.stream()
    front.script("START", "INFO engine=1", "FATAL no memory for the weights", "@exit 1")
    refusal(front.chat(), 500, "no memory for the weights")
    front.chat()
    front.script("ERASE", "FATAL half erased", "@exit 1")
    refusal(front.slot("erase"), 500, "half erased")
    front.chat()
    front.script("TOKENS", "FATAL lost count", "@exit 1")
    refusal(front.get("/slots/0/conversation"), 500, "lost count")
    front.script("GEN", "@accept", "@text x", "@done", "FATAL in the night", "@exit 1")
    front.chat()
    front.wait_for(lambda: front.get("/slots").json()[0]["model"] == "unloaded", "its end")
    assert front.chat().status_code == 200
    assert any("in the night" in line for line in front.terminal.lines)


def test_last_words_are_those_of_the_request(front):
    front.script("START", "@stderr loaded in 1.2 s", "@default")
    front.post("/unload")
    front.chat()
    front.wait_for(lambda: "loaded in 1.2 s" in front.terminal.lines, "the words of the start")
    front.script("GEN", "@accept", "@die")
    message = refusal(front.chat(), 500, "signal 9")["message"]
    assert "loaded" not in message


def test_a_prompt_that_was_not_read_to_its_end_is_held_as_far_as_it_was(front):
    begun = ["RESUME 0", "PP 512 1000 1.0 1.0", "@mark begun", "@wait-stop"]
    front.script("GEN", *begun, "DONE 0 1000 1.0 0.0 cancel 0 0 0 0 0 0 0 0.0 512 0")
    with front.client.stream("POST", "/completion", json={"prompt": "x" * 1000, "stream": True}) as answer:
        front.wait_mark("begun")
        assert answer.status_code == 200
    front.wait_for(lambda: held(front) == 512, "what was read")
    front.script("SAVE", "SAVED 512 9000 1.0")
    assert front.slot("save", "a.bin").json()["n_saved"] == 512


def test_a_request_that_keeps_nothing_leaves_what_is_held(front):
    front.chat("hello")
    before = held(front)
    generation = run_on(front, lambda: front.front.child.generate("GEN 5 ckpt=0 104,105"))
    front.wait_for(lambda: not generation._events.empty() and not front.front.child.busy, "its end")
    assert held(front) == before


def test_what_the_engine_says_to_hold_is_what_is_shown(front):
    front.chat("hello")
    for finish in ("cancel", "length"):
        front.script(
            "GEN", "RESUME 0", "REUSED 0", "T 104", "HELD 77", f"DONE 1 50 1 1 {finish} 0 0 0 0 0 0 0 0.0 50 0"
        )
        front.chat()
        assert held(front) == 77
    front.script("GEN", "RESUME 0", "REUSED 0", "HELD x")
    refusal(front.chat(), 500, "out of step")


def test_a_stop_may_say_how_much_is_to_be_kept(front):
    front.script("GEN", "@accept", "@text abcdef", "@mark begun", "@wait-stop", "@done")
    generation = run_on(front, lambda: front.front.child.generate("GEN 50 104,105"))
    front.wait_mark("begun")
    run_on(front, lambda: generation.stop(4))
    front.wait_for(lambda: not front.front.child.busy, "its end")
    assert front.verbs()[-1] == "STOP 4"
    assert held(front) == 2 + 4
    run_on(front, lambda: generation.stop())
    assert generation.n_kept == 4


def run_on(front, work):
    """The result of ``work``, called on the loop of the front."""

    async def call():
        return work()

    return asyncio.run_coroutine_threadsafe(call(), front._loop).result(front.deadline_s)


def test_where_a_prompt_was_taken_from_is_told(front):
    front.script("GEN", "RESUME 3", "PP 4 9 1.0 1.0", "@mark reading", "@wait go", "PP 9 9 1.0 1.0", "REUSED 3",
                 "SOURCE checkpoint 3 5", "@text ab", "@mark answering", "@wait on", "@done")  # fmt: skip
    with front.meanwhile(front.chat):
        front.wait_mark("reading")
        front.wait_for(lambda: slot(front)["n_read"] == 4, "the first part")
        assert {key: slot(front)[key] for key in ("phase", "n_prompt", "n_generated", "cache_n")} == {
            "phase": "reading",
            "n_prompt": 9,
            "n_generated": 0,
            "cache_n": 3,
        }
        front.mark("go")
        front.wait_mark("answering")
        front.wait_for(lambda: slot(front)["n_generated"] == 2, "the answer")
        assert slot(front)["phase"] == "answering"
        front.mark("on")
    after = slot(front)
    assert (after["phase"], after["cache_source"], after["cache_n"], after["diverged_at"]) == (
        "idle",
        "checkpoint",
        3,
        5,
    )


def test_the_phase_of_a_save_and_of_those_behind_it(front):
    front.chat()
    front.script("SAVE", "@mark begun", "@wait go", "@default")
    with front.meanwhile(lambda: front.slot("save", "a.bin")):
        front.wait_mark("begun")
        with front.meanwhile(front.chat):
            front.wait_for(lambda: slot(front)["n_waiting"] == 1, "the queue")
            assert slot(front)["phase"] == "saving"
            front.mark("go")
    front.post("/unload")
    front.script("START", "@mark loading", "@wait loaded", "@default")
    with front.meanwhile(front.chat):
        front.wait_mark("loading")
        assert slot(front)["phase"] == "waiting"
        front.mark("loaded")


@pytest.mark.parametrize(
    ("line", "status", "published"),
    [
        ("SERR invalid 0 another model", 400, None),
        ("SERR storage 0 disk full", 507, None),
        ("SERR memory 0 too little RAM", 503, None),
        ("SERR io 0 cannot write", 500, None),
        ("SERR io 1 folder not flushed", 500, True),
    ],
)
def test_refusals_keep_the_child_and_what_it_holds(shared, line, status, published):
    shared.chat()
    before = held(shared)
    _, kind, _, text = line.split(" ", 3)
    shared.script("SAVE", line)
    error = refusal(shared.slot("save", "a.bin"), status, text)
    assert (error["kind"], error.get("published")) == (kind, published)
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert held(shared) == before > 0


def test_fatal_ends_the_child(front):
    front.chat()
    front.slot("save", "a.bin")
    front.script("RESTORE", "SESSION 1 2", "FATAL a pool was half written", "@exit 1")
    refusal(front.slot("restore", "a.bin"), 500, "a pool was half written")
    assert held(front) == 0
    assert front.chat().status_code == 200


def test_a_child_that_dies_in_a_save(front):
    front.chat()
    front.script("SAVE", "SESSION 0 10", "@stderr the last words", "@exit 7")
    error = refusal(front.slot("save", "a.bin"), 500, "exit status 7")
    assert "the last words" in error["message"]
    front.chat()
    front.script("SAVE", "@die")
    refusal(front.slot("save", "a.bin"), 500, "signal 9")
    assert len(front.pids()) == 2


def test_a_child_that_dies_in_a_stream(front):
    front.script("GEN", "@accept", "@text abc", "@die")
    text = front.stream()
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events(text)[:-1]) == "abc"
    assert events(text)[-1]["error"]["code"] == 500
    assert "[DONE]" not in text
    assert front.chat().status_code == 200


def test_a_child_killed_while_idle(front):
    front.chat()
    front.slot("save", "a.bin")
    os.kill(front.pids()[-1], signal.SIGKILL)
    front.wait_for(lambda: front.get("/slots").json()[0]["model"] == "unloaded", "its end to be noticed")
    assert held(front) == 0
    assert front.get("/health").status_code == 200
    for action in ("save", "restore", "erase"):
        answer = front.slot(action, "a.bin")
        refusal(answer, 503)
        assert answer.headers["retry-after"].isdigit()
    assert front.chat().status_code == 200
    restored = front.slot("restore", "a.bin")
    assert restored.json()["n_restored"] == held(front)


def test_a_restart_that_fails_and_the_next_that_does_not(front):
    front.post("/unload")
    front.script("START", "@stderr the model file is gone", "@exit 1")
    refusal(front.chat(), 500, "the model file is gone")
    front.script("START", "READY 0 stop")
    refusal(front.chat(), 500, "out of step")
    front.script("START", "HELLO")
    refusal(front.chat(stream=True), 500, "out of step")
    assert front.chat().status_code == 200


def test_a_first_start_that_fails_ends_the_server(tokenizer_model, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "START").write_text("@stderr not a GGUF file\n@exit 1\n")
    front = RunningFront(tmp_path, tokenizer_model, wait=False)
    front._thread.join(20)
    front.stop()
    assert "not a GGUF file" in str(front.server.failure)


# --- Silence ---


@pytest.mark.slow
def test_a_silent_child_is_ended(make_front):
    front = make_front(silence_s=1)
    front.script("GEN", "@deaf")
    refusal(front.chat(), 500, "silent for 1 s")
    assert front.chat().status_code == 200
    front.script("SAVE", "SESSION 0 10", "@deaf")
    refusal(front.slot("save", "a.bin"), 500, "silent for 1 s")
    assert not alive(front.pids()[-1])
    assert front.chat().status_code == 200


@pytest.mark.slow
def test_a_running_allowance_is_longer_than_the_limit_on_silence(make_front):
    front = make_front(silence_s=1)
    front.chat()
    front.script("SAVE", "SWAIT flush 3600", "@mark begun", "@wait go", "SAVED 1 2 3.0")
    with front.meanwhile(lambda: front.slot("save", "a.bin")) as answers:
        front.wait_mark("begun")
        time.sleep(2)  # past the limit on silence
        front.mark("go")
    assert answers[0].status_code == 200


@pytest.mark.slow
def test_an_allowance_ends_with_the_next_line(make_front):
    front = make_front(silence_s=1)
    front.chat()
    front.script("SAVE", "SWAIT flush 3600", "SESSION 0 10", "@deaf")
    refusal(front.slot("save", "a.bin"), 500, "silent for 1 s")


@pytest.mark.slow
def test_progress_keeps_a_save_alive_past_the_limit(make_front):
    front = make_front(silence_s=1)
    front.chat()
    beats = [line for step in range(4) for line in (f"SESSION {step} 10", f"@mark beat{step}", f"@wait go{step}")]
    front.script("SAVE", *beats, "SAVED 1 10 3.0")
    with front.meanwhile(lambda: front.slot("save", "a.bin")) as answers:
        for step in range(4):
            front.wait_mark(f"beat{step}")
            time.sleep(0.4)
            front.mark(f"go{step}")
    assert answers[0].status_code == 200


