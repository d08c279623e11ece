"""The file that remembers which experts of a model are worth a place on the device.

It owns the file's format, its checks and its durable writing; it knows neither counts nor devices. Invariant: a file is
used whole or not at all, and is replaced by a complete one or not at all; whatever it holds, nothing stops because of
it. Read next: cudaexperts.py.

Text, one line a layer, its experts in falling order of worth:

    strata expert profile 1
    model 0123456789abcdef layers 48 experts 512
    17 4 211 ...
"""

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable

TITLE = "strata expert profile 1"
MARK = b"strata expert profile "  # of every format
SAVE_EVERY_S = 600


class ExpertProfile:
    """A profile of one model at one path; what is wrong with it goes to `log`, one line each time."""

    def __init__(self, path: str, model: int, n_layers: int, n_experts: int, log: Callable[[str], None]):
        self.path = os.path.realpath(path)  # a link stays, what it points to is replaced
        self.n_layers, self.n_experts, self._log = n_layers, n_experts, log
        self._header = f"{TITLE}\nmodel {model:016x} layers {n_layers} experts {n_experts}\n"
        self._most_bytes = len(self._header) + n_layers * (n_experts * len(f"{n_experts} ") + 1)
        self._saved_at = time.monotonic()

    # --- reading

    def read(self) -> list[list[int]] | None:
        """Each layer's experts in their order; None where there is no file, or none that can be used."""
        try:
            text = self._text()
            return None if text is None else self._ranking(text)
        except OSError as error:
            self._refuse(f"it cannot be read: {error.strerror}")
        except ValueError as error:
            self._refuse(str(error))
        return None

    def _refuse(self, reason: str) -> None:
        self._log(f"--expert-profile-save: {self.path} is not used, the order of the model is: {reason}")

    def _text(self) -> str | None:
        """The file, or as much of it as is one byte too long."""
        # A pipe without a writer must not hold up the start.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        try:
            descriptor = os.open(self.path, flags)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ValueError("it is no regular file")
        with open(descriptor, "rb") as file:
            raw = file.read(self._most_bytes + 1)
        if not raw.isascii():
            raise ValueError("it holds other bytes than text")
        return raw.decode("ascii")

    def _ranking(self, text: str) -> list[list[int]]:
        title, _, rest = text.partition("\n")
        header, _, body = rest.partition("\n")
        if title != TITLE:
            raise ValueError("it is no expert profile of this format")
        if f"{title}\n{header}\n" != self._header:
            raise ValueError(f"it is for {header[:80]!r}, this is {self._header.splitlines()[1]!r}")
        if len(text) > self._most_bytes:
            raise ValueError(f"it is longer than the {self._most_bytes} bytes that a profile of this model can have")
        lines = body.removesuffix("\n").split("\n")
        if len(lines) != self.n_layers:
            raise ValueError(f"it has {len(lines)} layers of {self.n_layers}")
        return [self._layer(number, line) for number, line in enumerate(lines)]

    def _layer(self, number: int, line: str) -> list[int]:
        """The experts of a line; each has to be there once."""
        words = line.split(" ")
        for word in words:
            if not (word.isdigit() and len(word) <= len(str(self.n_experts)) and int(word) < self.n_experts):
                raise ValueError(f"layer {number} names {word[:20]!r}, which is no expert below {self.n_experts}")
        experts = [int(word) for word in words]
        if len(set(experts)) != len(experts):
            twice = next(expert for expert in experts if experts.count(expert) > 1)
            raise ValueError(f"layer {number} names expert {twice} twice")
        if len(experts) != self.n_experts:
            raise ValueError(f"layer {number} names {len(experts)} experts of {self.n_experts}")
        return experts

    # --- writing

    def save_if_due(self, ranking: Callable[[], list[list[int]]]) -> None:
        """`save`, once in ten minutes."""
        if time.monotonic() - self._saved_at >= SAVE_EVERY_S:
            self.save(ranking)

    def save(self, ranking: Callable[[], list[list[int]]]) -> None:
        """Replace the file, durably; where that fails it stays as it was."""
        self._saved_at = time.monotonic()
        lines = (" ".join(map(str, experts)) + "\n" for experts in ranking())
        try:
            if os.path.lexists(self.path) and not os.path.isfile(self.path):
                raise OSError(0, "it is no regular file")
            if not self._may_replace():
                raise OSError(0, "it is no expert profile, and stays")
            self._replace((self._header + "".join(lines)).encode())
        except OSError as error:
            self._log(f"--expert-profile-save: {self.path} could not be written: {error.strerror}")

    def _may_replace(self) -> bool:
        """Whether the name is free, or that of a profile of any format and model, or of an empty file."""
        try:
            with open(self.path, "rb") as file:
                return MARK.startswith(file.read(len(MARK)))
        except FileNotFoundError:
            return True

    def _replace(self, data: bytes) -> None:
        folder = os.path.dirname(self.path)
        descriptor, temporary = tempfile.mkstemp(prefix=".strata-experts-", dir=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):  # the failure before it is the one to tell
                os.unlink(temporary)
            raise
        _flush_folder(folder)


def _flush_folder(folder: str) -> None:
    """Make a rename durable; Windows has no such call for folders."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
