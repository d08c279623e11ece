"""The 64-bit hash, CRC-32C and both fingerprints against vectors of other implementations."""

import json
import os
import struct

import crcmod.predefined
import numpy as np
import pytest
import xxhash

import checksum
import cpuunits
from checksum import Hash64, crc32c, hash64
from fingerprint import (
    Config,
    FieldStream,
    FingerprintError,
    ModelFile,
    Rope,
    config_fingerprint,
    model_fingerprint,
    role_list,
)
from given_hashes import HASHES, data_of
from given_images import DATA, number

IDENTITIES = json.loads((DATA / "identity_vectors.json").read_text())
CRC_LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 4095, 4096, 12287, 12288, 12289, 12300, 3 * 12288 + 5, 100_003)


def doubles(value: str) -> float:
    return struct.unpack("<d", struct.pack("<Q", number(value)))[0]


# --- The hash ---


@pytest.mark.parametrize("vector", HASHES["vectors"], ids=lambda v: f"{next(iter(v['input']))}-{v['seed'][2:]}")
def test_hash_vectors(vector):
    assert hash64(data_of(vector["input"]), number(vector["seed"])) == number(vector["hash"])


@pytest.mark.parametrize("vector", HASHES["streaming"], ids=lambda v: str(v["splits"])[:24])
def test_hash_does_not_depend_on_how_bytes_are_cut(vector):
    data = data_of(vector["input"])
    splits = [1] * data.size if isinstance(vector["splits"], str) else vector["splits"]
    stream = Hash64(number(vector["seed"]))
    start = 0
    for size in splits:
        stream.update(data[start : start + size])
        start += size
    assert start == data.size
    assert stream.digest() == number(vector["hash"])


def test_digest_changes_nothing():
    vectors = HASHES["prefix_digests"]
    stream = Hash64(number(vectors["seed"]))
    for byte, expected in zip(data_of(vectors["input"]), vectors["after_each_byte"], strict=True):
        stream.update(bytes([byte]))
        assert stream.digest() == number(expected)
        assert stream.digest() == number(expected)


def test_hash_is_xxh64_where_the_lengths_allow_it():
    data = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    for size in (*range(64), 1000, 4096, 4099, 4100, 5000):
        same = hash64(data[:size], 7) == xxhash.xxh64_intdigest(data[:size].tobytes(), 7)
        assert same == (size >= 32 and size % 8 < 4), size


def test_hash_takes_bytes_and_unaligned_arrays():
    data = np.random.default_rng(2).integers(0, 256, 10_000, dtype=np.uint8)
    for start in range(9):
        assert hash64(data[start:]) == hash64(data[start:].tobytes())


def test_arrays_that_are_no_row_of_bytes():
    for array in (np.zeros(8, np.int32), np.zeros(8, np.uint8)[::2], np.zeros((2, 4), np.uint8)):
        for call in (hash64, crc32c):
            with pytest.raises(AssertionError):
                call(array)


# --- CRC-32C ---


@pytest.fixture(params=["instruction", "tables"])
def crc_path(request, monkeypatch):
    if request.param == "instruction" and not cpuunits.has_crc_instruction():
        pytest.skip("this target has no CRC-32C instruction")
    monkeypatch.setattr(checksum, "has_crc_instruction", lambda: request.param == "instruction")


@pytest.mark.usefixtures("crc_path")
def test_crc_is_that_of_crcmod():
    reference = crcmod.predefined.mkPredefinedCrcFun("crc-32c")
    assert crc32c(b"123456789") == reference(b"123456789") == 0xE3069283
    data = np.random.default_rng(3).integers(0, 256, max(CRC_LENGTHS) + 1, dtype=np.uint8)
    for size in CRC_LENGTHS:
        for piece in (data[:size], data[1 : 1 + size]):
            assert crc32c(piece) == reference(piece.tobytes()), size


@pytest.mark.usefixtures("crc_path")
def test_crc_goes_on_from_a_value():
    data = np.random.default_rng(4).integers(0, 256, 30_000, dtype=np.uint8)
    for cut in (0, 1, 12_288, 12_289, 30_000):
        assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


# --- Identities ---


@pytest.mark.parametrize("vector", IDENTITIES["builder"], ids=lambda v: v["digest"])
def test_typed_fields(vector):
    stream = FieldStream(number(vector["seed"]))
    for kind, tag, value in vector["fields"]:
        match kind:
            case "s":
                stream.text(tag, value)
            case "i":
                stream.signed(tag, value)
            case "u":
                stream.unsigned(tag, number(value))
            case "f":
                stream.double(tag, doubles(value))
            case "b":
                stream.raw(tag, bytes.fromhex(value))
    assert stream.digest() == number(vector["digest"])


@pytest.mark.parametrize("vector", IDENTITIES["config"], ids=lambda v: v["note"])
def test_config_fingerprint(vector):
    rope = {name: value if name == "type" else doubles(value) for name, value in vector["rope"].items()}
    same = ("backend", "kv", "max_context", "kv_resident", "mtp_window", "kv_rot")
    config = Config(
        engine=vector["engine_version"],
        rope=Rope(**rope),
        cvec=number(vector["cvec"]),
        switches=[tuple(switch) for switch in vector["switches"]],
        **{name: vector[name] for name in same},
    )
    assert config_fingerprint(config) == number(vector["fingerprint"])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    for name, description in IDENTITIES["model_files"].items():
        if isinstance(description, dict):
            (folder / name).write_bytes(data_of(description).tobytes())
    big = bytearray((folder / "big").read_bytes())
    big[1_572_864] ^= 0xFF
    (folder / "big_midedit").write_bytes(big)
    big[1_572_864] ^= 0xFF
    big[-1] ^= 0xFF
    (folder / "big_tailedit").write_bytes(big)
    return folder


@pytest.mark.parametrize("vector", IDENTITIES["model"], ids=lambda v: v["note"])
def test_model_fingerprint(vector, model_folder):
    files = [ModelFile(role, str(model_folder / name), optional) for role, name, optional in vector["files"]]
    beats = []
    if vector["ok"]:
        assert model_fingerprint(files, lambda: beats.append(1)) == number(vector["fingerprint"])
    else:
        with pytest.raises(FingerprintError, match="missing"):
            model_fingerprint(files, lambda: beats.append(1))
    assert len(beats) == vector["beats"]


def test_model_fingerprint_does_not_know_the_folder(model_folder, tmp_path):
    os.symlink(model_folder, tmp_path / "elsewhere")
    here = model_fingerprint([ModelFile("a", str(model_folder / "big"))])
    assert model_fingerprint([ModelFile("a", str(tmp_path / "elsewhere" / "big"))]) == here
    assert model_fingerprint([ModelFile("b", str(model_folder / "big"))]) != here


def test_model_files_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, optional, word in (
        (".", False, "directory|regular"),
        (".", True, "directory|regular"),  # optional means that it may be absent, not that it may be unreadable
        ("pipe", False, "regular"),
        ("link", False, "missing"),
    ):
        with pytest.raises(FingerprintError, match=word):
            model_fingerprint([ModelFile("shard", str(tmp_path / name), optional)])


@pytest.mark.parametrize("vector", IDENTITIES["inputs"], ids=["everything", "one shard"])
def test_role_list(vector):
    arguments = {name: value for name, value in vector.items() if name != "list"}
    assert [list(file) for file in role_list(**arguments)] == vector["list"]
