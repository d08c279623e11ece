"""A running answer goes on, token by token, and `/health` answers, while the server is thrown at.

Counts and order alone; `bench/strain.py` has the times.
"""

import contextlib
import socket

import pytest

from given_front import TEMPLATE, RunningFront, write_tokenizer_model
from httptextworker import BODY, IDS
from httptextworker import TEMPLATE as RENDERING

pytestmark = pytest.mark.slow

LOOP = (
    "{% if messages[-1].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}"
)
JSON = {"Content-Type": "application/json"}
N_ROUNDS = 6


def loop(front):
    return front.chat("loop")


def large_chat(front):
    text = b"word " * ((28 << 20) // 5)
    body = b'{"messages":[{"role":"user","content":"%s"}]}' % text
    return front.client.post("/v1/chat/completions", content=body, headers=JSON)


def small_objects(front):
    body = b'{"messages":[{"role":"user","content":"x"}],"a":[%s{}]}' % (b"{}," * 200_000)
    return front.client.post("/v1/chat/completions", content=body, headers=JSON)


def idle_crowd(front):
    with contextlib.ExitStack() as opened:
        for _ in range(300):
            opened.enter_context(socket.create_connection(("127.0.0.1", front.port)))
        return front.get("/health")


@pytest.mark.parametrize(
    ("throw", "status"), [(loop, 400), (large_chat, 413), (small_objects, 200), (idle_crowd, 200)]
)
def test_a_running_answer_and_health_go_on(throw, status, tmp_path, monkeypatch):
    monkeypatch.setattr("httptexts.LIMITS_S", {BODY: 20.0, RENDERING: 2.0, IDS: 20.0})
    with RunningFront(tmp_path, write_tokenizer_model(tmp_path / "tiny.gguf", LOOP + TEMPLATE)) as front:
        steps = [line for number in range(N_ROUNDS) for line in (f"@wait token{number}", f"@text {number}")]
        front.script("GEN", "@accept", *steps, "@wait end", "@done")
        body = {"prompt": "x", "stream": True}
        with front.client.stream("POST", "/completion", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            with front.meanwhile(lambda: throw(front)) as thrown:
                for number in range(N_ROUNDS):
                    front.mark(f"token{number}")
                    assert f'"content":"{number}"' in next(lines)
                    assert front.get("/health").json()["status"] == "ok"
                assert not thrown or throw is not loop  # the template is rendered still
                front.mark("end")
                assert '"stop":true' in next(lines)
        assert [result.status_code for result in thrown] == [status]
        assert front.chat("hi").status_code == 200
