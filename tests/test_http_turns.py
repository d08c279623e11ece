"""Turns of the one engine under the front: who waits, who goes on, what a client that hangs up takes with it."""

import json
import os
import random
import socket
import threading

import httpx
import pytest

import httpstream
from given_front import alive, events, held, refusal, slot

# --- Turns ---


def test_everything_answers_during_a_save(front):
    front.chat()
    front.script(
        "SAVE", "SWAIT capture 60", "SESSION 0 100", "SESSION 40 100", "@mark half", "@wait go", "SAVED 1 100 3"
    )
    with front.meanwhile(lambda: front.slot("save", "a.bin")):
        front.wait_mark("half")
        front.wait_for(lambda: front.get("/slots").json()[0]["session"]["n_done"] == 40, "the progress")
        (slot,) = front.get("/slots").json()
        assert slot["is_processing"]
        assert slot["session"] == {
            "action": "save",
            "filename": "a.bin",
            "phase": "capture",
            "n_done": 40,
            "n_total": 100,
        }
        metrics = front.get("/metrics").text
        assert "\nstrata:session_done_bytes 40\n" in metrics
        assert "\nstrata:session_running 1\n" in metrics
        for _ in range(50):
            for path in ("/health", "/v1/models", "/slots", "/metrics", "/props", "/sessions"):
                assert front.get(path).status_code == 200
        front.mark("go")
    assert front.get("/slots").json()[0]["session"] is None
    assert ("save", "capture", 40, 100) in front.terminal.progress
    assert front.terminal.progress[-1] is None


def test_everything_answers_while_loading(make_front, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "START").write_text("@mark begun\n@wait go\n@default\n")
    front = make_front(wait=False)
    front.wait_mark("begun")
    assert front.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert front.get("/metrics").status_code == 200
    assert front.get("/sessions").status_code == 200
    for path in ("/health", "/slots", "/props"):
        answer = front.get(path)
        refusal(answer, 503, "loading")
        assert answer.headers["retry-after"].isdigit()
    for stream in (False, True):
        refusal(front.chat(stream=stream), 503, "loading")
    front.mark("go")
    front.wait_for(lambda: front.get("/health").status_code == 200, "health")
    assert front.chat().status_code == 200


def test_a_request_in_the_restart_window_waits(front):
    front.post("/unload")
    assert front.get("/slots").json()[0]["n_ctx"] == 4096
    front.script("START", "@mark begun", "@wait go", "@default")
    with front.meanwhile(front.chat) as answers:
        front.wait_mark("begun")
        assert front.get("/health").status_code == 503
        assert front.get("/slots").json()[0]["n_ctx"] == 4096
        assert front.get("/v1/models").json()["data"][0]["meta"]["n_ctx"] == 4096
        front.mark("go")
    assert answers[0].status_code == 200


def test_load_and_unload(front):
    front.chat()
    front.slot("save", "a.bin")
    assert front.client.post("/unload").json() == {"status": "unloaded"}
    assert not alive(front.pids()[0])
    assert front.get("/health").json()["model"] == "unloaded"
    refusal(front.slot("restore", "a.bin"), 503, "POST /load")
    assert front.client.post("/load").json()["status"] == "loaded"
    assert front.slot("restore", "a.bin").status_code == 200
    assert front.client.post("/load").json()["status"] == "loaded"
    assert len(front.pids()) == 2


def test_unload_while_busy_is_refused_and_harms_nothing(front):
    front.chat()
    front.script("SAVE", "@mark begun", "@wait go", "@default")
    with front.meanwhile(lambda: front.slot("save", "a.bin")) as answers:
        front.wait_mark("begun")
        refusal(front.post("/unload"), 409)
        front.mark("go")
    assert answers[0].status_code == 200


def test_a_save_waits_for_the_running_answer_and_has_it_all(front):
    front.script("GEN", "@accept", "@text abc", "@mark begun", "@wait go", "@text def", "@done")
    with front.meanwhile(front.stream) as streams:
        front.wait_mark("begun")
        with front.meanwhile(lambda: front.slot("save", "a.bin")) as answers:
            front.wait_for(lambda: front.get("/slots").json()[0]["n_waiting"] == 1, "the save to queue")
            front.mark("go")
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events(streams[0])) == "abcdef"
    assert answers[0].json()["n_saved"] == held(front)


def test_requests_are_served_in_order(front):
    front.script("GEN", "@accept", "@mark begun", "@wait go", "@text x", "@done")
    with front.meanwhile(front.chat):
        front.wait_mark("begun")
        with front.meanwhile(lambda: front.chat("b", max_tokens=1)):
            front.wait_for(lambda: front.get("/slots").json()[0]["n_waiting"] == 1, "one")
            with front.meanwhile(lambda: front.slot("save", "a.bin")):
                front.wait_for(lambda: front.get("/slots").json()[0]["n_waiting"] == 2, "two")
                with front.meanwhile(lambda: front.chat("c", max_tokens=2)):
                    front.wait_for(lambda: front.get("/slots").json()[0]["n_waiting"] == 3, "three")
                    front.mark("go")
    verbs = [verb.split(" ")[:2] for verb in front.verbs()]
    assert [verb[0] for verb in verbs] == ["GEN", "GEN", "SAVE", "GEN"]
    assert (verbs[1][1], verbs[3][1]) == ("1", "2")


def test_a_queued_stream_gets_keep_alives(front, monkeypatch):
    monkeypatch.setattr(httpstream, "KEEP_ALIVE_S", 0.02)
    front.chat()
    front.script("SAVE", "@mark begun", "@wait go", "@default")
    with front.meanwhile(lambda: front.slot("save", "a.bin")):
        front.wait_mark("begun")
        with front.client.stream("POST", "/completion", json={"prompt": "x", "stream": True}) as answer:
            chunks = answer.iter_text()
            assert answer.status_code == 200
            assert [next(chunks) for _ in range(3)] == [":\n\n"] * 3
            front.mark("go")
            rest = "".join(chunks)
    assert events(rest)[-1]["stop"] is True


# --- Clients that hang up ---


def test_a_stream_whose_client_hangs_up_is_stopped(front):
    front.script("GEN", "@accept", "@text abc", "@wait-stop", "@done")
    with front.client.stream("POST", "/completion", json={"prompt": "x", "stream": True}) as answer:
        assert next(answer.iter_text())
    front.wait_for(lambda: front.verbs()[-1] == "STOP", "STOP")
    assert front.chat().status_code == 200
    assert len(front.pids()) == 1


def test_an_answer_whose_client_hangs_up_is_stopped(front):
    front.chat()
    front.script("GEN", "@accept", "@mark begun", "@text abc", "@wait-stop", "@done")
    with httpx.Client(base_url=front.url) as client, front.meanwhile(lambda: hang_up(client, front)):
        front.wait_mark("begun")
    front.wait_for(lambda: front.verbs()[-1] == "STOP", "STOP")
    assert front.chat().status_code == 200


def hang_up(client, front) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post("/completion", json={"prompt": "x"}, timeout=httpx.Timeout(20, read=0.3))
    client.close()


def test_a_queued_request_whose_client_hangs_up_is_never_begun(front, monkeypatch):
    monkeypatch.setattr(httpstream, "KEEP_ALIVE_S", 0.02)
    front.chat()
    front.script("SAVE", "@mark begun", "@wait go", "@default")
    with front.meanwhile(lambda: front.slot("save", "a.bin")):
        front.wait_mark("begun")
        with front.client.stream("POST", "/completion", json={"prompt": "queued", "stream": True}) as answer:
            assert next(answer.iter_text()) == ":\n\n"
        front.mark("go")
    assert front.chat("after").status_code == 200
    assert [verb.split(" ")[0] for verb in front.verbs()] == ["GEN", "SAVE", "GEN"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_queued_request_whose_client_went_is_dropped_at_once(front, stream):
    front.chat()
    front.script("GEN", "@accept", "@mark begun", "@wait go", "@text x", "@done")
    body = json.dumps({"prompt": "queued", "stream": stream}).encode()
    with front.meanwhile(front.chat):
        front.wait_mark("begun")
        leave_in_the_queue(front, "/completion", body)
        front.mark("go")
    assert front.chat("after").status_code == 200
    assert [verb.split(" ")[0] for verb in front.verbs()] == ["GEN", "GEN", "GEN"]


def leave_in_the_queue(front, path: str, body: bytes) -> None:
    """Queue a request and hang up; it is to leave the queue while the one before it still runs."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", front.port)) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        front.wait_for(lambda: slot(front)["n_waiting"] == 1, "the request to queue")
    front.wait_for(lambda: slot(front)["n_waiting"] == 0, "the queue to be left")


def test_a_request_given_up_while_the_model_loads_is_not_read(front):
    front.post("/unload")
    front.script("START", "@mark loading", "@wait go", "@default")
    with socket.create_connection(("127.0.0.1", front.port)) as client:
        body = b'{"prompt": "x", "stream": true}'
        head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        front.wait_mark("loading")
    front.wait_for(lambda: front.front.child._current.stopped, "the hang-up")
    front.mark("go")
    assert front.chat("after").status_code == 200
    assert [verb.split(" ")[0] for verb in front.verbs()] == ["GEN"]


def test_a_queued_restore_or_erase_goes_with_its_client_and_a_save_stays(front):
    front.chat()
    front.slot("save", "a.bin")
    before = held(front)
    front.script("GEN", "@accept", "@mark begun", "@wait go", "@text x", "@done")
    with front.meanwhile(front.chat):
        front.wait_mark("begun")
        leave_in_the_queue(front, "/slots/0?action=restore", b'{"filename": "a.bin"}')
        leave_in_the_queue(front, "/slots/0?action=erase", b"{}")
        with httpx.Client(base_url=front.url) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/slots/0?action=save", json={"filename": "b.bin"}, timeout=httpx.Timeout(20, read=0.3))
        assert slot(front)["n_waiting"] == 1
        front.mark("go")
    front.wait_for((front.folder / "saved" / "b.bin").exists, "the save")
    assert [verb.split(" ")[0] for verb in front.verbs()] == ["GEN", "SAVE", "GEN", "SAVE"]
    assert held(front) != before


def test_a_file_that_goes_while_its_restore_waits_is_not_found(front):
    front.chat()
    front.slot("save", "a.bin")
    saved = front.folder / "saved" / "a.bin"
    front.script("GEN", "@accept", "@mark begun", "@wait go", "@text x", "@done")
    with front.meanwhile(front.chat):
        front.wait_mark("begun")
        with front.meanwhile(lambda: front.slot("restore", "a.bin")) as answers:
            front.wait_for(lambda: slot(front)["n_waiting"] == 1, "the restore to queue")
            saved.unlink()
            front.mark("go")
    refusal(answers[0], 404, "a.bin")
    assert "RESTORE" not in " ".join(front.verbs())
    saved.write_text("[1]")
    front.script("RESTORE", "@mark reading", "@wait gone", "SERR io 0 cannot open the file")
    with front.meanwhile(lambda: front.slot("restore", "a.bin")) as answers:
        front.wait_mark("reading")
        saved.unlink()
        front.mark("gone")
    refusal(answers[0], 404, "a.bin")
    assert len(front.pids()) == 1


def test_a_folder_that_goes_is_a_refusal_and_never_a_fault(front):
    front.chat()
    folder = front.folder / "saved"
    folder.rename(front.folder / "elsewhere")
    for there in (lambda: None, folder.touch):
        there()
        refusal(front.slot("restore", "a.bin"), 404)
        refusal(front.client.delete("/sessions/a.bin"), 404)
        assert front.get("/sessions").json()["data"] == []
    folder.unlink()
    (front.folder / "elsewhere").rename(folder)
    assert front.slot("save", "a.bin").status_code == 200


def test_an_existing_file_is_kept_where_that_is_asked_for(front):
    front.chat()
    body = {"filename": "a.bin", "overwrite": False}
    assert front.post("/slots/0?action=save", body).status_code == 200
    before = (front.folder / "saved" / "a.bin").read_bytes()
    front.chat("another")
    answer = front.post("/slots/0?action=save", body)
    refusal(answer, 409, "a.bin")
    assert answer.headers["x-should-retry"] == "false"
    assert (front.folder / "saved" / "a.bin").read_bytes() == before
    assert front.post("/slots/0?action=save", body | {"overwrite": True}).status_code == 200
    assert (front.folder / "saved" / "a.bin").read_bytes() != before


def test_a_save_whose_client_hangs_up_goes_on(front):
    front.chat()
    front.script("SAVE", "@mark begun", "@wait go", "@default")
    with httpx.Client(base_url=front.url) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/slots/0?action=save", json={"filename": "a.bin"}, timeout=httpx.Timeout(20, read=0.3))
    front.wait_mark("begun")
    front.mark("go")
    saved = front.folder / "saved" / "a.bin"
    front.wait_for(saved.exists, "the file")
    assert front.slot("restore", "a.bin").status_code == 200
    assert "strata:sessions_saved_total 1\n" in front.get("/metrics").text


def test_a_stop_string_stops_the_child(front):
    front.script("GEN", "@accept", "@text one STOP ", "@wait-stop", "@text never", "@done")
    body = front.post("/completion", {"prompt": "x", "stop": ["OP"]}).json()
    assert (body["content"], body["stop_type"], body["stopping_word"]) == ("one ST", "word", "OP")
    assert front.verbs()[-1] == "STOP 6"


# --- A crowd ---


@pytest.mark.slow
def test_a_crowd(front):
    """Twenty clients at random: every answer is well-formed, and what was saved last under a name comes back."""
    faults: list[str] = []

    def client(seed: int) -> None:
        chosen = random.Random(seed)
        with httpx.Client(base_url=front.url, timeout=front.deadline_s) as client:
            for _ in range(15):
                act = chosen.choice(["chat", "stream", "hang up", "save", "restore", "erase", "look", "unload"])
                fault = crowd_act(client, act, f"{chosen.randrange(3)}.bin", "x" * chosen.randrange(1, 300))
                if fault:
                    faults.append(f"{act}: {fault}")

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(front.deadline_s)
    assert not any(thread.is_alive() for thread in threads)
    assert faults == []
    front.chat("the last word")
    front.slot("save", "0.bin")
    last = dict(line.rsplit(" ", 1) for line in (front.scripts / "results").read_text().splitlines())
    for path, n_saved in last.items():
        assert front.slot("restore", os.path.basename(path)).json()["n_restored"] == int(n_saved)
    assert not list((front.folder / "saved").glob("*.tmp"))


def crowd_act(client, act: str, name: str, text: str) -> str | None:
    """One request; what was wrong with its answer, if anything was."""
    body = {"messages": [{"role": "user", "content": text}]}
    if act in ("stream", "hang up"):
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            if act == "hang up":
                next(answer.iter_lines())
                return None
            text = "".join(answer.iter_text())
        return None if text.endswith("data: [DONE]\n\n") else text
    if act == "chat":
        answer = client.post("/v1/chat/completions", json=body)
    elif act == "look":
        answer = client.get("/slots")
    elif act == "unload":
        answer = client.post("/unload")
    else:
        answer = client.post(f"/slots/0?action={act}", json={"filename": name})
    # Nothing may be held, saved or loaded; a busy engine is not unloaded.
    also_fine = {"save": (400, 503), "restore": (404, 503), "erase": (503,), "unload": (409,)}.get(act, ())
    answer.json()
    return None if answer.status_code in (200, *also_fine) else answer.text
