"""Ids that were read or written stand for their text when it comes again."""

import datetime
import random
from array import array

import pytest

import httpchat
from httpknown import MAX_TEXTS, KnownTexts, common_start, spell, unspell, why_read_again
from httptextworker import WorkerTokenizer
from modelfile import embedded_model
from tokenizer import Tokenizer
from verbs import Source

# A vocabulary of pieces of bytes, some of them parts of characters; ids from 1000 on are marks.
PIECES = [bytes([byte]) for byte in range(256)]
PIECES += [text.encode() for text in ("he", "hell", "hello", " hello", "lo ", "é", "漢", "world", " wor", "ld", ".\n")]
PIECES += ["é".encode()[1:] + b"x", "漢".encode()[:2], "🙂".encode()[1:3]]
MARK = 1000
WORDS = ["hello", " world", "é", "漢字", "🙂", ".\n", "x", " ", "e\u0301", "\ufffd"]


def bytes_of(token_id: int) -> bytes | None:
    return None if token_id >= MARK else PIECES[token_id]


def canonical(text: str) -> list[int]:
    """The longest piece first, as the one way of this tokenizer."""
    raw, ids = text.encode(), []
    longest_first = sorted(range(len(PIECES)), key=lambda i: -len(PIECES[i]))
    while raw:
        ids.append(next(i for i in longest_first if raw.startswith(PIECES[i])))
        raw = raw[len(PIECES[ids[-1]]) :]
    return ids


def any_way(chosen: random.Random, text: str) -> list[int]:
    """Ids that stand for a text, in one of many ways."""
    raw, ids = text.encode(), []
    while raw:
        ids.append(chosen.choice([i for i in range(len(PIECES)) if raw.startswith(PIECES[i])]))
        raw = raw[len(PIECES[ids[-1]]) :]
    return ids


def may_cut(left: str, right: str) -> bool:
    return canonical(left) + canonical(right) == canonical(left + right)


def text_of(ids) -> str:
    """The spelled text of ids."""
    spelled, raw = [], b""
    for token_id in [*ids, None]:
        if token_id is None or token_id >= MARK:
            spelled += [raw.decode(errors="replace"), token_id]
            raw = b""
        else:
            raw += PIECES[token_id]
    return spell(piece for piece in spelled if piece is not None)


def make(*conversations, whole=True) -> KnownTexts:
    known = KnownTexts(bytes_of, may_cut)
    for ids in conversations:
        known.learn(ids, whole=whole)
    return known


def matched(known: KnownTexts, text: str) -> tuple[list[int], str]:
    """The ids for the start of a text, and the rest of it."""
    ids, length = known.match(text)
    return ids.tolist(), text[length:]


@pytest.mark.parametrize("seed", range(60))
def test_the_ids_given_stand_for_the_text_asked_for(seed):
    chosen = random.Random(seed)
    known, texts = make(), []
    for _ in range(6):
        pieces = []
        for _ in range(chosen.randint(1, 6)):
            pieces += ["".join(chosen.choices(WORDS, k=chosen.randint(0, 5))), MARK + chosen.randint(0, 2)]
        pieces = pieces[: chosen.randint(1, len(pieces))]
        ids = [i for piece in pieces for i in ([piece] if isinstance(piece, int) else any_way(chosen, piece))]
        ids = ids[: chosen.randint(len(ids) // 2, len(ids))]
        if texts and chosen.random() < 0.5:
            ids = texts[-1][: chosen.randint(0, len(texts[-1]))] + ids
        texts.append(ids)
        known.learn(ids)
        for held in texts:
            asked = text_of(held) + chosen.choice(["", "x", "hello", spell([MARK]), "\u0301"])
            asked = asked if chosen.random() < 0.5 else asked[: chosen.randint(0, len(asked))]
            ids, rest = matched(known, asked)
            if rest[:1] and not "\ud800" <= rest[0] <= "\udfff":
                # Nothing of a character is left open, or what follows would make another one of it.
                assert text_of([*ids, *canonical("a")]) == text_of(ids) + "a"
            assert text_of(ids) + rest == asked


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_in_other_ids_is_known_whole_when_it_comes_back(seed):
    chosen = random.Random(seed)
    words = "".join(chosen.choices(WORDS, k=20))
    ids = [MARK, *canonical("user\nhi"), MARK + 1, MARK, *canonical("assistant\n"), *any_way(chosen, words), MARK + 1]
    known = make(ids)
    assert matched(known, text_of(ids) + "more") == (ids, "more")
    assert matched(known, text_of(ids)) == (ids, "")
    cut = make(ids[:-3])
    assert matched(cut, text_of(ids[:-3]) + spell([MARK + 1])) == (ids[:-3], spell([MARK + 1]))


def test_words_that_look_like_a_mark_are_none():
    known = make([MARK, *canonical("a"), MARK + 1])
    assert matched(known, spell([MARK]) + "a" + spell([MARK + 1])) == ([MARK, ord("a"), MARK + 1], "")
    assert matched(known, "<|mark|>a") == ([], "<|mark|>a")
    assert unspell(spell([MARK, "a", MARK + 1, MARK + 2, "b"])) == [MARK, "a", MARK + 1, MARK + 2, "b"]
    assert unspell(spell([2**30 - 1, 0])) == [2**30 - 1, 0]


def test_blanks_that_a_template_trims_lose_only_their_own_token():
    one_by_one = [*canonical("assistant\n"), *b"hello", *b"\n\n", MARK]
    asked = "assistant\nhello" + spell([MARK])
    assert matched(make(one_by_one), asked) == ([*canonical("assistant\n"), *b"hello"], spell([MARK]))
    joined = [MARK, *canonical("x"), PIECES.index(b".\n"), MARK]
    assert matched(make(joined), spell([MARK]) + "x." + spell([MARK])) == ([MARK, ord("x")], "." + spell([MARK]))


def test_what_was_edited_is_encoded_as_always_from_a_place_where_words_part():
    held = [MARK, *b"hello", *b" world", *b" he", MARK]
    ids, rest = matched(make(held), spell([MARK]) + "hello wor!")
    # Behind "hello" the words part; "wor!" would be joined otherwise.
    assert text_of(ids) + rest == spell([MARK]) + "hello wor!"
    assert may_cut(text_of(ids)[3:], rest)
    assert len(ids) > 1


def test_a_raw_prompt_that_grows_within_a_word_is_not_cut_there():
    known = make(canonical("hell"), whole=False)
    assert matched(known, "hello") == ([], "hello")
    assert matched(make(canonical("hell"), whole=True), "hello") == (canonical("hell"), "o")


def test_a_character_cut_off_by_a_mark_may_come_back_whole_elsewhere():
    half = [MARK, "é".encode()[0]]
    known = make([*half, MARK + 1])
    known.learn([*half, "é".encode()[1], MARK + 2])
    assert matched(known, spell([MARK]) + "é" + spell([MARK + 2]))[0] == [*half, "é".encode()[1], MARK + 2]
    assert matched(known, spell([MARK]) + "\ufffd" + spell([MARK + 1]))[0] == [*half, MARK + 1]
    assert matched(known, spell([MARK]) + "\ufffdx") == ([MARK], "\ufffdx")


def test_of_two_ways_the_later_one_is_held():
    first, second = [MARK, *b"hello", MARK], [MARK, *canonical("hello"), MARK]
    assert matched(make(first, second), text_of(first))[0] == second
    assert matched(make(second, first), text_of(first))[0] == first


def test_the_latest_conversations_are_kept_and_one_in_use_stays():
    known = make(*([MARK, *canonical(f"talk {i}"), MARK] for i in range(MAX_TEXTS)))
    assert matched(known, spell([MARK]) + "talk 0" + spell([MARK]))[1] == ""
    known.learn([MARK, *canonical("another"), MARK])
    assert matched(known, spell([MARK]) + "talk 0" + spell([MARK]))[1] == ""
    assert matched(known, spell([MARK]) + "talk 1" + spell([MARK]))[1] != ""


def test_a_conversation_takes_the_place_of_its_own_start(monkeypatch):
    monkeypatch.setattr("httpknown.MAX_TOKENS", 300)
    known, ids = make(), [MARK]
    for turn in range(100):
        ids = [*ids, *canonical(f"turn {turn}")[:2]]
        known.learn(ids)
    assert len(known._texts) == 1
    known.learn([MARK + 1] * 250)
    assert [len(text.ids) for text in known._texts] == [250]


@pytest.mark.parametrize("seed", range(20))
def test_the_common_start_is_that_of_a_slow_search(seed):
    chosen = random.Random(seed)
    a = chosen.choices("ab", k=chosen.randint(0, 300))
    b = a[: chosen.randint(0, len(a))] + chosen.choices("ab", k=chosen.randint(0, 5))
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_start("".join(a), "".join(b)) == expected
    assert common_start(array("u", "".join(a)), array("u", "".join(b))) == expected


# --- The clock ---


def told(form: str, *days: int) -> list[str]:
    return [(datetime.datetime(2026, 1, 28) + datetime.timedelta(days, 3700 * days)).strftime(form) for days in days]


@pytest.mark.parametrize("form", ["%d %b %Y", "%A, %d %B %Y", "%Y-%m-%d", "%-d %B %Y", "%F %T", "%e. %B", "%I:%M %P"])
def test_the_time_that_a_conversation_was_told_is_found(form):
    then, now = told(form, 0, 5)
    known = make([MARK, *canonical(f"Today is {then}."), MARK, *canonical("hello"), MARK])
    asked = spell([MARK]) + f"Today is {now}." + spell([MARK]) + "hello"
    assert known.earlier_clock(asked, {form: now}) == {form: then}
    assert known.earlier_clock(asked.replace("Today", "Heute"), {form: now}) == {}
    assert known.earlier_clock(asked.replace(now, then), {form: then}) == {}


def test_of_several_conversations_the_one_that_goes_on_tells_the_time():
    days = told("%d %b %Y", 0, 1, 2)
    hours = ["10:15", "11:30", "12:45"]
    texts = [f"It is {hour} on {day}, said {i}. more" for i, (day, hour) in enumerate(zip(days, hours, strict=True))]
    known = make(*([MARK, *canonical(text)] for text in texts[:2]))
    for i in (0, 1):
        asked = spell([MARK]) + texts[2].replace("said 2", f"said {i}")
        clock = {"%d %b %Y": days[2], "%H:%M": hours[2]}
        assert known.earlier_clock(asked, clock) == {"%d %b %Y": days[i], "%H:%M": hours[i]}


def test_what_is_no_time_is_not_taken_for_one():
    known = make([MARK, *canonical("Today is Wednesday's."), MARK])
    asked = spell([MARK]) + "Today is 05 Jan 2026." + spell([MARK])
    assert known.earlier_clock(asked, {"%d %b %Y": "05 Jan 2026"}) == {}


# --- The line of the log ---


def line(source: Source, prompt: str, *known: str) -> str | None:
    return why_read_again(source, array("i", map(ord, prompt)), [array("i", map(ord, one)) for one in known], text_of)


def test_a_prompt_that_goes_on_with_what_is_held_needs_no_line():
    assert line(Source("live", 8, 8), "what is held and more", "what is h") is None
    assert line(Source("checkpoint", 8, 8), "what is held and more", "what is h") is None


def test_the_line_names_the_place_and_both_texts():
    said = line(Source("parked", 6, 8), "It is 5 May now.", "It is 5 Apr now. And more", "other")
    assert said == (
        '6 of 16 prompt tokens reused (parked); the prompt parts from what was held at token 8: "May now." in place of '
        '"Apr now."; what was held can be gone back to at token 6, and not between there and 8'
    )


def test_the_line_says_when_nothing_is_held():
    first = line(Source("none", 0, 0), "new")
    assert first == "0 of 3 prompt tokens reused (none); nothing that is held begins like it"
    lost = line(Source("none", 0, 0), "a talk goes on", "a talk")
    assert lost == "0 of 14 prompt tokens reused (none); nothing that is held goes on like it behind token 0"


# --- With real vocabularies ---


def other_ids(chosen: random.Random, tokenizer, text: str) -> list[int]:
    """Ids of a text that its tokenizer would not have chosen: cut at random places, each part as always."""
    raw, ids = text, []
    while raw:
        length = chosen.randint(1, 7)
        ids += tokenizer.encode(raw[:length])
        raw = raw[length:]
    return ids


@pytest.mark.parametrize("which", ["embedded", "smollm2"])
def test_turn_after_turn_goes_on_with_the_ids_that_were_sampled(request, which):
    path = embedded_model() if which == "embedded" else request.getfixturevalue("real_model")
    tokenizer = WorkerTokenizer(Tokenizer.load(path).metadata, lambda phase: None)
    plain, chosen = Tokenizer.load(path), random.Random(3)
    end = plain.encode("<|im_end|>", special=True)
    talk, held = [], []
    for turn, answer in enumerate(["Yes, 12 of them.", "<b>a < b</b>\n\nend", "Grüße, 漢字 🙂!", "x\n  y\n"]):
        talk.append({"role": "user", "content": f"Question {turn}: <i>and</i> ünd?"})
        ids = httpchat.read_chat({"messages": talk}, tokenizer, 10_000).ids
        assert ids[: len(held)] == held
        assert plain.decode(ids) == plain.render_chat(talk)
        assert ids[len(held) :] == plain.encode(plain.decode(ids[len(held) :]), special=True)
        talk.append({"role": "assistant", "content": answer})
        held = [*ids, *other_ids(chosen, plain, answer), *end]
        tokenizer.known.learn(held)
    assert held[: len(ids)] != plain.encode_chat(talk[:-1])
