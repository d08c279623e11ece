"""Text of other people, made fit for one line of a terminal, a log or an error.

Owns which characters may be shown; knows nothing of where they go. Invariant: what comes out moves no cursor, sets no
colour, turns no reading direction, and is one line.

Read next: ``childproc.py`` and ``httpfront.py``, which show what models, files and processes say.
"""


def one_line(text: str) -> str:
    """The text on one line: breaks and odd blanks become blanks, other characters that do not print are spelled out."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else " " if char.isspace() else ascii(char)[1:-1] for char in text
    ).rstrip()
