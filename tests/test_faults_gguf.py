"""Every number of a model file's header and of its tensors' entries, set to what hurts: one line, or a model that runs.

The random damage and the hostile metadata are in test_modelweights.py; here each field is met, one by one.
"""

import struct
from typing import NamedTuple

import numpy as np
import pytest

import modelconfig
import modelweights
from given_faults import count
from given_weights import fixture, loaded_or_refused, run
from modelfile import _Reader, open_gguf

pytestmark = pytest.mark.faults

HOSTILE = {
    4: (0, 1, 2, 3, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF),
    8: (0, 1, 2, 3, 64, 1 << 20, 0x7FFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1),
}


class Number(NamedTuple):
    """Where a number of the file lies, and how many bytes it has."""

    name: str
    offset: int
    size: int


HEADER = (Number("magic", 0, 4), Number("version", 4, 4), Number("tensor count", 8, 8), Number("key count", 16, 8))


def entries(data: bytes, names: list[str]) -> list[Number]:
    """The numbers of the entries of some tensors: length of the name, dimensions, type, offset."""
    numbers = []
    for name in names:
        at = data.index(struct.pack("<Q", len(name)) + name.encode())
        after = at + 8 + len(name)
        (n_dims,) = struct.unpack_from("<I", data, after)
        numbers += [Number(f"{name}: length", at, 8), Number(f"{name}: dimensions", after, 4)]
        numbers += [Number(f"{name}: dimension {i}", after + 4 + 8 * i, 8) for i in range(n_dims)]
        numbers += [Number(f"{name}: type", after + 4 + 8 * n_dims, 4)]
        numbers += [Number(f"{name}: offset", after + 8 + 8 * n_dims, 8)]
    return numbers


def keys(data: bytes, names: list[str]) -> list[Number]:
    """The numbers around some keys: length of the name, type, and the start of the value."""
    numbers = []
    for name in names:
        at = data.index(struct.pack("<Q", len(name)) + name.encode())
        after = at + 8 + len(name)
        numbers += [Number(f"{name}: length", at, 8), Number(f"{name}: type", after, 4)]
        numbers += [Number(f"{name}: value", after + 4, 8), Number(f"{name}: second word", after + 8, 8)]
    return numbers


def outcomes(path, data: bytes, numbers: list[Number]) -> set[bool]:
    """Set each number to each hostile value; returns whether files were refused, loaded, or both."""
    found = set()
    for number in numbers:
        for value in HOSTILE[number.size]:
            count("a hostile or damaged model file")
            broken = bytearray(data)
            broken[number.offset : number.offset + number.size] = value.to_bytes(number.size, "little")
            path.write_bytes(broken)
            loaded = loaded_or_refused(path)
            if not isinstance(loaded, str):
                run(loaded, range(5, 9))
            found.add(isinstance(loaded, str))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen4exp"])
def test_every_number_of_header_entries_and_keys(name, tmp_path, bounded_memory):
    data, reader = fixture(name).read_bytes(), open_gguf(fixture(name))
    tensors = [tensor.name for tensor in reader.tensors]
    fields = [key for key in reader.fields if not key.startswith("GGUF.")]
    chosen = [*tensors[:2], tensors[len(tensors) // 2], tensors[-1]]
    numbers = [*HEADER, *entries(data, chosen), *keys(data, [*fields[:3], *fields[-3:]])]
    assert outcomes(tmp_path / "broken.gguf", data, numbers) == {True, False}


def test_tensors_that_share_their_bytes_or_have_none(tmp_path, bounded_memory):
    """Every entry at one offset, entries that point at each other's bytes in a ring, and one behind the end."""
    data, reader = bytearray(fixture("llama").read_bytes()), open_gguf(fixture("llama"))
    tensors = list(reader.tensors)
    places = [numbers[-1].offset for numbers in (entries(bytes(data), [tensor.name]) for tensor in tensors)]
    offsets = [struct.unpack_from("<Q", data, place)[0] for place in places]
    for moved in ([0] * len(offsets), offsets[1:] + offsets[:1], [len(data)] * len(offsets)):
        count("a hostile or damaged model file", len(offsets))
        broken = bytearray(data)
        for place, offset in zip(places, moved, strict=True):
            struct.pack_into("<Q", broken, place, offset)
        (tmp_path / "a.gguf").write_bytes(broken)
        loaded = loaded_or_refused(tmp_path / "a.gguf")
        if not isinstance(loaded, str):
            assert run(loaded, range(5, 9)).dtype == np.float32


def test_a_loader_that_lets_the_library_speak_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(modelweights, "open_gguf", _Reader)
    data = fixture("llama").read_bytes()
    with pytest.raises(Exception, match=r"magic|version|truncated|reshape|size|GGUF") as caught:
        outcomes(tmp_path / "broken.gguf", data, list(HEADER))
    assert not isinstance(caught.value, modelconfig.ModelError)
