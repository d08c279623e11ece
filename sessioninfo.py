"""What is in a session file, as those see it who look into one without a model.

It owns the words, the table and the JSON of such a look; it reads no file. Invariant: nothing here says more than a
file's header and structure do. Read next: sessionfile.py, which looks.
"""

import shutil
import sys
from typing import NamedTuple

from printable import local_time
from sessionlayout import KV_PARTS, STATE_ARRAYS, VERSION, Identity, Image, Record, SessionError, hex64


class SessionInfo(NamedTuple):
    """What a file says of itself; the arrays of `image` are Extents."""

    path: str
    size_bytes: int
    modified_s: float
    identity: Identity
    payload_hash: int
    image: Image

    @property
    def kv_bytes(self) -> int:
        return sum(sum(layer.part_sizes) for layer in self.image.kv) + self.image.unlisted.kv_bytes

    @property
    def state_bytes(self) -> int:
        """The running state and the checkpoints'."""
        listed = sum(array.size for record in self.image.records for array in record.state)
        return listed + self.image.unlisted.state_bytes

    @property
    def rest(self) -> str:
        """What there is beyond the checkpoints and layers listed, and whether it was looked at; "" for nothing."""
        rest = self.image.unlisted
        if not rest.n_checkpoints and not rest.n_layers:
            return ""
        more = f"{rest.n_checkpoints} more checkpoints, {rest.n_layers} more layers"
        return more if rest.looked_at else f"what is behind these was not looked at: {more} at least"

    def as_dict(self) -> dict:
        """Everything as JSON can hold it; 64-bit identities are hexadecimal, as JSON numbers lose digits."""
        image = self.image
        return {
            "size_bytes": self.size_bytes,
            "modified_s": self.modified_s,
            "version": VERSION,
            "model": hex64(self.identity.model),
            "config": hex64(self.identity.config),
            "payload_hash": hex64(self.payload_hash),
            "geometry": list(image.geometry),
            "layers": [image.layer_lo, image.layer_hi],
            "control_vector": image.cvec,
            "live": _record_dict(image.live),
            "checkpoints": [_record_dict(checkpoint) for checkpoint in image.checkpoints],
            "kv_layers": [
                layer.header._asdict() | {"part_bytes": dict(zip(KV_PARTS, layer.part_sizes, strict=True))}
                for layer in image.kv
            ],
            "kv_bytes": self.kv_bytes,
            "state_bytes": self.state_bytes,
        } | ({"not_listed": vars(image.unlisted)} if self.rest else {})


def _record_dict(record: Record) -> dict:
    sizes = {name: array.size for name, array in zip(STATE_ARRAYS, record.state, strict=True)}
    return {"n_tokens": record.n_tokens, "n_images": record.n_images, "used": record.used, "state_bytes": sizes}


class Peek(NamedTuple):
    """What the header of a file and its first count say, or why they cannot be used."""

    name: str
    size_bytes: int = 0
    modified_s: float = 0.0
    n_tokens: int = 0
    identity: Identity | None = None
    refusal: SessionError | None = None

    def as_dict(self) -> dict:
        """The same as JSON can hold it."""
        if self.refusal:
            return {"file": self.name, "ok": False, "kind": self.refusal.kind, "message": str(self.refusal)}
        identity = {name: hex64(value) for name, value in self.identity._asdict().items()}
        sizes = {"n_tokens": self.n_tokens, "size_bytes": self.size_bytes, "modified_s": self.modified_s}
        return {"file": self.name, "ok": True} | sizes | identity


def print_info(info: SessionInfo, title: str) -> None:
    """An inspected file as a few lines and a table of its layers; the title is its name, in characters that print."""
    from rich.console import Console
    from rich.table import Table

    image = info.image
    checkpoints = ", ".join(str(checkpoint.n_tokens) for checkpoint in image.checkpoints)
    state_parts = ", ".join(f"{name} {part.size}" for name, part in zip(STATE_ARRAYS, image.live.state, strict=True))
    lines = {
        "size": f"{info.size_bytes} bytes, changed {local_time(info.modified_s)}",
        "model": f"{info.identity.model:016x}",
        "config": f"{info.identity.config:016x}",
        "payload hash": f"{info.payload_hash:016x} as stored; `strata session verify` proves it",
        "tokens": f"{image.live.n_tokens}, images {image.live.n_images}",
        "checkpoints": f"{len(image.checkpoints)}" + (f", of {checkpoints} tokens" if checkpoints else ""),
        "layers": f"{image.layer_lo} to {image.layer_hi}, control vector {'on' if image.cvec else 'off'}",
        "state": f"{info.state_bytes} bytes",
        "live state": state_parts,
        "K/V": f"{info.kv_bytes} bytes in {len(image.kv)} layers",
    } | ({"not listed": info.rest} if info.rest else {})
    print(title)
    for name, value in lines.items():
        print(f"  {name:<13} {value}")
    if image.kv:
        table = Table("layer", "format", "cells", "heads", "width", "pooled", "bytes", box=None, padding=(0, 0, 0, 2))
        for column in table.columns:
            column.justify, column.no_wrap = "right", True
        for i, layer in enumerate(image.kv):
            head = layer.header
            counts = (head.cells, head.heads, head.head_dim, head.pooled_rows, sum(layer.part_sizes))
            table.add_row(str(i), head.format_name, *map(str, counts))
        Console(highlight=False, width=max(80, shutil.get_terminal_size().columns)).print(table)
    sys.stdout.flush()
