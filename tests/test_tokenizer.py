"""Text to ids and back: a small vocabulary written here, and the facts of a real one."""

import pathlib
import re

import pytest

from given_tokenizer import ALPHABET, CHATML, IM_END, IM_START, MERGES, THINK, TOKENS, TYPES, write_model
from tokenizer import BYTE_OF, Tokenizer, TokenizerError


@pytest.fixture
def load(tmp_path):
    """A tokenizer from a file with the given metadata."""
    return lambda **metadata: Tokenizer.load(write_model(tmp_path / "model.gguf", **metadata))


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    """The pieces in which no merge crosses a border."""
    pieces = tokenizer._plain.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(BYTE_OF[char] for char in piece).decode() for piece, _ in pieces]


# --- Encoding and decoding ---


def test_merges_make_words_and_bytes_make_the_rest(load):
    tokenizer = load()
    assert [TOKENS[i] for i in tokenizer.encode("hello hello!\x00")] == ["hello", "Ġhello", "!", "Ā"]


def test_every_unicode_character_comes_back(load):
    tokenizer = load()
    points = [*range(0x500), *range(0x500, 0x110000, 97), 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
    text = "".join(chr(point) for point in points if not 0xD800 <= point <= 0xDFFF)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n \r\n\t", "  hello  ", "a\u0301", "\N{FAMILY}\u200d\N{GIRL}", "\x00\x7f"]
)
def test_awkward_texts_come_back(load, text):
    tokenizer = load(pre="default")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_qwen_families_compose_characters_first(load):
    assert load(pre="qwen35").decode(load(pre="qwen35").encode("e\u0301")) == "\u00e9"
    assert load(pre="gpt-2").decode(load(pre="gpt-2").encode("e\u0301")) == "e\u0301"


def test_control_tokens_are_text_unless_asked_for(load):
    tokenizer = load()
    assert IM_START not in tokenizer.encode("<|im_start|>hello")
    assert tokenizer.encode("<|im_start|>hello", special=True) == [IM_START, TOKENS.index("hello")]
    assert tokenizer.decode(tokenizer.encode("<|im_start|>hello")) == "<|im_start|>hello"


def test_user_defined_tokens_are_always_one_id(load):
    assert load().encode("<think>") == load().encode("<think>", special=True) == [THINK]


def test_start_token_comes_once_and_only_where_the_model_asks(load):
    asking = load(add_bos_token=True, bos_token_id=IM_START)
    hello = TOKENS.index("hello")
    assert asking.encode("hello") == [hello]
    assert asking.encode("hello", bos=True) == [IM_START, hello]
    assert asking.encode("<|im_start|>hello", special=True, bos=True) == [IM_START, hello]
    assert load(bos_token_id=IM_START).encode("hello", bos=True) == [hello]
    assert load(pre="llama-bpe", bos_token_id=IM_START).encode("hello", bos=True) == [IM_START, hello]


def test_end_ids_are_those_of_the_file_and_those_of_known_name(load):
    assert load(eos_token_id=3, eot_token_id=4).end_ids == {3, 4, IM_END}


def test_a_lone_surrogate_is_refused(load):
    with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
        load().encode("ab\ud800")


def test_a_text_that_the_vocabulary_cannot_spell_is_refused(load):
    tokens = [token for token in TOKENS if token != "!"]
    tokenizer = load(tokens=tokens, types=TYPES[1:], eos_token_id=0)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    with pytest.raises(TokenizerError, match="no token for the byte 0x21"):
        tokenizer.encode("hello!")


@pytest.mark.parametrize("token_id", [-1, len(TOKENS), 1 << 40])
def test_ids_outside_the_vocabulary_are_refused(load, token_id):
    with pytest.raises(TokenizerError, match=f"{token_id} is outside the vocabulary of {len(TOKENS)}"):
        load().decode([token_id])


# --- Streams ---


def test_a_stream_gives_whole_characters(load):
    tokenizer = load()
    text = "aß漢🎉é"
    decoder = tokenizer.stream()
    steps = [decoder.push(token_id) for token_id in tokenizer.encode(text)]
    assert steps == ["a", "", "ß", "", "", "漢", "", "", "", "🎉", "", "é"]
    assert decoder.flush() == ""


def test_an_unfinished_character_is_shown_at_the_end(load):
    tokenizer = load()
    decoder = tokenizer.stream()
    assert [decoder.push(token_id) for token_id in tokenizer.encode("漢")[:2]] == ["", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_a_control_token_ends_a_character_and_shows_on_request(load):
    tokenizer = load()
    decoder = tokenizer.stream()
    decoder.push(tokenizer.encode("ß")[0])
    assert decoder.push(IM_END) == "\ufffd"
    assert decoder.push(IM_END, special=True) == "<|im_end|>"
    assert decoder.push(THINK) == "<think>"


def test_bytes_that_are_no_text_do_not_stop_a_stream(load):
    tokenizer = load()
    assert tokenizer.decode([0xFF, ord("a"), 0x80, ord("b")]) == "\ufffda\ufffdb"


# --- Pre-tokenizers ---


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "Don't  stop 123!\n\nx", ["Don", "'t", " ", " stop", " 123", "!", "\n", "\n", "x"]),
        ("smollm", "year 2024's  ", ["year", " ", "2", "0", "2", "4", "'s", "  "]),
        ("llama-bpe", "12345 DON'T;\n\n  x", ["123", "45", " DON", "'T", ";\n\n", " ", " x"]),
        ("qwen2", "123 a.b\r\n", ["1", "2", "3", " a", ".b", "\r\n"]),
        ("qwen2", "नमस्ते", ["नमस", "्त", "े"]),
        ("qwen35", "नमस्ते 12", ["नमस्ते", " ", "1", "2"]),
        ("default", "a++ 12345", ["a", "++", " ", "123", "45"]),
    ],
)
def test_words_are_cut_as_the_model_was_trained(load, pre, text, expected):
    assert words(load(pre=pre), text) == expected


# --- Files that cannot be used ---


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"model": "llama"}, "type 'llama' is not supported"),
        ({"model": "none"}, "no tokenizer in this file; token ids work without one"),
        ({"pre": "klingon"}, "pre-tokenizer 'klingon' is not supported"),
        ({"merges": []}, "words, but no merges"),
        ({"merges": ["h e", "he zz"]}, "merges do not fit"),
        ({"merges": ["h e", "loner"]}, "merges do not fit"),
        ({"types": TYPES[1:]}, "tokens, but 264 token types"),
        ({"eos_token_id": 70000}, "eos_token_id is 70000, outside"),
    ],
)
def test_metadata_that_cannot_be_used_is_named(load, metadata, message):
    with pytest.raises(TokenizerError, match=message) as caught:
        load(**metadata)
    assert "model.gguf" in str(caught.value)


GOOD = {"ggml.tokens": TOKENS, "ggml.token_type": TYPES, "ggml.merges": MERGES, "ggml.eos_token_id": IM_END}

FULL = GOOD | {"ggml.pre": "gpt-2", "chat_template": CHATML}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ggml.tokens", [*TOKENS[:-1], 5], "tokenizer.ggml.tokens is not a list of type str"),
        ("ggml.tokens", "abc", "tokenizer.ggml.tokens is not a list of type str"),
        ("ggml.merges", [1], "tokenizer.ggml.merges is not a list of type str"),
        ("ggml.token_type", [True] * len(TOKENS), "tokenizer.ggml.token_type is not a list of type int"),
        ("ggml.pre", 1, "tokenizer.ggml.pre is not of type str"),
        ("ggml.eot_token_id", "2", "tokenizer.ggml.eot_token_id is not of type int"),
        ("ggml.add_bos_token", 1, "tokenizer.ggml.add_bos_token is not of type bool"),
        ("chat_template", ["a"], "tokenizer.chat_template is not of type str"),
    ],
)
def test_metadata_of_another_type_is_named(key, value, message):
    assert Tokenizer(GOOD).n_vocab == len(TOKENS)
    with pytest.raises(TokenizerError, match=re.escape(message)):
        Tokenizer(GOOD | {key: value})


def test_metadata_that_is_not_utf8_is_refused(tmp_path):
    path = write_model(tmp_path / "model.gguf")
    whole = pathlib.Path(path).read_bytes()
    pathlib.Path(path).write_bytes(whole.replace(b"<think>", b"<th\xff\xffk>"))
    with pytest.raises(TokenizerError, match=r"model\.gguf: the tokenizer's metadata is not UTF-8"):
        Tokenizer.load(path)


def test_bytes_alone_need_no_merges(load):
    tokenizer = load(tokens=ALPHABET, types=[1] * 256, merges=[], eos_token_id=0)
    assert tokenizer.encode("hé") == [0x68, 0xC3, 0xA9]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"absent\.gguf: No such file"):
        Tokenizer.load(str(tmp_path / "absent.gguf"))


# --- What a file leaves open ---


@pytest.mark.parametrize(
    ("absent", "extra", "words"),
    [
        (["ggml.pre"], {}, ["no tokenizer.ggml.pre", "'default'"]),
        (["ggml.token_type"], {}, ["no tokenizer.ggml.token_type", "control tokens: '<|im_start|>', '<|im_end|>'"]),
        (["ggml.eos_token_id"], {}, ["names no token that ends an answer: it ends at '<|im_end|>'"]),
        (["chat_template"], {}, ["no chat template"]),
        ([], {"ggml.pre": "llama-bpe", "ggml.bos_token_id": 3}, ["no tokenizer.ggml.add_bos_token"]),
        ([], {"ggml.add_bos_token": True}, ["asks for a start token and names none"]),
        ([], {"chat_template.tool_use": "x"}, ["further chat templates, which are not used: tool_use"]),
        ([], {"ggml.add_eos_token": True}, ["asks for an end token"]),
        ([], {}, []),
    ],
)
def test_what_a_file_leaves_open_is_told(absent, extra, words):
    metadata = {key: value for key, value in (FULL | extra).items() if key not in absent}
    guesses = Tokenizer(metadata).guesses
    assert len(guesses) == len(words[:1]) + (absent == ["ggml.token_type"])
    assert all(word in "\n".join(guesses) for word in words)


def test_a_file_that_names_no_end_of_answers_says_so():
    tokens = [token.replace("<|im_end|>", "<|x|>") for token in TOKENS]
    metadata = {key: value for key, value in FULL.items() if key != "ggml.eos_token_id"}
    guesses = Tokenizer(metadata | {"ggml.tokens": tokens}).guesses
    assert guesses == ["the model file names no token that ends an answer: answers end at their limit only"]


def test_marks_that_a_file_has_as_words_are_marks():
    tokenizer = Tokenizer({key: value for key, value in FULL.items() if key != "ggml.token_type"})
    assert tokenizer.encode_chat(USER)[0] == IM_START
    assert IM_END not in tokenizer.encode("<|im_end|>")


# --- Chat templates ---

USER = [{"role": "user", "content": "hello"}]


def test_messages_become_marks_and_text(load):
    tokenizer = load()
    assert tokenizer.render_chat(USER) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode_chat(USER)
    assert ids[0] == IM_START
    assert ids.count(IM_START) == 2
    assert ids.count(IM_END) == 1
    assert tokenizer.render_chat(USER, add_generation_prompt=False).endswith("<|im_end|>\n")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ tools | tojson }}", '[{"a": "<é>"}]'),
        ("{{ eos_token }}{{ bos_token }}", "<|im_end|>"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", "abuserc"),
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ thinking }}{{ absent }}", "no"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_templates_find_what_they_are_written_against(load, template, expected):
    tokenizer = load(template=template)
    assert tokenizer.render_chat(USER, tools=[{"a": "<é>"}], thinking="no") == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused these messages: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "refused these messages"),
        ("{{ messages[0].absent.deeper }}", "refused these messages"),
        ("{{ 1 + messages[0].role }}", "refused these messages"),
        ("{% for %}", "cannot be compiled"),
        (None, "no chat template"),
    ],
)
def test_a_failing_template_says_so(load, template, message):
    with pytest.raises(TokenizerError, match=message):
        load(template=template).render_chat(USER)


# --- A real vocabulary ---


@pytest.fixture(scope="module")
def smollm2(real_model):
    return Tokenizer.load(real_model)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("\n", [198]),
    ],
)
def test_known_ids_of_a_real_vocabulary(smollm2, text, ids):
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids) == text


def test_chat_of_a_real_model_has_single_marks(smollm2):
    ids = smollm2.encode_chat([{"role": "user", "content": "hi"}])
    assert (smollm2.end_ids, smollm2.add_bos, smollm2.n_vocab) == ({0, 2}, False, 49152)
    assert [token_id for token_id in ids if smollm2.is_control(token_id)] == [1, 2, 1, 2, 1]
    assert smollm2.decode(ids, special=False).endswith("user\nhi\nassistant\n")


def test_scripts_of_the_world_come_back_from_a_real_vocabulary(smollm2):
    text = "Ελληνικά Русский עברית العربية हिन्दी ไทย 中文 日本語 한국어 🏳️‍🌈👩🏽‍🚀 ∮ ⟦x⟧ a\u0301\u200b\ufeff\t\x00"
    ids = smollm2.encode(text)
    decoder = smollm2.stream()
    assert "".join(decoder.push(token_id) for token_id in ids) + decoder.flush() == text
