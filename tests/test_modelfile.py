"""GGUF files: the same fields as the library's own reader, and a clear error for whatever else a path may hold."""

import importlib.metadata
import os

import gguf
import numpy as np
import pytest

import modelfile
from modelfile import GgufError, embedded_model, open_gguf


@pytest.fixture
def model(tmp_path):
    """A small file with a field of every type, arrays of every type, and two tensors."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    scalars = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -3, "uint32": 1 << 31, "int32": -3}
    scalars |= {"uint64": 1 << 63, "int64": -3, "float32": 0.5, "float64": 0.1, "bool": True, "string": "ü"}
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(f"scalar.{kind}", value)
        kind_code = gguf.GGUFValueType[kind.upper()]
        writer.add_key_value(f"array.{kind}", [value] * 3, gguf.GGUFValueType.ARRAY, sub_type=kind_code)
    writer.add_tensor("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b.weight", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_fields_and_tensors_are_those_of_the_library(model):
    ours, theirs = open_gguf(model), gguf.GGUFReader(model)
    assert {key: field.contents() for key, field in ours.fields.items()} == {
        key: field.contents() for key, field in theirs.fields.items()
    }
    assert [field.types for field in ours.fields.values()] == [field.types for field in theirs.fields.values()]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (mine.name, mine.data_offset) == (other.name, other.data_offset)
        np.testing.assert_array_equal(mine.data, other.data)


@pytest.mark.faults
def test_a_file_cut_anywhere_is_refused(model, tmp_path):
    whole, cut = model.read_bytes(), tmp_path / "cut.gguf"
    last = open_gguf(model).tensors[-1]  # padding may follow it, and may be missing
    for length in range(0, int(last.data_offset) + last.n_bytes):
        cut.write_bytes(whole[:length])
        with pytest.raises(GgufError, match=r"cut\.gguf: "):
            open_gguf(cut)


def test_a_length_beyond_the_file_is_refused_at_once(model, tmp_path):
    whole, broken = model.read_bytes(), tmp_path / "broken.gguf"
    for key in (b"array.string", b"array.int32"):
        at = whole.index(key) + len(key) + 8  # behind the two type words
        broken.write_bytes(whole[:at] + (1 << 62).to_bytes(8, "little") + whole[at + 8 :])
        with pytest.raises(GgufError, match="beyond the end"):
            open_gguf(broken)


def test_what_is_no_gguf_file_is_named(tmp_path):
    (tmp_path / "text").write_text("hello, this is no model file")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (
        ("text", "magic"),
        ("empty", "empty"),
        ("folder", "not a regular"),
        ("pipe", "not a regular"),
        ("absent", "No such"),
    ):
        with pytest.raises(GgufError, match=reason):
            open_gguf(tmp_path / name)


def test_the_embedded_model_lies_beside_the_sources_or_where_it_was_installed(tmp_path, monkeypatch):
    def files(_):
        return [importlib.metadata.PackagePath("../share/strata/model.gguf")]

    monkeypatch.setattr(modelfile, "EMBEDDED_MODEL", "model.gguf")
    monkeypatch.setattr(modelfile, "__file__", str(tmp_path / "modelfile.py"))
    monkeypatch.setattr(importlib.metadata, "files", files)
    monkeypatch.setattr(importlib.metadata.PackagePath, "locate", lambda path: tmp_path / "lib" / path)
    assert embedded_model() == str(tmp_path / "share/strata/model.gguf")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/model.gguf").touch()
    assert embedded_model() == str(tmp_path / "models/model.gguf")


@pytest.mark.parametrize("installed", [True, False])
def test_without_an_embedded_model_one_has_to_be_named(monkeypatch, installed):
    def files(_):
        if not installed:
            raise importlib.metadata.PackageNotFoundError("strata-engine")
        return [importlib.metadata.PackagePath("strata.py")]

    monkeypatch.setattr(modelfile, "EMBEDDED_MODEL", "absent.gguf")
    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(GgufError, match="name a GGUF file with --model"):
        embedded_model()
