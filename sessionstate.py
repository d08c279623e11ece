"""A cache as the image of a session file, and back.

It owns what a save puts into an image and the checks of an image against a running cache; it knows no disk and no
model. Invariant: an image that `validate` accepts fits the cache in every size, so filling it cannot fail for any
reason that lies in the file. Read next: engine.py for the order of events, sessionlayout.py for the records.
"""

import numpy as np

import cpumemory
from kvcache import Cache, CacheShape, Snapshot
from promptcache import Parked, Timeline
from sessionlayout import STATE_ARRAYS, Image, KvLayer, KvSource, Limits, SessionError
from sessionlayout import Checkpoint as Record


def _record(ids: np.ndarray, arrays, used: int) -> Record:
    return Record(ids, [], *(array.view(np.uint8) for array in arrays), used=used)


def image_of(held: Timeline | Parked, shape: CacheShape, n_layers: int, loaded: bool) -> Image:
    """The live state of a conversation (the cache's own arrays where they are the host's) and its deepest checkpoint.

    K/V is not in it: a save takes that from `sources_of`, piece by piece. `loaded`: whether there is a control vector.
    """
    if isinstance(held, Parked):
        live, steered = _record(held.ids, held.live.snapshot.arrays, held.live.used), held.steered
    else:
        cache = held.cache
        live, steered = _record(cache.ids, cache.state.on_host(), held.used), cache.steered
    kept = [_record(c.snapshot.ids, c.snapshot.arrays, c.used) for c in held.checkpoints.chain[-1:]]
    return Image(shape.geometry, 0, n_layers, loaded and steered, live, kept)


def sources_of(held: Timeline | Parked, cache: Cache) -> list[KvSource]:
    """Every layer's K/V of a conversation, that of a parked one as `cache` would hold it."""
    windows = cache.windows(held.n_tokens)
    if isinstance(held, Parked):
        pairs = zip(windows, held.cells, strict=True)
        return [KvLayer(window.header, tuple(parts)) for window, parts in pairs]
    return windows


def limits_of(cache: Cache, max_tokens: int, max_checkpoints: int, n_layers: int) -> Limits:
    """The largest file that this cache could have written."""
    windows = cache.windows(max_tokens)
    return Limits(
        max_tokens=max_tokens,
        max_checkpoints=max_checkpoints,
        max_kv_layers=len(windows),
        max_state_bytes=cache.shape.state_sizes,
        max_kv_bytes=[window.part_sizes for window in windows],
        geometry=cache.shape.geometry,
        layer_range=(0, n_layers),
        finite_state=True,
    )


def _refuse(reason: str, text: str) -> SessionError:
    return SessionError("invalid", reason, f"the session does not fit this model: {text}")


def validate(image: Image, cache: Cache, max_tokens: int, n_vocab: int, loaded: bool) -> None:
    """Hold an image, read within `limits_of`, against the cache; raises SessionError and changes nothing.

    `loaded`: whether there is a control vector, as a file may be of a request that used it or of one that did not.

    The order is that of the format: the live tokens, each checkpoint, the live arrays, the layers.
    """
    n_tokens = image.live.n_tokens
    if image.cvec and not loaded:
        raise _refuse("cvec", "it was computed with a control vector, and none is loaded")
    if not 0 < n_tokens <= max_tokens:
        raise _refuse("count-limit", f"{n_tokens} tokens, expected 1 to {max_tokens}")
    if image.live.ids.min() < 0 or image.live.ids.max() >= n_vocab:
        raise _refuse("token-id", f"token ids outside 0 to {n_vocab - 1}")
    if any(record.n_images for record in image.records):
        raise _refuse("images", "it holds pictures, and this engine reads text only")
    for number, checkpoint in enumerate(image.checkpoints):
        held = checkpoint.ids
        if not len(held) or len(held) > n_tokens or not np.array_equal(held, image.live.ids[: len(held)]):
            raise _refuse("checkpoint", f"checkpoint {number} is no start of the live tokens")
        _check_state(checkpoint, f"checkpoint {number}", cache.shape)
    _check_state(image.live, "the live state", cache.shape)
    windows = cache.windows(n_tokens)
    if len(image.kv) != len(windows):
        raise _refuse("layer-count", f"{len(image.kv)} K/V layers, expected {len(windows)} (layer count)")
    for index, (layer, window) in enumerate(zip(image.kv, windows, strict=True)):
        if layer.header != window.header:
            raise _refuse("kv-header", f"K/V layer {index} is {tuple(layer.header)}, expected {tuple(window.header)}")
        if tuple(layer.part_sizes) != window.part_sizes:
            raise _refuse("part-size", f"part sizes {layer.part_sizes} of layer {index}, expected {window.part_sizes}")


def _check_state(record: Record, name: str, shape: CacheShape) -> None:
    for array, data, expected in zip(STATE_ARRAYS, record.state, shape.state_sizes, strict=True):
        if data.size != expected:
            raise _refuse("state-size", f"{array} of {name} has {data.size} bytes, expected {expected}")


class StateSink:
    """The five arrays of one record as room for what a restore reads."""

    def __init__(self, arrays):
        self.arrays = arrays
        self._bytes = [array.view(np.uint8) for array in arrays]
        self.part_sizes = tuple(len(part) for part in self._bytes)

    def write(self, part: int, offset: int, data: np.ndarray) -> None:
        cpumemory.copy(self._bytes[part][offset : offset + len(data)], data)

    def snapshot(self, ids: np.ndarray) -> Snapshot:
        """The filled arrays as the state of a prefix."""
        return Snapshot(np.array(ids, np.int32), tuple(self.arrays))


def live_sink(cache: Cache) -> StateSink:
    """Room in the running state itself, or beside it where that is not in the host's memory; `Cache.rewind` follows."""
    return StateSink(cache.state.on_host())


def checkpoint_sink(cache: Cache) -> StateSink:
    """Room of its own; raises MemoryError where there is none."""
    return StateSink([np.empty_like(array) for array in cache.state.on_host()])
