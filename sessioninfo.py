"""What is in a session file, as those see it who look into one without a model.

It owns the words and the JSON of such a look; it reads no file. Invariant: nothing here says more than a file's header
and structure do. Read next: sessionfile.py, which looks.
"""

from typing import NamedTuple

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
