"""Text of others on one line."""

import unicodedata

import pytest

from printable import one_line


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


def test_no_control_character_comes_through():
    every = "".join(map(chr, range(0x11000)))
    kinds = {unicodedata.category(char) for char in one_line(every)}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
