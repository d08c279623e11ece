"""The plain form of the hash against vectors of other implementations, and against the kernels."""

import numpy as np

import checksum
import plainhash
from given_hashes import HASHES, data_of
from given_images import number

LONGEST = 5000  # what plain Python hashes in no time


def test_hash_vectors():
    vectors = [vector for vector in HASHES["vectors"] if data_of(vector["input"]).size <= LONGEST]
    assert len(vectors) > 100
    for vector in vectors:
        data = data_of(vector["input"]).tobytes()
        assert plainhash.hash64(data, number(vector["seed"])) == number(vector["hash"]), vector


def test_it_is_the_hash_of_the_kernels():
    data = np.random.default_rng(0).integers(0, 256, 300, np.uint8).tobytes()
    for size in range(len(data)):
        for seed in (0, 1, 2**64 - 1):
            assert plainhash.hash64(data[:size], seed) == checksum.hash64(data[:size], seed)
