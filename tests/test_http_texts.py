"""Work on texts has a bound, and what goes beyond it takes nothing else along."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

import httptexts
from given_front import RunningFront, write_tokenizer_model
from httptextworker import BODY, IDS, TEMPLATE
from tokenizer import Tokenizer

pytestmark = pytest.mark.processes

ROOT = os.path.dirname(os.path.abspath(httptexts.__file__))
HOSTILE = {
    "an endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a huge power": "{% if messages %}{{ messages | length * 1 and (7 + messages | length) ** (10 ** 9) }}{% endif %}",
    "a huge power at its compilation": "{{ 7 ** (10 ** 9) }}",
    "a huge text": "{{ ('a' ~ messages[0].role) * 10 ** 9 }}",
    "a huge text at its compilation": "{{ 'a' * 10 ** 9 }}",
    "much text": "{% for a in range(99999) %}{% for b in range(999) %}{{ a }} and so on {% endfor %}{% endfor %}",
    "a huge list": "{{ [messages | length] * 10 ** 9 }}",
    "a text that doubles": "{% set n = namespace(t='a') %}{% for a in range(99) %}{% set n.t = n.t * 2 %}{% endfor %}",
    "a macro that calls itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "deep nesting": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "a wide format": "{{ '%999999999d' | format(1) }}",
    "a slow search": "{{ ('a' * 99999) | wordwrap(1) | replace('a', 'aa' * 9999) | length }}",
}


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    monkeypatch.setattr("httptexts.LIMITS_S", {BODY: 1.0, TEMPLATE: 0.5, IDS: 3.0})


def running(folder, template=None) -> RunningFront:
    return RunningFront(folder, write_tokenizer_model(folder / "tiny.gguf", *([template] if template else [])))


def error_of(answer) -> str:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def post_raw(front: RunningFront, path: str, body: bytes):
    return front.client.post(path, content=body, headers={"Content-Type": "application/json"})


def test_a_refusal_of_megabytes_is_told_in_a_line(tmp_path):
    """Spelled out and written as JSON, such a text held up every other request for many seconds."""
    template = "{{ raise_exception('\\x01' * (messages | length * 20000000)) }}"
    with running(tmp_path, template) as front:
        told = error_of(front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}))
    assert told.startswith("the model's chat template refused these messages: \\x01")
    assert len(told) < 10_000


def test_hostile_templates_are_given_up_and_the_server_goes_on(tmp_path):
    for number, (what, template) in enumerate(HOSTILE.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with running(folder, template) as front:
            path = ("/v1/chat/completions", "/apply-template")[number % 2]
            body = {"messages": [{"role": "user", "content": "x"}]}
            assert "template" in error_of(front.post(path, body)), what
            assert front.post("/tokenize", {"content": "ab"}).json() == {"tokens": [97, 98]}
            assert front.post("/completion", {"prompt": "ab"}).status_code == 200


def test_six_endless_templates_hold_up_nobody_and_not_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("httptexts.LIMITS_S", {BODY: 60.0, TEMPLATE: 60.0, IDS: 60.0})
    with running(tmp_path, HOSTILE["an endless loop"]) as front:
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(front.chat("x"))) for _ in range(6)]
        for thread in threads:
            thread.start()
        front.wait_for(lambda: len(front.front.texts.pids) == 2, "two processes")
        for path in ("/health", "/v1/models", "/slots", "/props", "/metrics"):
            assert front.get(path).status_code == 200
        pids = front.front.texts.pids
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {503}
    assert not any(map(runs, pids))


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_client_that_hangs_up_takes_its_endless_template_along(tmp_path, monkeypatch):
    import httpx

    monkeypatch.setattr("httptexts.LIMITS_S", {BODY: 60.0, TEMPLATE: 60.0, IDS: 60.0})
    said = "{{ messages[0].content }}"
    template = "{% if messages[0].content == 'x' %}" + HOSTILE["an endless loop"] + "{% endif %}" + said
    with running(tmp_path, template) as front:
        assert front.chat("y").status_code == 200
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, timeout=0.2)
        assert front.chat("y").status_code == 200


def hostile_bodies() -> dict[str, bytes]:
    chat = b'{"messages":[{"role":"user","content":"x"}],"a":%b}'
    return {
        "many small objects": chat % (b"[" + b"{}," * 300_000 + b"{}]"),
        "deep lists": chat % (b"[" * 400_000 + b"]" * 400_000),
        "a long number": chat % (b"1" * 900_000),
        "a long key": chat % (b'{"' + b"k" * 900_000 + b'":1}'),
    }


@pytest.mark.parametrize("what", hostile_bodies())
def test_large_bodies_are_read_where_they_hold_up_nobody(tmp_path, what):
    with running(tmp_path) as front:
        for path in ("/v1/chat/completions", "/apply-template", "/tokenize", "/detokenize"):
            answer = post_raw(front, path, hostile_bodies()[what])
            assert answer.status_code in (200, 400), answer.text
        assert front.chat("hi").status_code == 200


def test_a_body_that_takes_too_much_time_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("httptexts.LIMITS_S", {BODY: 0.01, TEMPLATE: 1.0, IDS: 3.0})
    with running(tmp_path) as front:
        answer = post_raw(front, "/tokenize", hostile_bodies()["many small objects"])
        assert "reading the body took more than 0.01 s of processor time" in error_of(answer)
        assert front.post("/tokenize", {"content": "ab"}).json() == {"tokens": [97, 98]}


def test_the_limit_on_bodies_comes_from_the_context(tmp_path):
    with running(tmp_path) as front:
        longest = len("<|endoftext|>")
        limit = 6 * 4096 * longest + (1 << 20)
        for size, status in ((limit, 400), (limit + 1, 413)):
            body = b'{"prompt":"' + b"a" * (size - 13) + b'"}'
            answer = post_raw(front, "/completion", body)
            assert (len(body), answer.status_code) == (size, status)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/completion", lambda text: {"prompt": [text, 1]}),
        ("/tokenize", lambda text: {"content": text}),
    ],
)
def test_a_text_that_no_context_can_hold_is_refused_before_it_is_encoded(tmp_path, monkeypatch, path, body):
    monkeypatch.setattr("httptexts.LIMITS_S", {BODY: 1.0, TEMPLATE: 1.0, IDS: 0.000001})
    with running(tmp_path) as front:
        error = front.post(path, body("ä" * 4096 * 13)).json()["error"]
        assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 4096)
        assert error["n_prompt_tokens"] > 4096
        assert "exceeds the available context size" in error["message"]
        assert "at least" in error["message"]


def test_a_prompt_that_is_far_too_long_is_not_encoded_to_its_end(tmp_path):
    with running(tmp_path) as front:
        for n_words, exact in ((1000, True), (7000, False)):
            error = front.post("/completion", {"prompt": "words, " * n_words}).json()["error"]
            assert error["n_prompt_tokens"] == 7 * n_words if exact else error["n_prompt_tokens"] > 8192
            assert ("at least" in error["message"]) is not exact


def test_a_process_that_was_killed_is_replaced(tmp_path):
    with running(tmp_path) as front:
        assert front.chat("hi").status_code == 200
        for _ in range(3):
            for pid in filter(runs, front.front.texts.pids):
                os.kill(pid, signal.SIGKILL)
            assert front.chat("hi").status_code == 200


def test_processes_that_cannot_be_started_are_tried_again(tmp_path, monkeypatch):
    with running(tmp_path) as front:
        assert front.chat("hi").status_code == 200
        with monkeypatch.context() as broken:
            broken.setattr("httptexts.httptextworker.__file__", str(tmp_path / "absent.py"))
            front.front.texts._end_all()
            answer = front.chat("hi")
            assert answer.status_code == 500
            assert "did not start" in answer.json()["error"]["message"]
        assert front.chat("hi").status_code == 200


def test_a_job_whose_model_is_replaced_is_done_with_the_new_one(tmp_path):
    old = Tokenizer.load(write_tokenizer_model(tmp_path / "old.gguf", HOSTILE["an endless loop"]))
    new = Tokenizer.load(write_tokenizer_model(tmp_path / "new.gguf", "new"))

    async def replaced() -> bytes:
        pool = httptexts.TextPool(print)
        await pool.start(old)
        job = asyncio.create_task(pool.run("apply_template", b'{"messages":[{"role":"user","content":"x"}]}', n_ctx=99))
        while not pool.pids or pool._idle:
            await asyncio.sleep(0.01)
        await pool.start(new)
        answer = await job
        await pool.close()
        return answer.blobs[0]

    assert asyncio.run(replaced()) == b'{"prompt":"new"}'


def test_a_further_process_is_kept_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr("httptexts.PATIENCE_S", 0.0)
    monkeypatch.setattr("httptexts.SPARE_S", 0.2)
    with running(tmp_path) as front:
        assert front.chat("hi").status_code == 200
        texts = [front.post("/tokenize", {"content": "ab"}).json() for _ in range(3)]
        assert texts == [{"tokens": [97, 98]}] * 3
        front.wait_for(lambda: len(front.front.texts.pids) == 1, "the end of the second")


def test_one_process_does_where_requests_are_short(tmp_path):
    with running(tmp_path) as front:
        for _ in range(20):
            assert front.chat("hi").status_code == 200
        assert len(front.front.texts.pids) == 1


KILLED_FRONT = """
import asyncio, sys, time
from httptexts import TextPool
from tokenizer import Tokenizer

async def main():
    pool = TextPool(print)
    await pool.start(Tokenizer.load(sys.argv[1]))
    asyncio.create_task(pool.run("generate", b'{"messages":[{"role":"user","content":"x"}]}', reader="chat", n_ctx=99))
    while not pool.pids:
        await asyncio.sleep(0.01)
    print(pool.pids[0], flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a busy process leaves after its job")
def test_nothing_is_left_when_the_front_is_killed(tmp_path):
    model = write_tokenizer_model(tmp_path / "tiny.gguf", HOSTILE["an endless loop"])
    command = [sys.executable, "-c", KILLED_FRONT, model]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as front:
        pid = int(front.stdout.readline())
        assert runs(pid)
        front.kill()
    RunningFront.wait_for(lambda: not runs(pid), "its end")
