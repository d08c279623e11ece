"""Hashes that other implementations gave, and the data that they are of."""

import json

import numpy as np

from given_images import DATA, pattern

HASHES = json.loads((DATA / "hash_vectors.json").read_text())


def mixed(n: int, add: int) -> np.ndarray:
    k = np.arange(n, dtype=np.uint64)
    factors = (np.uint64(value) for value in (131, 17, 29))
    shifts = (np.uint64(value) for value in (0, 8, 16))
    total = sum((k >> shift) * factor for shift, factor in zip(shifts, factors, strict=True)) + np.uint64(add)
    return total.astype(np.uint8)


def data_of(description: dict) -> np.ndarray:
    match description:
        case {"affine": {"n": n, "mul": mul, "add": add}}:
            return pattern(n, mul, add)
        case {"mix": {"n": n, "add": add}}:
            return mixed(n, add)
        case {"const": {"n": n, "value": value}}:
            return np.full(n, value, np.uint8)
        case {"ascii": text}:
            return np.frombuffer(text.encode(), np.uint8)
        case {"hex": text}:
            return np.frombuffer(bytes.fromhex(text), np.uint8)
    raise ValueError(description)
