"""The text side of a model file (its tokenizer and chat template), and which state of the file it was read from.

Owns the comparison of file states. Refuses to know the engine, which reads the same file in its own process.
Invariant: a ModelText was read from one state of the file, from its first byte to its last.

Read next: ``tokenizer.py``; ``httpfront.py``, which holds requests and engine to the same state.
"""

import os
from typing import NamedTuple

from tokenizer import Tokenizer, TokenizerError

READ_TRIES = 3

FileState = tuple[int, int, int, int]


class ModelText(NamedTuple):
    """A tokenizer, and the state of the file that it was read from."""

    tokenizer: Tokenizer
    file: FileState | None


def file_state(path: str) -> FileState | None:
    """What changes when a file is written or replaced; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_text(path: str) -> ModelText:
    """The tokenizer of a model file; raises TokenizerError. It blocks, so call it in a thread."""
    for _ in range(READ_TRIES):
        before = file_state(path)
        text = ModelText(Tokenizer.load(path), before)
        if file_state(path) == before:
            return text
    raise TokenizerError(f"{path}: it changes each time that it is read")
