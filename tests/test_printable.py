"""Text of others on one line."""

import unicodedata

import pytest

from printable import LEFT_OUT, MAX_CHARACTERS, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, Grüße 🙂", "plain text, Grüße 🙂"),
        ("two\nlines\r\n", "two lines"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b1m", "\\x9b1m"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("a\u2028b\u00a0c", "a b c"),
        ("\ud800\x00", "\\ud800\\x00"),
        ("", ""),
    ],
)
def test_what_others_say_is_shown_on_one_line(text, shown):
    assert one_line(text) == shown


def batched(text: str) -> list[str]:
    return [text[start : start + MAX_CHARACTERS] for start in range(0, len(text), MAX_CHARACTERS)]


def test_a_text_that_nobody_would_read_to_its_end_is_cut():
    assert one_line("\x01" * 60_000_000) == "\\x01" * MAX_CHARACTERS + LEFT_OUT
    assert one_line("a" * MAX_CHARACTERS) == "a" * MAX_CHARACTERS


def test_no_control_character_comes_through():
    every = "".join(map(chr, range(0x11000)))
    kinds = {unicodedata.category(char) for cut in batched(every) for char in one_line(cut)}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
