"""Text of other people, made fit for one line of a terminal, a log or an error.

Owns which characters may be shown, and how many; knows nothing of where they go. Invariant: what comes out moves no
cursor, sets no colour, turns no reading direction, and is one line of a bounded length.

Read next: ``httpchild.py`` and ``httpfront.py``, which show what models, files and processes say.
"""

import time

# An exception of a model's template may have megabytes of text; nobody reads more of it than this.
MAX_CHARACTERS = 2000
LEFT_OUT = " [...]"


def one_line(text: str) -> str:
    """The text on one line: breaks and odd blanks become blanks, other characters that do not print are spelled out.

    What is longer than anyone would read is cut.
    """
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS] + LEFT_OUT
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else " " if char.isspace() else ascii(char)[1:-1] for char in text
    ).rstrip()


def local_time(seconds: float) -> str:
    """Seconds since 1970 as a date and a time of day, where this machine is."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
