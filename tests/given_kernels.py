"""Random inputs of kernels, and what they may err."""

import numpy as np

import backend

CPU = backend.load("cpu", 1, print)

ROUNDING = 2.0**-24  # relative error of one float32 operation


def rng_for(*key) -> np.random.Generator:
    return np.random.default_rng([sum(str(part).encode()) for part in key])


def normal(rng, *shape) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)
