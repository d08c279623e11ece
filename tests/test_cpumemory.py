"""Copies past the cache: every byte arrives, no other one changes, wherever the two arrays begin and end."""

import numpy as np
import pytest

import cpumemory

SIZES = (0, 1, 63, 64, 65, 4095, cpumemory.LEAST_STREAMED - 1, cpumemory.LEAST_STREAMED, cpumemory.LEAST_STREAMED + 63)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", [cpumemory.copy, cpumemory._copy])
def test_every_byte_arrives_and_no_other_one_changes(kernel, size):
    source = np.random.default_rng(size).integers(0, 256, size + 200, dtype=np.uint8)
    for at, start in ((0, 0), (1, 0), (0, 1), (63, 17), (64, 64), (100, 129)):
        room = np.full(size + 200, 0xEE, np.uint8)
        data = source[start : start + size]
        kernel(room[at : at + size], data)
        assert np.array_equal(room[at : at + size], data)
        assert (room[:at] == 0xEE).all()
        assert (room[at + size :] == 0xEE).all()


def test_a_copy_of_another_size_is_a_mistake():
    with pytest.raises(AssertionError, match="size"):
        cpumemory.copy(np.zeros(5, np.uint8), np.zeros(6, np.uint8))
