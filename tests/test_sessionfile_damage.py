"""Damaged session files: every byte changed, every cut, and damage behind recomputed checksums."""

import random

import pytest

from given_images import DATA, READABLE, identity, plain, seal
from sessionfile import SessionReader, inspect_session, read_session, verify_session, write_session
from sessionlayout import Limits, SessionError

pytestmark = pytest.mark.faults

NAME = "emptyparts_3kv"
GOOD = (DATA / f"{NAME}.bin").read_bytes()


def verdict(call) -> str:
    """The reason of the refusal, or an empty string; a failure of another kind is its own reason."""
    try:
        call()
    except SessionError as error:
        return error.reason if error.kind == "invalid" else f"{error.kind}: {error}"
    return ""


def put(path, data) -> None:
    """Write a new file: one that is cut and written again costs a flush on some file systems."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def read(path, name=NAME, limits=None):
    return read_session(path, identity(name), limits or Limits())


def test_every_changed_byte_is_found(tmp_path):
    path = tmp_path / "a.bin"
    draw = random.Random(5)
    for offset in range(len(GOOD)):
        data = bytearray(GOOD)
        data[offset] ^= draw.randrange(1, 256)
        put(path, data)
        reason = verdict(lambda: read(path))
        assert reason, f"byte {offset} was changed and nobody saw it"
        if offset < 8:
            assert reason == "magic"
        elif offset < 64:
            assert reason == "header-hash"
        assert verdict(lambda: verify_session(path)), offset


def test_every_cut_is_found(tmp_path):
    path = tmp_path / "a.bin"
    for size in range(len(GOOD)):
        put(path, GOOD[:size])
        assert verdict(lambda: read(path)) == ("too-small" if size < 80 else "size-mismatch")
        assert verdict(lambda: inspect_session(path)) == ("too-small" if size < 80 else "size-mismatch")


@pytest.mark.parametrize("name", READABLE)
def test_every_appended_length_is_found(name, tmp_path):
    good = (DATA / f"{name}.bin").read_bytes()
    for tail in (b"\0", b"x" * 15, good[-16:], good):
        put(tmp_path / "a.bin", good + tail)
        assert verdict(lambda: read(tmp_path / "a.bin", name)) == "size-mismatch"


def outcomes(path, name) -> set[str]:
    """The verdicts of every way to read a file, which must be the same; a file that reads comes out the same."""

    def through():
        again = path.with_suffix(".again")
        write_session(again, read(path, name), identity(name), durable=False)
        assert again.read_bytes() == path.read_bytes()
        again.unlink()

    def two_passes():
        with SessionReader(path, identity(name), Limits()) as reader:
            assert plain(reader.image, kv=False) == plain(read(path, name), kv=False)

    found = {verdict(through), verdict(two_passes), verdict(lambda: verify_session(path))}
    assert len(found) == 1, found
    return found


def test_damage_behind_recomputed_checksums(tmp_path, monkeypatch):
    """Every byte of a payload, sealed again: a refusal, or an image that is written as the same file."""
    monkeypatch.setenv("STRATA_SESSION_BUFFERED", "1")  # thousands of small files: nothing need reach the disk
    path = tmp_path / "a.bin"
    draw = random.Random(6)
    seen = set()
    for offset in range(64, len(GOOD) - 16):
        data = bytearray(GOOD)
        data[offset] ^= draw.randrange(1, 256)
        put(path, seal(data))
        seen |= outcomes(path, NAME)
    assert seen == {"", "cvec-flag", "count-payload", "payload-rest", "payload-short", "kv-format"}


@pytest.mark.parametrize("name", READABLE)
def test_random_damage_behind_recomputed_checksums(name, tmp_path):
    """Bytes changed, taken out, put in and moved, sealed again."""
    path = tmp_path / "a.bin"
    good = (DATA / f"{name}.bin").read_bytes()
    draw = random.Random(name)
    for _ in range(60):
        payload = bytearray(good[64:-16])
        for _ in range(draw.randrange(1, 4)):
            at, size = draw.randrange(len(payload) + 1), draw.choice((1, 4, 8, 64, 96))
            match draw.randrange(4):
                case 0:
                    payload[at : at + size] = draw.randbytes(min(size, len(payload) - at))
                case 1:
                    del payload[at : at + size]
                case 2:
                    payload[at:at] = draw.randbytes(size)
                case 3:
                    payload[at : at + 8] = draw.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
        put(path, seal(bytearray(good[:64]) + payload + good[-16:]))
        assert len(outcomes(path, name)) == 1
