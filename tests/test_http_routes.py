"""Checks, names, bodies and answers of the routes, on a real socket over a scripted child."""

import json
import os
import socket

import openai
import pytest

import sessionfolder
from given_front import RunningFront, error_of, events, write_tokenizer_model
from sessionfolder import check_filename

ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tokenizer_model(tmp_path_factory.mktemp("model") / "tiny-00001-of-00002.gguf")


@pytest.fixture(scope="module")
def front(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("front")
    (folder / "saved").mkdir()
    with RunningFront(folder, model, slot_save_path=str(folder / "saved")) as front:
        yield front


@pytest.fixture(scope="module")
def locked(model, tmp_path_factory):
    """A front with an API key, a trusted origin and no folder for sessions."""
    folder = tmp_path_factory.mktemp("locked")
    with RunningFront(folder, model, api_key="sesame", trusted_origins=(ORIGIN,)) as front:
        yield front


def tree_of(folder) -> list[str]:
    return sorted(os.path.join(path, name) for path, folders, files in os.walk(folder) for name in folders + files)


def raw(front, *requests: bytes) -> bytes:
    """Send bytes on one connection, wait for the server to close it, return everything it said."""
    with socket.create_connection(("127.0.0.1", front.port), timeout=20) as connection:
        for request in requests:
            connection.sendall(request)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
        return answer


# --- What answers at once ---


def test_health_models_props_slots(front):
    assert front.get("/health").json()["status"] == "ok"
    assert front.get("/v1/models").json() == front.get("/models").json()
    (entry,) = front.get("/v1/models").json()["data"]
    assert (entry["id"], entry["object"], entry["owned_by"], entry["meta"]["n_ctx"]) == (
        "tiny",
        "model",
        "strata",
        4096,
    )
    assert front.get("/v1/models/tiny").json() == entry
    error_of(front.get("/v1/models/other"), 404)
    props = front.get("/props").json()
    assert isinstance(props["chat_template"], str)
    assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (4096, 1)
    assert (props["eos_token"], props["bos_token"]) == ("<|im_end|>", "")
    (slot,) = front.get("/slots").json()
    assert (slot["id"], slot["n_ctx"], slot["is_processing"], slot["session"]) == (0, 4096, False, None)


def test_metrics_are_prometheus_text_and_count(front):
    def value(name: str) -> float:
        lines = front.get("/metrics").text.splitlines()
        return next(float(line.split(" ")[1]) for line in lines if line.startswith(f"{name} "))

    before = value("llamacpp:tokens_predicted_total")
    n_generated = front.chat().json()["usage"]["completion_tokens"]
    assert value("llamacpp:tokens_predicted_total") == before + n_generated
    assert value("strata:held_tokens") == front.get("/slots").json()[0]["n_prompt_tokens"] > 0
    assert front.get("/metrics").headers["content-type"].startswith("text/plain")


def test_what_is_not_there(front):
    error_of(front.get("/nothing"), 404)
    for method in ("GET", "PUT", "DELETE"):
        answer = front.client.request(method, "/slots/0")
        error_of(answer, 405)
        assert answer.headers["allow"] == "POST"
    head = front.client.head("/slots/0?action=save")
    assert (head.status_code, head.content) == (405, b"")
    assert front.client.head("/v1/models").content == b""


# --- The order of the checks ---


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "LOCALHOST.", "localhost.:80", "[::1]:80", "10.1.2.3"])
def test_hosts_of_this_machine(front, host):
    assert front.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8080", "localhost.evil.example", "", "[", "127.0.0.1.x"),
        *(
            "evil.com:80@localhost",
            "evil@localhost",
            "@localhost",
            "localhost/",
            "localhost?",
            "localhost#",
            "localhost:",
        ),
        *("localhost:8o", "localhost:123456", "localhost..", "local host", "[::1", "::1", "[::1]x", "[localhost]"),
    ],
)
def test_other_hosts_are_refused(front, host):
    error_of(front.get("/v1/models", headers={"Host": host}), 403)


def test_allowed_hosts_and_the_listen_address(model, tmp_path):
    with RunningFront(tmp_path, model, allowed_hosts=("box.lan",), host="My-Box") as front:
        assert front.get("/health", headers={"Host": "BOX.lan:8080"}).status_code == 200
        assert front.get("/health", headers={"Host": "my-box"}).status_code == 200
        error_of(front.get("/health", headers={"Host": "other.lan"}), 403)


def test_with_a_key_any_host_will_do(locked):
    assert locked.get("/v1/models", headers={"Host": "box.example"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sesame"},
        {"Authorization": "bearer sesame"},
        {"Authorization": "", "x-api-key": "sesame"},
    ],
)
def test_the_key_is_taken_in_both_forms(locked, headers):
    assert locked.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer wrong", "Bearer undefined", "Basic sesame", "sesame", "Bearer é"]
)
def test_wrong_keys(locked, value):
    error = error_of(locked.get("/v1/models", headers={"Authorization": value.encode()}), 401)
    assert error["type"] == "authentication_error"


def test_health_and_page_need_no_key(locked):
    for path in ("/health", "/"):
        assert locked.get(path, headers={"Authorization": ""}).status_code == 200


def test_without_a_key_any_authorization_is_fine(front):
    for value in ("Bearer undefined", "Bearer", ""):
        assert front.get("/v1/models", headers={"Authorization": value}).status_code == 200


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=utf-8", 400),
        ("APPLICATION/JSON", 400),
    ],
)
def test_content_types(front, content_type, status):
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = front.client.post("/slots/0?action=save", content=b'{"filename": ""}', headers=headers)
    error_of(answer, status)


def test_the_checks_come_in_order(locked, front):
    """Each request has everything wrong but what was checked before."""
    wrong = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    path = "/slots/7?action=frob"

    def post(to, content=b"[", **headers):
        return to.client.post(path, content=content, headers={**wrong, **headers})

    error_of(post(front, Host="evil.example"), 403)
    error_of(post(locked, Authorization="Bearer wrong"), 401)
    error_of(post(locked), 415)
    json_type = {"Content-Type": "application/json"}
    error_of(post(locked, **json_type), 403)
    trusted = json_type | {"Origin": ORIGIN}
    error_of(post(locked, **trusted), 400)
    error_of(post(locked, b"x" * 70_000, **trusted), 413)
    error_of(post(locked, b"{}", **trusted), 501)
    own = json_type | {"Origin": front.url}
    assert "slot" in error_of(post(front, b"{}", **own), 400)["message"]
    assert "save, restore, erase" in error_of(front.slot("frob"), 400)["message"]
    assert "filename" in error_of(front.slot("restore", "a/b"), 400)["message"]
    error_of(front.slot("restore", "missing.bin"), 404)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "", "file://"])
def test_foreign_origins_are_refused_also_with_a_key(locked, front, origin):
    error_of(locked.post("/slots/0?action=save", headers={"Origin": origin}), 403)
    error_of(front.get("/sessions", headers={"Origin": origin}), 403)


def test_cors_headers_are_the_same_on_preflight_answer_and_stream(locked):
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    preflight = locked.client.options(
        "/v1/chat/completions",
        headers=asked | {"Authorization": "", "Access-Control-Request-Headers": "authorization,x-stainless-os"},
    )
    assert preflight.status_code == 204
    allowed = preflight.headers["access-control-allow-headers"]
    assert {"Authorization", "Content-Type", "x-stainless-os"} <= set(allowed.split(", "))
    assert "POST" in preflight.headers["access-control-allow-methods"]
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answers = [
        locked.post("/v1/chat/completions", body | {"stream": stream}, headers={"Origin": ORIGIN})
        for stream in (False, True)
    ]
    for answer in [preflight, *answers, locked.get("/nothing", headers={"Origin": ORIGIN})]:
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["vary"] == "Origin"
    assert answers[1].headers["content-type"].startswith("text/event-stream")


def test_other_origins_get_no_cors_headers(locked):
    answer = locked.client.options("/v1/models", headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


# --- Bodies ---


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xef\xbb\xbf{}",
        b"\xff",
        b"[" * 100000,
        b'{"a":' * 100000,
        b'{"filename": NaN}',
        b"1" * 5000,
        b'"x"',
        "{}".encode("utf-16"),
    ],
)
def test_bodies_that_are_no_object(front, body):
    for path in ("/slots/0?action=save", "/v1/chat/completions", "/completion", "/tokenize"):
        if path.startswith("/slots") and len(body) > 64 << 10:
            continue
        error_of(front.client.post(path, content=body, headers={"Content-Type": "application/json"}), 400)
    assert front.get("/health").status_code == 200


def test_bodies_over_the_limit(front):
    large = b'{"messages": "' + b"x" * (50 << 20) + b'"}'
    error_of(
        front.client.post("/v1/chat/completions", content=large, headers={"Content-Type": "application/json"}), 413
    )

    def chunks():
        for _ in range(100):
            yield b"x" * 1000

    answer = front.client.post("/slots/0?action=save", content=chunks(), headers={"Content-Type": "application/json"})
    error_of(answer, 413)
    assert front.get("/health").status_code == 200


def test_chunked_bodies_are_read(front):
    def chunks():
        for byte in b'{"content": "hello"}':
            yield bytes([byte])

    answer = front.client.post("/tokenize", content=chunks(), headers={"Content-Type": "application/json"})
    assert answer.json() == {"tokens": list(b"hello")}


def test_a_connection_is_usable_after_an_early_refusal(locked):
    body = b'{"filename": "' + b"x" * 50_000 + b'"}'
    head = "POST /slots/0?action=save HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nx-api-key: wrong\r\n"
    post = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    get = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    for requests in ((post, get), (post + get,), (post[:200], post[200:], get)):
        answer = raw(locked, *requests)
        assert answer.count(b"HTTP/1.1 ") == 2
        assert answer.index(b"HTTP/1.1 401") < answer.index(b"HTTP/1.1 200")
        assert b'"status":"ok"' in answer


def test_two_lengths_of_a_body_end_the_connection(front):
    body = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for lengths in (
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 0",
    ):
        answer = raw(front, f"{head}{lengths}\r\n\r\n".encode() + body)
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1


def test_a_second_try_is_asked_for_where_it_can_help(front, locked):
    front.slot("erase")
    final = [
        front.get("/nothing"),
        front.client.put("/slots"),
        front.slot("restore", "none.bin"),
        front.slot("save", "a.bin"),
        front.post("/slots/0?action=save", {"filename": "../a"}),
        front.post("/completion", {"prompt": "x" * 5000}),
        front.client.post("/tokenize", content=b"x", headers={"Content-Type": "text/plain"}),
        front.client.delete("/sessions/none.bin"),
        locked.slot("save", "a.bin"),
        locked.get("/slots", headers={"Authorization": "Bearer wrong"}),
    ]
    front.chat()
    for line in ("storage 0 disk full", "io 0 broken", "io 1 broken", "invalid 0 no"):
        front.script("SAVE", f"SERR {line}")
        final.append(front.slot("save", "a.bin"))
    assert [answer.status_code for answer in final[-4:]] == [507, 500, 500, 400]
    for answer in final:
        assert answer.headers["x-should-retry"] == "false", answer.text
    front.script("SAVE", "SERR memory 0 too little RAM")
    later = front.slot("save", "a.bin")
    assert (later.status_code, later.headers["retry-after"]) == (503, "5")
    assert "x-should-retry" not in later.headers


def test_a_save_that_fails_is_carried_out_once_by_the_openai_client(front):
    front.chat()
    before = len(front.verbs())
    front.script("SAVE", "SERR storage 0 disk full")
    client = openai.OpenAI(base_url=front.url, api_key="none", max_retries=2)
    with pytest.raises(openai.InternalServerError, match="disk full"):
        client.post("/slots/0?action=save", body={"filename": "a.bin"}, cast_to=object)
    assert len(front.verbs()) == before + 1


def test_expect_continue(front):
    body = b'{"content": "hi"}'
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
    with socket.create_connection(("127.0.0.1", front.port), timeout=20) as connection:
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert b"HTTP/1.1 200" in connection.recv(1 << 16)


# --- Slots and names ---


@pytest.mark.parametrize("slot", ["1", "-1", "00", "0x0", "1e0", "0" * 20, "9" * 20, "%30%30", "x", "٠"])
def test_slots_that_are_not_there(front, slot):
    error_of(front.post(f"/slots/{slot}?action=save", {"filename": "a.bin"}), 400)


def test_an_empty_slot_is_no_route(front):
    error_of(front.post("/slots/?action=save"), 404)


@pytest.mark.parametrize(
    "query", ["", "?action=", "?action=load", "?action=SAVE", "?action=save&action=save", "?act=save"]
)
def test_unknown_actions_list_the_known(front, query):
    error = error_of(front.post(f"/slots/0{query}", {"filename": "a.bin"}), 400)
    assert "save, restore, erase" in error["message"]


BAD_NAMES = [
    "",
    ".",
    "..",
    "...",
    "../x",
    "a/b",
    "a\\b",
    "/abs",
    "C:x",
    "x:y",
    "NUL",
    "con.bin",
    "COM1.txt",
    "x.",
    "x ",
]
BAD_NAMES += [
    ".hidden",
    "a\0b",
    "a\nb",
    "a\tb",
    "a\x7fb",
    "x" * 300,
    "日" * 67,
    "a*b",
    "a?b",
    'a"b',
    "a<b",
    "a>b",
    "a|b",
]
BAD_NAMES += ["lpt³", "conin$", "aux .txt", "CON", "com¹.x", "\ud800"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_refused_change_nothing(front, name):
    front.chat()
    before = tree_of(front.folder)
    n_verbs = len(front.verbs())
    body = json.dumps({"filename": name}).encode()
    for action in ("save", "restore"):
        answer = front.client.post(
            f"/slots/0?action={action}", content=body, headers={"Content-Type": "application/json"}
        )
        assert "filename" in error_of(answer, 400)["message"]
    assert tree_of(front.folder) == before
    assert len(front.verbs()) == n_verbs


@pytest.mark.parametrize("value", ["1", "null", "[]", "{}", "true"])
def test_filenames_that_are_no_text(front, value):
    for body in (f'{{"filename": {value}}}', "{}"):
        answer = front.client.post(
            "/slots/0?action=save", content=body.encode(), headers={"Content-Type": "application/json"}
        )
        assert error_of(answer, 400)["message"] == "filename must be a text that is not empty"


def test_a_filename_given_twice(front):
    body = b'{"filename": "a.bin", "filename": "b.bin"}'
    answer = front.client.post("/slots/0?action=save", content=body, headers={"Content-Type": "application/json"})
    assert "twice" in error_of(answer, 400)["message"]


@pytest.mark.parametrize(
    "name",
    ["chat1.bin", "a b.bin", "日本.bin", "e\u0301.bin", "é.bin", "🙂", "x" * 200, "日" * 66, "nul_.bin", "x.con"],
)
def test_names_that_go_round(front, name):
    n_held = front.chat().json()["usage"]["total_tokens"] - 1
    saved = front.slot("save", name)
    assert saved.status_code == 200, saved.text
    path = os.fsencode(front.options.slot_save_path) + b"/" + name.encode()
    size = os.stat(path).st_size
    assert saved.json() == {
        "id_slot": 0,
        "filename": name,
        "n_saved": n_held,
        "n_written": size,
        "timings": {"save_ms": 12.5},
    }
    restored = front.slot("restore", name).json()
    assert restored == {
        "id_slot": 0,
        "filename": name,
        "n_restored": n_held,
        "n_read": size,
        "timings": {"restore_ms": 3.5},
    }
    assert front.get("/slots").json()[0]["n_prompt_tokens"] == n_held


def test_names_too_long_by_a_byte():
    assert check_filename("日" * 66 + "ab")
    with pytest.raises(sessionfolder.NameRefused, match="200 bytes"):
        check_filename("日" * 66 + "abc")


def test_erase_forgets(front):
    n_held = front.chat().json()["usage"]["total_tokens"] - 1
    assert front.slot("erase").json() == {"id_slot": 0, "n_erased": n_held}
    assert front.get("/slots").json()[0]["n_prompt_tokens"] == 0
    error = error_of(front.slot("save", "nothing.bin"), 400)
    assert error["kind"] == "invalid"
    # Some clients send neither a body nor a type with it.
    assert front.client.post("/slots/0?action=erase").json() == {"id_slot": 0, "n_erased": 0}


def test_without_a_folder_only_erase_works(locked):
    for action in ("save", "restore"):
        assert "--slot-save-path" in error_of(locked.slot(action, "a.bin"), 501)["message"]
    assert locked.slot("erase").status_code == 200
    error_of(locked.get("/sessions"), 501)
    error_of(locked.client.delete("/sessions/a.bin"), 501)


def test_a_restore_shows_in_the_status(front):
    front.chat("a longer conversation to save")
    n_saved = front.slot("save", "status.bin").json()["n_saved"]
    front.chat("x")
    assert front.slot("restore", "status.bin").json()["n_restored"] == n_saved
    assert front.get("/slots").json()[0]["n_prompt_tokens"] == n_saved


# --- Text ---


def test_tokenize_detokenize_and_the_template(front):
    text = "é<|im_end|>"
    assert front.post("/tokenize", {"content": text}).json()["tokens"] == [*"é".encode(), 257]
    plain = front.post("/tokenize", {"content": text, "parse_special": False}).json()["tokens"]
    assert plain == list(text.encode())
    pieces = front.post("/tokenize", {"content": "a", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}]
    assert front.post("/detokenize", {"tokens": [*"é".encode(), 257]}).json() == {"content": text}
    error_of(front.post("/detokenize", {"tokens": [263]}), 400)
    error_of(front.post("/detokenize", {"tokens": "a"}), 400)
    error_of(front.post("/tokenize", {"content": 1}), 400)
    messages = [{"role": "user", "content": "x"}]
    rendered = front.post("/apply-template", {"messages": messages}).json()
    assert rendered == {"prompt": "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"}


def test_a_chat_answer(front):
    body = front.chat(max_tokens=4).json()
    (choice,) = body["choices"]
    assert (body["object"], body["model"], choice["finish_reason"]) == ("chat.completion", "tiny", "length")
    assert choice["message"] == {"role": "assistant", "content": "Grü"}
    assert body["usage"]["prompt_tokens"] + 4 == body["usage"]["total_tokens"]
    assert body["timings"]["predicted_n"] == 4


def test_tokens_held_are_counted_in_three_places(front):
    front.slot("erase")
    prompt = "x" * 100
    first = front.post("/completion", {"prompt": prompt, "n_predict": 3}).json()
    assert first["timings"]["cache_n"] == 0
    held = prompt + first["content"]
    body = front.post("/v1/completions", {"prompt": held + " and on", "max_tokens": 3}).json()
    n_cached = body["timings"]["cache_n"]
    assert n_cached == len(prompt) + 2
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == n_cached
    assert body["usage"]["cache_read_input_tokens"] == n_cached
    assert body["usage"]["prompt_tokens"] == len((held + " and on").encode())
    assert body["timings"]["prompt_n"] == body["usage"]["prompt_tokens"] - n_cached


def test_a_prompt_over_the_context_is_refused_before_any_event(front):
    for stream in (False, True):
        answer = front.post("/completion", {"prompt": "x" * 5000, "stream": stream})
        error = error_of(answer, 400)
        assert error["type"] == "exceed_context_size_error"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (5000, 4096)


def test_a_refusal_of_the_engine_keeps_its_text(front):
    front.script("GEN", "ERR not today")
    assert error_of(front.chat(), 400)["message"] == "not today"
    front.script("GEN", "ERR not today")
    assert error_of(front.chat(stream=True), 400)["message"] == "not today"
    assert front.chat().status_code == 200


def test_streams_of_the_native_route_end_with_stop(front):
    got = events(front.stream("/completion", prompt="abc"))
    assert [event["stop"] for event in got] == [False] * (len(got) - 1) + [True]
    assert "".join(event["content"] for event in got) == "Grüße from the engine 🙂."
    assert [token for event in got for token in event["tokens"]] == list("Grüße from the engine 🙂.".encode())
    assert got[-1]["timings"]["predicted_n"] == 30
