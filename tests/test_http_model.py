"""The model file is replaced while the server runs: its text side follows the engine, and no request mixes the two."""

import os

import pytest

import given_child
from given_front import TEMPLATE, RunningFront, write_tokenizer_model
from httpmodel import file_state, read_text
from tokenizer import TokenizerError

OTHER = TEMPLATE.replace("<|im_start|>", "<|im_start|>!")


@pytest.fixture
def front(tmp_path):
    with RunningFront(tmp_path, write_tokenizer_model(tmp_path / "tiny.gguf")) as front:
        yield front


def replace_model(front, template: str | None = OTHER) -> None:
    """Put another file in the place of the model, as a download does."""
    new = write_tokenizer_model(front.folder / "new.gguf", template)
    os.replace(new, front.options.model)


def prompts(front) -> list[str]:
    """What the engine was given to read, as far as the record of the child goes."""
    orders = [verb.split(" ")[-1] for verb in front.verbs() if verb.startswith("GEN")]
    marks = dict(enumerate(given_child.MARKS, 256))
    return ["".join(marks.get(i) or chr(i) for i in map(int, ids.strip(",").split(","))) for ids in orders]


def test_load_takes_the_text_side_of_the_new_file(front):
    front.chat(max_tokens=1)
    front.post("/unload")
    replace_model(front)
    assert front.post("/load").status_code == 200
    assert front.get("/props").json()["chat_template"] == OTHER
    assert front.chat(max_tokens=1).status_code == 200
    assert "<|im_start|>!" not in prompts(front)[0]
    assert prompts(front)[1].startswith("<|im_start|>!user")


@pytest.mark.parametrize("stream", [True, False])
def test_a_chat_that_loads_the_model_is_written_for_the_new_file(front, stream):
    front.post("/unload")
    replace_model(front)
    assert front.chat(max_tokens=1, stream=stream).status_code == 200
    assert prompts(front)[0].startswith("<|im_start|>!user")


def test_an_engine_that_starts_again_by_itself_is_followed_too(front):
    front.chat(max_tokens=1)
    front.script("GEN", "@die")
    replace_model(front)
    assert front.chat().status_code == 500
    assert front.chat(max_tokens=1).status_code == 200
    assert prompts(front)[-1].startswith("<|im_start|>!user")


def test_a_running_engine_keeps_the_text_side_of_the_file_that_it_has_loaded(front):
    replace_model(front)
    front.chat(max_tokens=1)
    assert front.get("/props").json()["chat_template"] == TEMPLATE
    assert "!" not in prompts(front)[0]


def test_a_request_that_was_written_for_the_old_file_is_sent_back(front):
    front.chat()
    front.script("GEN", "@accept", "@mark begun", "@wait go", "@die")
    with front.meanwhile(front.chat), front.meanwhile(front.chat) as _:
        front.wait_mark("begun")
        front.wait_for(lambda: front.front.child.n_waiting == 1, "the second")
        replace_model(front)
        front.mark("go")
    assert len([verb for verb in front.verbs() if verb.startswith("GEN")]) == 2
    assert front.chat(max_tokens=1).status_code == 200
    assert prompts(front)[-1].startswith("<|im_start|>!user")


def test_a_file_that_changes_while_it_is_loaded_is_loaded_again(front):
    front.post("/unload")
    front.script("START", "@mark loading", "@wait go", "@default")
    with front.meanwhile(lambda: front.post("/load")) as answers:
        front.wait_mark("loading")
        replace_model(front)
        front.mark("go")
    assert answers[0].status_code == 200
    assert len(front.pids()) == 3
    assert front.get("/props").json()["chat_template"] == OTHER


def test_a_new_file_without_a_tokenizer_is_refused_and_a_good_one_taken(front):
    front.post("/unload")
    with open(front.options.model, "wb") as file:
        file.write(b"not a model")
    for answer in (front.post("/load"), front.chat()):
        assert answer.status_code == 500
        assert "tiny.gguf" in answer.json()["error"]["message"]
    replace_model(front)
    assert front.chat().status_code == 200


def test_a_file_that_never_holds_still_is_refused(tmp_path, monkeypatch):
    path = write_tokenizer_model(tmp_path / "tiny.gguf")
    states = iter(range(100))
    monkeypatch.setattr("httpmodel.file_state", lambda path: next(states))
    with pytest.raises(TokenizerError, match="changes each time"):
        read_text(path)
    assert file_state(str(tmp_path / "none")) is None
