"""GGUF files opened through the gguf library: one clear error family, and no wait where a vocabulary is large.

It owns the opening of a model file, where the embedded one lies, and which tokens end an answer or start a turn; it
knows no tensor name and no text. Invariant: what it returns is the library's own `GGUFReader`, with the same
`contents()` of every field. Read next: modelconfig.py and modelweights.py for the model, tokenizer.py for text.
"""

import importlib.metadata
import os
import pathlib
import stat
import sys

import numpy as np
from gguf import GGUFReader
from gguf.constants import GGUFValueType

EMBEDDED_MODEL = "strata-demo.gguf"
STRING_LENGTH_BYTES = 8

# A file names one or two of the tokens that end an answer; models of these families emit others as well.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_NAMES = frozenset(
    "<|endoftext|> <|end_of_text|> <|im_end|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|>"  # noqa: SIM905
    " <end_of_turn> <end_of_utterance> <EOT>".split()
)
# The token that a chat template writes first in every turn.
TURN_STARTS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>")


class GgufError(Exception):
    """A file that is no readable GGUF file; one line that names the file and the reason."""


def embedded_model() -> str:
    """The path of the model that comes with the package: beside the sources, or where an installer put it."""
    beside = pathlib.Path(__file__).resolve().parent / "models" / EMBEDDED_MODEL
    if beside.exists():
        return str(beside)
    try:
        installed = importlib.metadata.files("strata-engine") or []
    except importlib.metadata.PackageNotFoundError:
        installed = []
    for file in installed:
        if file.name == EMBEDDED_MODEL:
            return str(pathlib.Path(file.locate()).resolve())
    raise GgufError("no model comes with this installation: name a GGUF file with --model")


def open_gguf(path: str | os.PathLike[str]) -> GGUFReader:
    """The metadata and the mapped tensors of a GGUF file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise GgufError(f"{path}: not a regular file")
        # The library adds up 64-bit lengths that a broken file may hold; a wrapped sum would only be a warning.
        with np.errstate(over="raise"):
            return _Reader(path)
    except OSError as error:
        raise GgufError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, ArithmeticError) as error:
        # The library has no error of its own: a file that is cut or none of its kind fails in its unpacking.
        raise GgufError(f"{path}: not a whole GGUF file: {error}") from error


def tokenizer_metadata(fields) -> dict[str, object]:
    """What a file says of its tokenizer; keys without their `tokenizer.` prefix."""
    return _below("tokenizer.", fields)


def sampling_metadata(fields) -> dict[str, object]:
    """How a file wants its model to be sampled; keys without their `general.sampling.` prefix."""
    return _below("general.sampling.", fields)


def _below(prefix: str, fields) -> dict[str, object]:
    return {key.removeprefix(prefix): field.contents() for key, field in fields.items() if key.startswith(prefix)}


def end_token_ids(metadata: dict[str, object]) -> frozenset[int]:
    """The tokens that end an answer; ids outside the vocabulary are left out."""
    tokens = metadata.get("ggml.tokens") or []
    named = {token_id for token_id, token in enumerate(tokens) if token in END_NAMES}
    keyed = {metadata.get(f"ggml.{key}") for key in END_KEYS}
    return frozenset(named | {i for i in keyed if isinstance(i, int) and 0 <= i < len(tokens)})


def turn_start_id(metadata: dict[str, object]) -> int | None:
    """The token that starts a turn, where the file has one of those known."""
    tokens = metadata.get("ggml.tokens") or []
    return next((tokens.index(name) for name in TURN_STARTS if name in tokens), None)


class _Reader(GGUFReader):
    """The library's reader with arrays unpacked in bulk: its way makes two NumPy views an element, 3 s for 98,000."""

    def _get_field_parts(self, orig_offs: int, raw_type: int):
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        count, start = int(head[1][0]), orig_offs + 12
        if item == GGUFValueType.STRING:
            strings, end = self._strings(start, count)
            return end - orig_offs, head + strings, list(range(2, 2 + count)), [GGUFValueType.ARRAY, item]
        if item not in self.gguf_scalar_to_np:
            raise ValueError(f"an array of type {item.name}")
        width = np.dtype(self.gguf_scalar_to_np[item]).itemsize
        if count * width > len(self.data) - start:
            raise ValueError(f"an array of {count} elements at offset {orig_offs} goes beyond the end of the file")
        values = self._get(start, self.gguf_scalar_to_np[item], count)
        return 12 + values.nbytes, [*head, values], [2], [GGUFValueType.ARRAY, item]

    def _strings(self, start: int, count: int) -> tuple[list[memoryview], int]:
        """The strings of an array and the offset behind it."""
        raw, offset, strings = memoryview(self.data), start, []
        if count > (len(raw) - start) // STRING_LENGTH_BYTES:
            raise ValueError(f"an array of {count} strings at offset {start} goes beyond the end of the file")
        swapped = {"little": "big", "big": "little"}[sys.byteorder]
        order = sys.byteorder if self.byte_order == "I" else swapped
        for _ in range(count):
            begin = offset + STRING_LENGTH_BYTES
            offset = begin + int.from_bytes(raw[offset:begin], order)
            if offset > len(raw):
                raise ValueError(f"a string at offset {begin} goes beyond the end of the file")
            strings.append(raw[begin:offset])
        return strings, offset
