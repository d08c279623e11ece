"""Control vectors: directions that are added to the residual after each layer.

It owns reading them from a GGUF and their digest; it knows no model but the two sizes that it checks. Invariant: a
table that was loaded fits the model, so adding a row cannot fail. Read next: model.py, which adds them.
"""

import numpy as np
from gguf.quants import dequantize

from checksum import hash64
from modelfile import GgufError, open_gguf

PREFIX = "direction."


class ControlVectorError(Exception):
    """A control vector that cannot be used; one line that names the file."""


def split_scale(text: str) -> tuple[str, float]:
    """`FILE[:SCALE]` into path and scale; a last part that is no number belongs to the path."""
    path, colon, scale = text.rpartition(":")
    try:
        return (path, float(scale)) if colon and path else (text, 1.0)
    except ValueError:
        return text, 1.0


def load(text: str, n_layers: int, n_embd: int) -> tuple[np.ndarray, int]:
    """Table float32 [n_layers, n_embd], scaled, zero where the file has no direction; and its digest, never 0."""
    path, scale = split_scale(text)
    if not np.isfinite(scale):
        raise ControlVectorError(f"{path}: a scale of {scale} cannot be used")
    try:
        reader = open_gguf(path)
    except GgufError as error:
        raise ControlVectorError(str(error)) from error
    table, found = np.zeros((n_layers, n_embd), np.float32), 0
    for tensor in reader.tensors:
        layer = tensor.name.removeprefix(PREFIX)
        if not tensor.name.startswith(PREFIX) or not layer.isdecimal():
            continue
        if int(layer) >= n_layers or int(np.prod(tensor.shape)) != n_embd:
            shape = [int(n) for n in tensor.shape]
            raise ControlVectorError(f"{path}: {tensor.name} {shape} fits no model of {n_layers} layers x {n_embd}")
        with np.errstate(over="ignore", invalid="ignore"):
            table[int(layer)] = dequantize(tensor.data, tensor.tensor_type).reshape(-1) * np.float32(scale)
        found += 1
    if not found:
        raise ControlVectorError(f"{path}: no control vector: it has no tensor {PREFIX}<layer>")
    if not np.isfinite(table).all():
        raise ControlVectorError(f"{path}: a direction times {scale} is beyond the range of float32, or no number")
    return table, hash64(table.view(np.uint8).reshape(-1)) or 1
