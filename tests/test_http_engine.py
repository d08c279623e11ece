"""The HTTP front over the real engine and a tiny model: what is saved is used, and what is refused harms nothing."""

import os
import pathlib
import random
import stat
import threading

import pytest

import sessionfile
from given_enginefront import MODEL, N_NEW, EngineFront, conversation, refused, some_ids

CHAT = [{"role": "system", "content": "Be brief. " * 12}, {"role": "user", "content": "What is it? " * 40}]


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    with EngineFront(tmp_path_factory.mktemp("engine")) as front:
        yield front


def test_a_restored_conversation_is_used_after_a_kill(front):
    following, n_held = conversation(front, 2000)
    saved = front.save("long.bin")
    assert saved["n_saved"] == n_held
    control = front.turn(following)
    front.restart_engine()
    restored = front.restore("long.bin")
    assert (restored["n_restored"], restored["n_read"]) == (n_held, saved["n_written"])
    assert front.held() == n_held
    answer = front.turn(following)
    assert answer["tokens"] == control["tokens"]
    assert answer["timings"]["cache_n"] == restored["n_restored"]
    assert answer["timings"]["prompt_n"] == len(following) - n_held


def test_a_chat_by_messages_is_reused_up_to_its_last_turn(front):
    """The words of an answer need not give its tokens back, so one turn may have to be read again."""
    first = front.chat(messages=CHAT, max_tokens=N_NEW, temperature=0).json()
    saved = front.save("chat.bin")
    messages = [*CHAT, first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    control = front.chat(messages=messages, max_tokens=N_NEW, temperature=0).json()
    front.restart_engine()
    front.restore("chat.bin")
    answer = front.chat(messages=messages, max_tokens=N_NEW, temperature=0).json()
    assert answer["choices"] == control["choices"]
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == usage["cache_read_input_tokens"] == answer["timings"]["cache_n"]
    assert cached + answer["timings"]["prompt_n"] == usage["prompt_tokens"]
    n_last_turn = len(front.post("/tokenize", {"content": CHAT[-1]["content"]}).json()["tokens"]) + 16
    assert cached >= saved["n_saved"] - N_NEW - n_last_turn > 0


@pytest.mark.processes
def test_a_prompt_that_is_only_read_is_held_for_the_next_turn(front):
    ids = some_ids(150, 61)
    front.slot("erase")
    read = front.turn(ids, 0)
    assert (read["tokens"], read["stop_type"], read["timings"]["predicted_n"]) == ([], "limit", 0)
    assert front.turn([*ids, 20, 21], 4)["timings"]["cache_n"] >= len(ids) - 1


@pytest.mark.processes
def test_exactly_the_saved_prompt_again(front):
    ids = some_ids(200, 3)
    control = front.turn(ids)
    front.save("same.bin")
    front.restart_engine()
    front.restore("same.bin")
    answer = front.turn(ids)
    assert answer["tokens"] == control["tokens"]
    assert answer["timings"]["prompt_n"] >= 1


@pytest.mark.processes
def test_five_restarts_give_the_same_each_time(front):
    following, _ = conversation(front, 120, seed=5)
    front.save("often.bin")
    seen = []
    for _ in range(5):
        front.restart_engine()
        front.restore("often.bin")
        answer = front.turn(following)
        seen.append((answer["timings"]["cache_n"], answer["tokens"]))
    assert seen.count(seen[0]) == 5


@pytest.mark.processes
def test_another_chat_in_between_and_restore_again(front):
    following, n_held = conversation(front, 150, seed=7)
    front.save("first.bin")
    front.turn(some_ids(200, 70))
    front.restore("first.bin")
    assert front.turn(following)["timings"]["cache_n"] == n_held


@pytest.mark.processes
def test_saved_again_to_the_same_name_the_longer_chat_comes_back(front):
    following, _ = conversation(front, 100, seed=9)
    front.save("grows.bin")
    for _ in range(3):
        following = following + front.turn(following)["tokens"] + [40, 41]
    n_held = len(following) - 3
    assert front.save("grows.bin")["n_saved"] == n_held
    front.restart_engine()
    assert front.restore("grows.bin")["n_restored"] == n_held
    assert front.turn(following)["timings"]["cache_n"] == n_held


@pytest.mark.processes
def test_saving_twice_gives_the_same_bytes_and_harms_nothing(front):
    following, n_held = conversation(front, 90, seed=11)
    for name in ("a.bin", "b.bin"):
        front.save(name)
    assert (front.saved / "a.bin").read_bytes() == (front.saved / "b.bin").read_bytes()
    assert front.turn(following)["timings"]["cache_n"] == n_held


@pytest.mark.processes
@pytest.mark.parametrize("n_tokens", [1, 2])
def test_the_shortest_chats(front, n_tokens):
    answer = front.turn(some_ids(n_tokens, 13), 1)
    assert front.save("short.bin")["n_saved"] == n_tokens
    front.restart_engine()
    assert front.restore("short.bin")["n_restored"] == n_tokens
    following = some_ids(n_tokens, 13) + answer["tokens"] + [50]
    assert front.turn(following)["timings"]["cache_n"] == n_tokens


@pytest.mark.processes
def test_nothing_to_save(front):
    front.restart_engine()
    assert "nothing" in refused(front.slot("save", "none.bin"), 400, "invalid")
    assert not (front.saved / "none.bin").exists()


@pytest.mark.processes
def test_names_become_files_of_their_bytes(front):
    conversation(front, 20, seed=15)
    for name in ("日本.bin", "a b.bin", "e\u0301.bin", "é.bin", "🙂"):
        front.save(name)
        assert os.path.isfile(os.fsencode(front.saved) + b"/" + name.encode())
        front.restore(name)


# --- Files that are refused ---


def damaged(data: bytes) -> dict[str, bytes]:
    """Cuts and flips of a session file."""
    cuts = {f"cut at {size}": data[:size] for size in (0, 7, 63, 64, 65, len(data) // 2, len(data) - 17, len(data) - 1)}
    flips = {}
    for offset in (3, 20, 240, len(data) // 2, len(data) - 12, len(data) - 1):
        flipped = bytearray(data)
        flipped[offset] ^= 4
        flips[f"flip at {offset}"] = bytes(flipped)
    others = {"longer": data + b"\0", "GGUF": b"GGUF" + bytes(400), "text": b"hello " * 100}
    return cuts | flips | others


@pytest.mark.processes
def test_bad_files_are_refused_and_the_conversation_goes_on(front):
    following, n_held = conversation(front, 200, seed=17)
    front.save("good.bin")
    control = front.turn(following)
    front.restore("good.bin")
    before = sorted(os.listdir(front.saved))
    for what, data in damaged((front.saved / "good.bin").read_bytes()).items():
        (front.saved / "bad.bin").write_bytes(data)
        assert refused(front.slot("restore", "bad.bin"), 400, "invalid"), what
    (front.saved / "bad.bin").unlink()
    assert sorted(os.listdir(front.saved)) == before
    answer = front.turn(following)
    assert (answer["timings"]["cache_n"], answer["tokens"]) == (n_held, control["tokens"])


@pytest.mark.processes
def test_things_that_are_no_files(front):
    (front.saved / "folder.bin").mkdir()
    os.mkfifo(front.saved / "pipe.bin")
    (front.saved / "dev.bin").symlink_to("/dev/zero")
    with open(front.saved / "sparse.bin", "wb") as file:
        file.truncate(100 << 30)
    for name in ("folder.bin", "pipe.bin", "dev.bin", "sparse.bin"):
        refused(front.slot("restore", name), 400, "invalid")
        assert name not in {entry["filename"] for entry in front.get("/sessions").json()["data"]}
        path = front.saved / name
        path.rmdir() if name == "folder.bin" else path.unlink()


@pytest.mark.processes
def test_links_are_not_followed(front, tmp_path):
    conversation(front, 30, seed=19)
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"precious")
    changed = outside.stat().st_mtime_ns
    (front.saved / "evil.bin").symlink_to(outside)
    refused(front.slot("restore", "evil.bin"), 400, "invalid")
    front.save("evil.bin")
    assert (outside.read_bytes(), outside.stat().st_mtime_ns) == (b"precious", changed)
    assert not (front.saved / "evil.bin").is_symlink()


@pytest.mark.processes
def test_modes_of_what_is_written(front):
    conversation(front, 30, seed=21)
    front.save("mode.bin")
    assert stat.S_IMODE((front.saved / "mode.bin").stat().st_mode) == 0o600


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(front):
    following, n_held = conversation(front, 40, seed=23)
    front.saved.chmod(0o500)
    try:
        refused(front.slot("save", "no.bin"), 500, "io")
    finally:
        front.saved.chmod(0o700)
    assert front.turn(following)["timings"]["cache_n"] == n_held


@pytest.mark.processes
def test_a_folder_that_has_gone(tmp_path):
    saved = tmp_path / "gone"
    with EngineFront(tmp_path, saved=saved) as front:
        following, n_held = conversation(front, 40, seed=23)
        saved.rmdir()
        refused(front.slot("save", "no.bin"), 500, "io")
        refused(front.slot("restore", "no.bin"), 404)
        assert front.get("/sessions").json()["data"] == []
        assert front.turn(following)["timings"]["cache_n"] == n_held


@pytest.mark.processes
def test_floors_of_disk_and_memory(tmp_path, front):
    following, n_held = conversation(front, 60, seed=25)
    front.save("floor.bin")
    control = front.turn(following)
    much = str(2**31 - 1)
    with EngineFront(tmp_path, f"--session-min-free-mib={much}", saved=front.saved) as other:
        other.restore("floor.bin")
        before = (front.saved / "floor.bin").read_bytes()
        refused(other.slot("save", "floor.bin"), 507, "storage")
        assert (front.saved / "floor.bin").read_bytes() == before
        answer = other.turn(following)
        assert (answer["timings"]["cache_n"], answer["tokens"]) == (n_held, control["tokens"])
    with EngineFront(tmp_path, f"--conversation-cache-min-free-mib={much}", saved=front.saved) as other:
        following, n_held = conversation(other, 60, seed=27)
        for action in ("save", "restore"):
            message = refused(other.slot(action, "floor.bin"), 503, "memory")
            assert "MiB" in message
        assert other.turn(following)["timings"]["cache_n"] == n_held


# --- Other settings ---


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flag", "word"),
    [("--max-context=512", "configuration"), ("--max-context=100", "")],
)
def test_other_settings_are_refused_by_name(front, tmp_path, flag, word):
    conversation(front, 200, seed=29)
    front.save("settings.bin")
    with EngineFront(tmp_path, flag, saved=front.saved) as other:
        assert word in refused(other.slot("restore", "settings.bin"), 400, "invalid")
        assert other.turn(some_ids(20, 31))["tokens"]


@pytest.mark.processes
def test_a_model_that_was_moved_is_the_same_model(front, tmp_path):
    following, n_held = conversation(front, 50, seed=33)
    front.save("moved.bin")
    moved = tmp_path / "another name.gguf"
    moved.write_bytes(pathlib.Path(MODEL).read_bytes())
    linked = tmp_path / "link.gguf"
    linked.symlink_to(moved)
    with EngineFront(tmp_path, saved=front.saved, model=str(linked)) as other:
        assert other.restore("moved.bin")["n_restored"] == n_held
        assert other.turn(following)["timings"]["cache_n"] == n_held


@pytest.mark.processes
def test_another_model_is_refused_by_name(front, tmp_path):
    conversation(front, 50, seed=34)
    front.save("model.bin")
    other_model = bytearray(pathlib.Path(MODEL).read_bytes())
    other_model[-100] ^= 1
    (tmp_path / "other.gguf").write_bytes(other_model)
    with EngineFront(tmp_path, saved=front.saved, model=str(tmp_path / "other.gguf")) as other:
        assert "model" in refused(other.slot("restore", "model.bin"), 400, "invalid")


@pytest.mark.processes
def test_the_list_says_what_belongs_to_this_engine(front, tmp_path):
    conversation(front, 30, seed=35)
    front.save("mine.bin")

    def matches(to) -> dict:
        return {one["filename"]: one["match"] for one in to.get("/sessions").json()["data"]}

    assert matches(front)["mine.bin"] is True
    with EngineFront(tmp_path, "--max-context=512", saved=front.saved) as other:
        conversation(other, 30, seed=35)
        other.save("other.bin")
        assert (matches(other)["other.bin"], matches(other)["mine.bin"]) == (True, False)
    assert matches(front)["other.bin"] is False


@pytest.mark.processes
def test_another_chat_template_is_another_model(front, tmp_path):
    """The fingerprint is taken of the file, and the template is in it."""
    conversation(front, 50, seed=36)
    front.save("template.bin")
    data = pathlib.Path(MODEL).read_bytes()
    assert data.count(b"<|im_start|>assistant") == 1
    (tmp_path / "other.gguf").write_bytes(data.replace(b"<|im_start|>assistant", b"<|im_start|>somebody!"))
    with EngineFront(tmp_path, saved=front.saved, model=str(tmp_path / "other.gguf")) as other:
        assert "model" in refused(other.slot("restore", "template.bin"), 400, "invalid")


@pytest.mark.processes
def test_other_sampling_is_no_other_setting(front):
    following, n_held = conversation(front, 50, seed=35)
    front.save("sampling.bin")
    front.restore("sampling.bin")
    answer = front.turn(following, 4, temperature=0.9, seed=4, stop=["zzz"], top_k=5)
    assert answer["timings"]["cache_n"] == n_held


@pytest.mark.processes
def test_the_folder_may_be_a_link_that_is_turned_later(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    link = tmp_path / "link"
    link.symlink_to(first)
    with EngineFront(tmp_path, saved=pathlib.Path(os.path.realpath(link))) as front:
        conversation(front, 20, seed=37)
        link.unlink()
        link.symlink_to(second)
        front.save("a.bin")
    assert (os.listdir(first), os.listdir(second)) == (["a.bin"], [])


# --- The context, turns, loading ---


@pytest.mark.processes
def test_a_full_context(tmp_path, front):
    with EngineFront(tmp_path, "--max-context=128") as small:
        ids = some_ids(100, 39)
        answer = small.turn(ids, -1)
        assert len(answer["tokens"]) == 128 - 8 - 100
        n_saved = small.save("full.bin")["n_saved"]
        small.restart_engine()
        assert small.restore("full.bin")["n_restored"] == n_saved == 119
        error = small.post("/completion", {"prompt": ids + answer["tokens"]}).json()["error"]
        assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 120, 128)
        assert small.turn(ids + answer["tokens"][:-1], 1)["timings"]["cache_n"] > 0


@pytest.mark.processes
def test_a_save_and_a_restore_wait_for_the_stream(front):
    ids = some_ids(60, 41)
    control = front.turn(ids, 200)["tokens"]
    front.save("early.bin")
    body = {"prompt": ids, "n_predict": 200, "temperature": 0, "stream": True}
    for action in ("save", "restore"):
        with front.client.stream("POST", "/completion", json=body) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if line.startswith("data: "))
            with front.meanwhile(lambda action=action: front.slot(action, "early.bin")) as answers:
                text = "\n".join(lines)
        assert '"stop":true' in text
        assert answers[0].status_code == 200
        assert front.held() == 60 + len(control) - 1
        assert front.turn(ids, 200)["tokens"] == control


@pytest.mark.processes
def test_a_stopped_answer_can_be_saved_and_continued(front):
    ids = some_ids(40, 43)
    with front.client.stream("POST", "/completion", json={"prompt": ids, "temperature": 0, "stream": True}) as answer:
        next(answer.iter_lines())
    front.wait_for(lambda: not front.get("/slots").json()[0]["is_processing"], "the end of the answer")
    n_held = front.held()
    assert n_held < 4000
    assert front.save("stopped.bin")["n_saved"] == n_held
    front.restart_engine()
    assert front.restore("stopped.bin")["n_restored"] == n_held


@pytest.mark.processes
def test_the_conversation_is_told_from_the_tokens_that_are_held(front):
    answer = front.chat("In the beginning", max_tokens=12, temperature=0).json()["choices"][0]["message"]["content"]
    held = front.get("/slots/0/conversation").json()
    assert held["messages"][0] == {"role": "user", "content": "In the beginning"}
    assert answer.startswith(held["messages"][1]["content"])
    assert held["n_tokens"] == front.held()
    front.save("words.bin")
    front.restart_engine()
    assert front.get("/slots/0/conversation").json()["messages"] == []
    front.restore("words.bin")
    assert front.get("/slots/0/conversation").json()["messages"] == held["messages"]


@pytest.mark.processes
def test_unload_and_load(front):
    following, n_held = conversation(front, 80, seed=45)
    front.save("unload.bin")
    control = front.turn(following)
    assert front.post("/unload").status_code == 200
    refused(front.slot("restore", "unload.bin"), 503)
    front.turn(some_ids(10, 47))
    assert front.restore("unload.bin")["n_restored"] == n_held
    answer = front.turn(following)
    assert (answer["tokens"], answer["timings"]["cache_n"]) == (control["tokens"], n_held)


@pytest.mark.processes
def test_a_kill_at_any_moment_of_a_save_leaves_the_old_file_or_the_new(front):
    following, _ = conversation(front, 900, seed=49)
    front.save("old.bin")
    old = (front.saved / "old.bin").read_bytes()
    chosen = random.Random(0)
    for _ in range(6):
        front.restore("old.bin")
        front.turn(following)
        with front.meanwhile(lambda: front.slot("save", "old.bin")) as answers:
            front.wait_for(lambda: answers or chosen.random() < 0.2, "a moment")
            front.kill_engine()
        data = (front.saved / "old.bin").read_bytes()
        assert sessionfile.verify_session(str(front.saved / "old.bin"))
        if answers[0].status_code != 200:
            assert data == old or answers[0].json()["error"]["code"] == 500
        (front.saved / "old.bin").write_bytes(old)
        assert front.post("/load").status_code == 200
        names = {entry["filename"] for entry in front.get("/sessions").json()["data"]}
        assert "old.bin" in names
        assert not any(name.startswith(".") for name in names)


# --- A crowd ---


@pytest.mark.processes
def test_a_crowd(front):
    """Clients at random: every answer is well-formed, no file is half written, the last save is what comes back."""
    front.turn(some_ids(20, 51))
    faults: list[str] = []

    def client(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(6):
            act = chosen.choice(["turn", "turn", "stream", "hang up", "save", "restore", "erase", "look"])
            name = f"crowd{chosen.randrange(3)}.bin"
            fault = crowd_act(front, act, name, some_ids(chosen.randrange(1, 80), chosen.randrange(4)))
            if fault:
                faults.append(f"{act}: {fault}")

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(front.deadline_s)
    assert not any(thread.is_alive() for thread in threads)
    assert faults == []
    front.turn(some_ids(33, 53))
    n_saved = front.save("crowd0.bin")["n_saved"]
    for number in range(3):
        path = front.saved / f"crowd{number}.bin"
        if path.exists():
            n_tokens = sessionfile.verify_session(str(path)).image.live.n_tokens
            assert front.restore(path.name)["n_restored"] == n_tokens
    assert front.restore("crowd0.bin")["n_restored"] == n_saved == front.held()
    assert not [name for name in os.listdir(front.saved) if name.startswith(".crowd")]


def crowd_act(front, act: str, name: str, ids: list[int]) -> str | None:
    """One request; what was wrong with its answer, if anything was."""
    body = {"prompt": ids, "n_predict": 8, "temperature": 0}
    if act == "turn":
        answer = front.post("/completion", body)
        return None if answer.status_code == 200 and answer.json()["stop"] else answer.text
    if act in ("stream", "hang up"):
        with front.client.stream("POST", "/completion", json=body | {"stream": True}) as answer:
            if act == "hang up":
                next(answer.iter_lines())
                return None
            text = "".join(answer.iter_text())
        return None if '"stop":true' in text else text
    if act == "look":
        answer = front.get("/slots")
        return None if answer.status_code == 200 and len(answer.json()) == 1 else answer.text
    answer = front.slot(act, None if act == "erase" else name)
    # Nothing may be held yet, and nothing saved under the name.
    fine = {"save": (200, 400), "restore": (200, 404), "erase": (200,)}[act]
    return None if answer.status_code in fine else answer.text
