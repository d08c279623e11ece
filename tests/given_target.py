"""A folder with an older session file, and a system that notes its calls and fails where it is told to."""

import os

import pytest

import blockfile
import disksystem
from given_images import IMAGES, identity, image
from sessionfile import write_session
from sessionlayout import SessionError

SAMPLE_BYTES = IMAGES["sample"]["file"]["size"]
OLD = b"STRSESS\0 of yore"


class Recording(disksystem.PosixSystem):
    """Notes every call; the n-th, counted over all calls or over those of one name, fails."""

    def __init__(self, fail_at: int = 0, code: int = 0, only: str = ""):
        self.calls = []
        self._left = fail_at
        self._code = code
        self._only = only

    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        if name.startswith("_") or not callable(method):
            return method

        def call(*arguments):
            self.calls.append(name)
            if not self._only or name == self._only:
                self._left -= 1
                if self._left == 0:
                    raise OSError(self._code, os.strerror(self._code))
            return method(*arguments)

        return call


def use(monkeypatch, system) -> "disksystem.PosixSystem":
    monkeypatch.setattr(blockfile, "system", system)
    return system


def refusal(call, *arguments, **named) -> SessionError:
    with pytest.raises(SessionError) as caught:
        call(*arguments, **named)
    return caught.value


def write_sample(path, **named) -> int:
    return write_session(path, image("sample"), identity("sample"), **named)


def assert_untouched(path) -> None:
    assert os.listdir(path.parent) == [path.name]
    assert path.read_bytes() == OLD
