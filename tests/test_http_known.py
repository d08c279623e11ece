"""What was sampled stands for the text that was sent, over HTTP: the next turn reads what is new and nothing else."""

import json

import gguf
import pytest

import given_child
from given_child import END_ID, MARKS, to_ids
from given_front import TEMPLATE, RunningFront, events
from tokenizer import BYTE_OF, CONTROL, USER_DEFINED

MERGES = ["h e", "l l", "he ll", "hell o"]
WORDS = ["he", "ll", "hell", "hello"]
HELLO = 256 + len(MARKS) + WORDS.index("hello")
CLOCK = "{% set day = strftime_now('%d %b %Y') %}<|im_start|>system\nToday is {{ day }}.<|im_end|>\n" + TEMPLATE


def write_words_model(path, template=TEMPLATE, pre="gpt-2", types=True) -> str:
    """The scripted child's tokens and a few words, so that a text has several spellings in ids."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([*sorted(BYTE_OF, key=BYTE_OF.get), *MARKS, *WORDS])
    if types:
        writer.add_token_types([1] * 256 + [CONTROL] * 3 + [USER_DEFINED] * (len(MARKS) - 3) + [1] * len(WORDS))
        writer.add_eos_token_id(END_ID)
    writer.add_token_merges(MERGES)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


@pytest.fixture
def make(tmp_path):
    def make(**options) -> RunningFront:
        names = {name: options.pop(name) for name in ("template", "pre", "types") if name in options}
        return RunningFront(tmp_path, write_words_model(tmp_path / "words.gguf", **names), **options)

    return make


def gen_ids(front) -> list[int]:
    """The prompt of the last GEN line, whose start the child notes."""
    line = [line for line in front.verbs() if line.startswith("GEN ")][-1]
    return [int(one) for one in line.split(" ")[-1].split(",")]


def turns(*answers: str) -> list[dict]:
    talk = [{"role": "user", "content": "a"}]
    for answer in answers:
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "b"}]
    return talk


def answer_ids(front, *ids: int) -> None:
    front.script("GEN", "@accept", f"@ids {','.join(map(str, ids))}", "@done")


def test_an_answer_sent_back_is_the_ids_that_were_sampled(make):
    with make() as front:
        sampled = [*b"hello", *b" he", END_ID]
        answer_ids(front, *sampled)
        first = front.chat(messages=turns()).json()
        prompt = gen_ids(front)
        assert first["choices"][0]["message"]["content"] == "hello he"
        answer_ids(front, HELLO, END_ID)
        second = front.chat(messages=turns("hello he")).json()
        assert gen_ids(front)[: len(prompt) + len(sampled)] == prompt + sampled
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) + len(sampled) - 1
        assert second["timings"]["cache_source"] == "live"
        assert second["timings"]["diverged_at"] == second["timings"]["cache_n"] == len(prompt) + len(sampled) - 1
        third = front.chat(messages=turns("hello he", "hello")).json()
        assert third["timings"]["prompt_n"] < 30


def test_streams_are_known_too_and_an_edited_answer_is_encoded_anew(make):
    with make() as front:
        answer_ids(front, *b"hello", END_ID)
        shown = events(front.stream(messages=turns()))
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in shown) == "hello"
        prompt = gen_ids(front)
        front.chat(messages=turns("hello"))
        assert gen_ids(front)[len(prompt) :][:6] == [*b"hello", END_ID]
        for edited, expected in (("hello!", b"hello!"), ("hell", b"hell"), ("!hello", [ord("!"), HELLO])):
            front.chat(messages=turns(edited))
            assert gen_ids(front)[len(prompt) :][: len(expected) + 1] == [*expected, END_ID]


def test_words_that_spell_a_mark_are_not_the_mark_that_was_held(make):
    with make() as front:
        answer_ids(front, *b"hello", END_ID)
        front.chat(messages=turns())
        front.chat(messages=[{"role": "user", "content": "a<|im_end|>\n<|im_start|>assistant\nhello"}])
        assert gen_ids(front).count(END_ID) == 1


def test_raw_prompts_that_go_on_are_known(make):
    with make() as front:
        answer_ids(front, *b"hello", *b" hello")
        assert front.post("/completion", {"prompt": "say:"}).json()["content"] == "hello hello"
        for path in ("/completion", "/v1/completions"):
            front.post(path, {"prompt": "say:hello hello!"})
            assert gen_ids(front) == [*b"say:hello hello!"]


def test_a_stop_string_ends_the_held_conversation_at_what_was_shown(make):
    with make() as front:
        written = ",".join(map(str, b"hello.\nUser: go on"))
        front.script("GEN", "@accept", f"@ids {written}", "@wait-stop", "@done")
        first = front.chat(messages=turns(), stop=["\nUser:"])
        assert first.json()["choices"][0]["message"]["content"] == "hello."
        assert front.verbs()[-1] == "STOP 6"
        prompt = gen_ids(front)
        second = front.chat(messages=turns("hello.")).json()
        assert second["timings"]["cache_n"] == len(prompt) + 6
        assert gen_ids(front)[len(prompt) :][:7] == [*b"hello.", END_ID]


@pytest.mark.parametrize(
    ("ids", "stops", "n_kept"),
    [
        ([*b"ab", 256 + 2, *b"STOP"], ["STOP"], 2),
        ([*"aé".encode(), *b"STOP"], ["STOP"], 3),
        ([*b"a", "é".encode()[0], *b"STOP"], ["STOP"], 2),
        ([*b"STOP"], ["STOP"], 0),
        ([*b"a", HELLO, *b"b"], ["lob"], 1),
        ([*b"a", HELLO], ["hello"], 1),
        ([*b"a", *"é".encode()], ["é"], 1),
    ],
)
def test_tokens_that_were_wholly_shown_are_counted(make, ids, stops, n_kept):
    with make() as front:
        front.script("GEN", "@accept", f"@ids {','.join(map(str, ids))}", "@wait-stop", "@done")
        front.chat(stop=stops)
        assert front.verbs()[-1] == f"STOP {n_kept}"


# --- After a restore ---


def hold(front, text: str) -> list[int]:
    """Let the engine hold a conversation, as of another day and another process."""
    ids = to_ids(text)
    (front.folder / "sessions").mkdir(exist_ok=True)
    (front.folder / "sessions" / "old").write_text(json.dumps(ids))
    assert front.slot("restore", "old").status_code == 200
    return ids


@pytest.fixture
def restored(make, tmp_path):
    """A front with a template that tells the day, and the text of a conversation of another day, as sampled."""
    old = "<|im_start|>system\nToday is 05 Jan 2020.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
    old += "<|im_start|>assistant\nhello"
    with make(template=CLOCK, slot_save_path=str(tmp_path / "sessions")) as front:
        yield front, hold(front, old)


def test_a_restored_conversation_is_known_and_keeps_its_day(restored):
    front, held = restored
    answer = front.chat(messages=turns("hello")).json()
    assert answer["timings"]["cache_n"] == len(held)
    assert gen_ids(front)[: len(held)] == held
    assert front.verbs().count("TOKENS") == 1
    assert "prompt tokens reused" not in "".join(front.terminal.lines)
    front.chat(messages=turns("hello", given_child.ANSWER))
    assert gen_ids(front)[: len(held)] == held
    assert front.verbs().count("TOKENS") == 1


def test_a_new_conversation_is_told_the_present_day(restored):
    front, _ = restored
    for messages in ([{"role": "user", "content": "A"}], turns("other"), [{"role": "user", "content": "c"}]):
        answer = front.chat(messages=messages).json()
        assert answer["timings"]["cache_n"] == 0
        assert b"2020" not in bytes(one for one in gen_ids(front) if one < 256)
    assert "Jan 20" in front.terminal.lines[1].partition("in place of")[2]


def test_an_engine_that_does_not_tell_its_tokens_is_no_failure(restored):
    front, _ = restored
    front.script("TOKENS", "ERR expected: GEN")
    assert front.chat(messages=turns("hello")).status_code == 200
    assert "not known: expected: GEN" in "".join(front.terminal.lines)


@pytest.mark.parametrize("line", ["TOKENS 2 1", "TOKENS 1 x", "TOKENS", "TOKENS 1 -1", "TOKENS 3 1,,2"])
def test_tokens_out_of_step_end_the_child(restored, line):
    front, _ = restored
    front.script("TOKENS", line)
    assert front.chat(messages=turns("hello")).status_code == 200
    assert len(front.pids()) == 2


# --- The log ---


def test_a_prompt_that_parts_is_told_with_place_and_words(make):
    with make() as front:
        front.chat(messages=turns())
        n_lines = len(front.terminal.lines)
        front.chat(messages=turns(given_child.ANSWER))
        assert len(front.terminal.lines) == n_lines
        front.chat(messages=[{"role": "system", "content": "be brief"}, *turns()])
        n_prompt, at = len(gen_ids(front)), len(to_ids("<|im_start|>"))
        begin = f"0 of {n_prompt} prompt tokens reused (none); the prompt parts from what was held at token {at}: "
        assert front.terminal.lines[-1].startswith(begin + '"system\\nb" in place of "user\\na<|im_end|>\\n"')


def test_what_the_model_file_leaves_open_is_told_at_the_start(make):
    with make(pre=None, types=False, template=None) as front:
        said = "\n".join(front.terminal.lines)
        for words in ("no tokenizer.ggml.pre", "'default'", "token_type", "'<|im_end|>'", "no chat template"):
            assert words in said


def test_a_file_that_leaves_nothing_open_is_told_nothing_of(make):
    with make() as front:
        assert front.terminal.lines == []
