"""A process that saves over an older file and is killed at every call to the system, each time in a child of its own.

Run as a script: one folder of the given one for each point of death, named after it. Blocks are of 4 KiB, so that a
file of a hundred KiB has many. `direct` in place of `safe` is a broken writer, which works on the old file itself.
"""

import os
import pathlib
import shutil
import sys

import blockfile
import sessionfile
from cells import KvHeader
from given_faults import FaultySystem, dies_after, dies_before, dies_half_way, installed
from given_images import pattern
from sessionfile import write_session
from sessionlayout import Identity, Image, KvLayer, Record

BLOCK_BYTES = 4096
IDENTITY = Identity(7, 8)
MOST_CALLS = 1000
DEATHS = {"before": dies_before, "after": dies_after, "half way": dies_half_way}


def image(seed: int) -> Image:
    """Some 60 KiB of contents, other bytes for each seed."""
    parts = [pattern(size, 131, seed) for size in (40_000, 20_000, 0, 5, 100)]
    checkpoint = Record(pattern(64, 1, seed).view("<i4"))
    return Image((1,) * 18, 0, 1, False, checkpoint, [], [KvLayer(KvHeader(1, 4, 1, 64, 4, 0, 0), tuple(parts))])


class Overwriting(FaultySystem):
    """Opens the destination itself, and has nothing to rename."""

    def create(self, folder, name):
        leaf = ".".join(name.split(".")[1:-2])
        return os.open(leaf, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=folder)

    def lock(self, folder, name, descriptor):
        return lambda: None

    def rename(self, folder, source, destination):
        """It has its name already."""


def save_and_die(folder: pathlib.Path, kind: type, number: int, death) -> int:
    """Save in a child that meets its death at the number-th call; returns its exit status, 0 if it outlived that."""
    child = os.fork()
    if not child:
        only = "write" if death is dies_half_way else ""
        with installed(kind(number, death, only=only)):
            write_session(str(folder / "chat.bin"), image(2), IDENTITY)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(root: str, writer: str) -> None:
    blockfile.BLOCK_BYTES = sessionfile.BLOCK_BYTES = BLOCK_BYTES
    kind = {"safe": FaultySystem, "direct": Overwriting}[writer]
    for name, death in DEATHS.items():
        for number in range(1, MOST_CALLS):
            folder = pathlib.Path(root) / f"{name} {number}"
            folder.mkdir()
            write_session(str(folder / "chat.bin"), image(1), IDENTITY, durable=False)
            if not save_and_die(folder, kind, number, death):
                shutil.rmtree(folder)
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
