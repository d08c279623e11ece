"""Device memory: arrays, the K/V pools in their three residency modes, and copies between them and the host.

It owns where a byte lies and how it gets there; it knows no arithmetic and no file. Invariant: the bytes of a cell are
the same wherever it is read: a mirrored pool's host copy is written with every cell, and a slot of the device holds a
page only while the page table says so. Read next: kvcache.py for the layout, kernels_cuda.py for the readers.

Modes of a layer's cells:
- resident: the device holds every page in its place; there is no host copy.
- streamed: pinned host memory holds every page and is authoritative, the device as many as it has slots. Before a read
  the pages that it needs are brought in, victims chosen by CLOCK; what finds no slot is read from the host in place.
- ring (the draft layer): page p belongs in slot p mod n_slots, a token looks back over at most n_slots pages.
"""

from typing import NamedTuple

import numpy as np
from numba import config, cuda
from numba.cuda.cudadrv.driver import CudaAPIError

from cells import PAGE, Residency

THREADS = 128  # of a block; a power of two, at most 256 (tests in the simulator lower it)
MAX_BLOCKS = 1 << 16
COPY_BLOCKS = 256  # that bring pages in: enough to fill a PCIe link, few beside a decode
STAGE_BYTES = 16 << 20  # of a staging buffer; a session file is read and written in pieces of this size
SIMULATED = bool(config.ENABLE_CUDASIM)
# Numba frees ten arrays at a time and waits for the device to do so; a token leaves a thousand small ones behind. They
# still go once they take a fifth of the device's memory.
config.CUDA_DEALLOCS_COUNT = 1 << 16
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # one token fills no device
DEVICE_ERRORS = (CudaAPIError,)  # what a failing device raises
HAND, MISSES, OVERFLOW, BROUGHT_IN = range(4)  # counters of a page map


# --- arrays -------------------------------------------------------------------------------------------------------


def launch(kernel, n, *args):
    """Run an elementwise kernel over n items."""
    if n:
        kernel[min(-(-n // THREADS), MAX_BLOCKS), THREADS](*args)


def launch_rows(kernel, n, *args):
    """Run a kernel that gives a block to each of n rows."""
    if n:
        kernel[min(n, MAX_BLOCKS), THREADS](*args)


def empty(shape, dtype=np.float32):
    """A device array of any content."""
    return cuda.device_array(shape, dtype)


@cuda.jit
def _fill_kernel(array, value):
    for i in range(cuda.grid(1), array.shape[0], cuda.gridsize(1)):
        array[i] = value


def zeros(shape, dtype=np.float32):
    """A device array of zeros."""
    array = cuda.device_array(shape, dtype)
    clear(array)
    return array


def clear(array):
    """Set a device array to zeros."""
    if array.size:
        flat = array.ravel().view(np.int32 if array.nbytes % 4 == 0 else np.uint8)
        launch(_fill_kernel, flat.size, flat, flat.dtype.type(0))


def from_host(array):
    """A NumPy array on the device."""
    return cuda.to_device(np.ascontiguousarray(array))


def to_host(array):
    """A device array as a NumPy one; waits for the kernels before it."""
    return array.copy_to_host()


def copy(array):
    """A copy on the device."""
    out = cuda.device_array(array.shape, array.dtype)
    assign(out, array)
    return out


def assign(out, source):
    """out = source, of the same shape; `source` may be a device array or a NumPy one."""
    if out.size:
        out.copy_to_device(source)


# --- K/V pools ----------------------------------------------------------------------------------------------------


class Views(NamedTuple):
    """One pool [pages][kv head][cell][bytes] as its bytes and as float16."""

    bytes: object
    halves: object


def _views(array) -> Views:
    return Views(array, array.view(np.float16) if array.size else empty((0, 0, 0, 0), np.float16))


def _mapped_zeros(shape):
    """Pinned host memory that kernels reach: its device array and its NumPy array."""
    mapped = cuda.mapped_array(shape, np.uint8)
    if SIMULATED:
        device, host = mapped, mapped._ary  # the simulator's device memory is NumPy's
    else:
        device = cuda.from_cuda_array_interface(mapped.__cuda_array_interface__, owner=mapped, sync=False)
        host = np.ndarray.view(mapped, np.ndarray)
    host.fill(0)
    return device, host


class Cells:
    """One of the four pools of a layer: K codes, V codes, or the scales of either."""

    def __init__(self, shape: tuple[int, ...], page_map: "PageMap | None"):
        self.shape, self.dtype, self.page_map = shape, np.dtype(np.uint8), page_map
        n_slots = page_map.n_slots if page_map else shape[0]
        self.device = _views(zeros((n_slots, *shape[1:]), np.uint8))
        self.is_mirrored = page_map is not None and self.device.bytes.size > 0
        self.host, self.host_bytes = self.device, None
        if self.is_mirrored:
            mapped, self.host_bytes = _mapped_zeros(shape)
            self.host = _views(mapped)
        self.table = page_map.table if page_map else empty(0, np.int32)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def window_pages(self) -> int:
        """How many pages back a token looks, 0 for all."""
        return self.page_map.n_slots if self.page_map and self.page_map.ring else 0

    def before_append(self, first_cell: int, n_cells: int) -> None:
        if self.page_map and self.page_map.ring and n_cells:
            self.page_map.turn(first_cell, n_cells)

    def before_dense_read(self, n_pages: int) -> None:
        if self.page_map and not self.page_map.ring:
            self.page_map.resolve(empty((0, 0), np.int32), empty(0, np.int64), n_pages)

    def before_read(self, blocks, counts) -> None:
        if self.page_map and not self.page_map.ring:
            self.page_map.resolve(blocks, counts, 0)


def cells(n_pages: int, n_heads: int, sizes, residency: Residency | None = None) -> list[Cells]:
    """The pools of one layer: a `Cells` for each of `sizes` (bytes of a head's cell); residency None: resident."""
    page_map = PageMap(n_pages, residency) if residency and residency.n_slots < n_pages else None
    parts = [Cells((n_pages, n_heads, PAGE, size), page_map) for size in sizes]
    if page_map:
        page_map.attach(parts)
    return parts


# --- page maps ----------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _want(page, table, stamp, referenced, asked, epoch, counters, misses):
    """Stamp a page's slot as used in this epoch, or put the page on the list of misses once."""
    slot = table[page]
    if slot >= 0:
        stamp[slot] = epoch
        referenced[slot] = 1
    elif cuda.atomic.exch(asked, page, epoch) != epoch:
        at = cuda.atomic.add(counters, MISSES, 1)
        if at < misses.shape[0]:
            misses[at, 0] = page
        else:
            cuda.atomic.add(counters, OVERFLOW, 1)


@cuda.jit
def _want_kernel(blocks, counts, n_pages, table, stamp, referenced, asked, epoch, counters, misses):
    """An item is an entry of a token's page list, or one of the first n_pages pages where there are no lists."""
    width = blocks.shape[1]
    n = n_pages
    if counts.shape[0]:
        n = counts.shape[0] * width
    for item in range(cuda.grid(1), n, cuda.gridsize(1)):
        if not counts.shape[0]:
            _want(item, table, stamp, referenced, asked, epoch, counters, misses)
        elif item % width < counts[item // width]:
            _want(blocks[item // width, item % width], table, stamp, referenced, asked, epoch, counters, misses)


@cuda.jit
def _assign_kernel(table, slot_page, stamp, referenced, epoch, counters, misses):
    """One thread: a slot for each miss by CLOCK, none that this epoch uses; misses that find none keep slot -1."""
    if cuda.grid(1) == 0:
        n_slots, hand = slot_page.shape[0], counters[HAND]
        n = min(counters[MISSES], misses.shape[0])
        found = 0
        for i in range(n):
            misses[i, 1] = -1
            looked = 0
            # Two rounds: the first may only take reference bits away. Once nothing is found, nothing will be.
            while found == i and looked < 2 * n_slots:
                slot = hand
                hand = (hand + 1) % n_slots
                looked += 1
                if stamp[slot] != epoch:
                    if referenced[slot]:
                        referenced[slot] = 0
                    else:
                        if slot_page[slot] >= 0:
                            table[slot_page[slot]] = -1
                        page = misses[i, 0]
                        table[page] = slot
                        slot_page[slot] = page
                        stamp[slot] = epoch
                        referenced[slot] = 1
                        misses[i, 1] = slot
                        found = i + 1
        counters[HAND] = hand
        counters[OVERFLOW] += n - found
        counters[BROUGHT_IN] += found
        counters[MISSES] = n


@cuda.jit
def _bring_in_kernel(misses, counters, host, device):
    """A block a miss: copy the page's words of one pool from the host; host, device int32 [pages or slots, words]."""
    for i in range(cuda.blockIdx.x, counters[MISSES], cuda.gridDim.x):
        page, slot = misses[i, 0], misses[i, 1]
        if slot >= 0:
            for word in range(cuda.threadIdx.x, host.shape[1], cuda.blockDim.x):
                device[slot, word] = host[page, word]


@cuda.jit
def _turn_kernel(table, slot_page, first_page, last_page, must_bring_in, counters, misses):
    """One thread: give the pages about to be written their places in the ring; the first may have older cells."""
    if cuda.grid(1) == 0:
        n_slots = slot_page.shape[0]
        counters[MISSES] = 0
        for page in range(first_page, last_page + 1):
            slot = page % n_slots
            if slot_page[slot] != page:
                if slot_page[slot] >= 0:
                    table[slot_page[slot]] = -1
                table[page] = slot
                slot_page[slot] = page
                if must_bring_in and page == first_page:
                    misses[0, 0] = page
                    misses[0, 1] = slot
                    counters[MISSES] = 1


@cuda.jit
def _ring_kernel(table, slot_page, first_page, n, counters, misses):
    """Map the n pages from first_page on to their places in the ring and list them all."""
    n_slots = slot_page.shape[0]
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        page, slot = first_page + i, (first_page + i) % n_slots
        table[page] = slot
        slot_page[slot] = page
        misses[i, 0] = page
        misses[i, 1] = slot
        if i == 0:
            counters[MISSES] = n


class PageMap:
    """Which pages of one layer lie in which slots of the device."""

    def __init__(self, n_pages: int, residency: Residency):
        self.n_slots, self.ring = residency
        self.table = empty(n_pages, np.int32)  # page -> slot, -1: only on the host
        self.slot_page = empty(self.n_slots, np.int32)
        self.stamp = empty(self.n_slots, np.int32)  # epoch of the slot's last use
        self.referenced = empty(self.n_slots, np.int32)  # CLOCK's bit
        self.asked = zeros(n_pages, np.int32)  # epoch in which a page was last listed as missing
        self.counters = empty(4, np.int32)
        self.misses = empty((self.n_slots, 2), np.int32)  # (page, slot)
        self.epoch = 0
        self.is_stale = False  # the host's pools were overwritten from outside
        self._parts: list = []
        self.reset()

    def attach(self, parts: list[Cells]) -> None:
        """Name the pools whose pages this map moves, all at once."""
        flat = [(part.host.bytes, part.device.bytes) for part in parts if part.is_mirrored]
        self._parts = [tuple(a.reshape(a.shape[0], a.size // a.shape[0]).view(np.int32) for a in pair) for pair in flat]

    def reset(self) -> None:
        """Nothing is resident."""
        for array, value in ((self.table, -1), (self.slot_page, -1), (self.stamp, 0), (self.referenced, 0),
                             (self.counters, 0)):  # fmt: skip
            launch(_fill_kernel, array.size, array, np.int32(value))

    def resolve(self, blocks, counts, n_pages: int) -> None:
        """Bring in what the tokens' page lists (or the first n_pages pages, without lists) need, as far as slots go."""
        self.epoch += 1
        launch(_fill_kernel, 1, self.counters[MISSES : MISSES + 1], np.int32(0))
        launch(_want_kernel, blocks.size or n_pages, blocks, counts, n_pages, self.table, self.stamp, self.referenced,
               self.asked, np.int32(self.epoch), self.counters, self.misses)
        _assign_kernel[1, 1](self.table, self.slot_page, self.stamp, self.referenced, np.int32(self.epoch),
                             self.counters, self.misses)
        self._bring_in()

    def turn(self, first_cell: int, n_cells: int) -> None:
        """Make room in the ring for cells first_cell.. ."""
        first_page, last_page = first_cell // PAGE, (first_cell + n_cells - 1) // PAGE
        _turn_kernel[1, 1](self.table, self.slot_page, first_page, last_page, first_cell % PAGE, self.counters,
                           self.misses)
        if first_cell % PAGE:
            self._bring_in()

    def fill_ring(self, n_tokens: int) -> None:
        """Hold the last pages of n_tokens tokens, and nothing else."""
        self.reset()
        last = -(-n_tokens // PAGE)
        first = max(0, last - self.n_slots)
        launch(_ring_kernel, last - first, self.table, self.slot_page, first, last - first, self.counters, self.misses)
        self._bring_in()

    def _bring_in(self) -> None:
        for host, device in self._parts:
            _bring_in_kernel[min(COPY_BLOCKS, self.n_slots), THREADS](self.misses, self.counters, host, device)


def kv_stream_reset(page_map: PageMap) -> None:
    """Forget which pages are resident: the host's pools hold another conversation than the slots."""
    page_map.reset()


def kv_ring_restore(page_map: PageMap, n_tokens: int) -> None:
    """Fill the ring with the last pages of the conversation that the host's pools hold."""
    page_map.fill_ring(n_tokens)


def settle(pool: Cells, n_tokens: int) -> None:
    """Bring a layer's slots in line with its pools, of which `pool` is one, after a rewind or a restore."""
    _STAGING.wait()
    page_map = pool.page_map
    if page_map is None:
        return
    if page_map.ring:
        kv_ring_restore(page_map, n_tokens)
    elif page_map.is_stale:
        kv_stream_reset(page_map)
    page_map.is_stale = False


# --- copies -------------------------------------------------------------------------------------------------------


class _Staging:
    """Two pinned buffers with a stream each, so that a copy runs while its neighbour is hashed or on the disk.

    A read starts the copy of the range that follows it; a write returns when its bytes are in a buffer.
    """

    def __init__(self):
        self._buffers: list[np.ndarray] = []
        self._streams: list = []
        self._turn = 0
        self._ahead = None  # (array, first byte, n bytes, buffer) of a copy that was started early

    def _next(self) -> int:
        """The buffer whose turn it is, idle."""
        if not self._buffers:
            self._buffers = [cuda.pinned_array(STAGE_BYTES, np.uint8) for _ in range(2)]
            self._streams = [cuda.stream() for _ in range(2)]
        self._turn ^= 1
        self._streams[self._turn].synchronize()
        return self._turn

    def _start(self, array, first: int, n: int):
        buffer = self._next()
        array[first : first + n].copy_to_host(self._buffers[buffer][:n], stream=self._streams[buffer])
        return array, first, n, buffer

    def read(self, array, first: int, out: np.ndarray) -> None:
        """Copy bytes first.. of a flat uint8 device array to `out`."""
        for start in range(0, len(out), STAGE_BYTES):
            n = min(STAGE_BYTES, len(out) - start)
            at = first + start
            ahead, self._ahead = self._ahead, None
            if ahead is None or ahead[0] is not array or ahead[1] != at or ahead[2] < n:
                ahead = self._start(array, at, n)
            self._streams[ahead[3]].synchronize()
            following = min(n, array.size - at - n)
            if following > 0:
                self._ahead = self._start(array, at + n, following)
            out[start : start + n] = self._buffers[ahead[3]][:n]

    def write(self, array, first: int, data: np.ndarray) -> None:
        """Copy `data` over bytes first.. of a flat uint8 device array."""
        self._ahead = None
        for start in range(0, len(data), STAGE_BYTES):
            n, buffer = min(STAGE_BYTES, len(data) - start), self._next()
            self._buffers[buffer][:n] = data[start : start + n]
            at = first + start
            array[at : at + n].copy_to_device(self._buffers[buffer][:n], stream=self._streams[buffer])

    def forget(self) -> None:
        """Device memory is about to change: what was copied early is worth nothing."""
        self._ahead = None

    def wait(self) -> None:
        """Until every copy has landed."""
        self._ahead = None
        for stream in self._streams:
            stream.synchronize()


_STAGING = _Staging()


def forget_copies() -> None:
    """Called before cells change: a copy that was started early would hold the old ones."""
    _STAGING.forget()


def _flat(array):
    """The bytes of a device array; kept beside it, since pieces of one array are asked for again and again."""
    flat = getattr(array, "_flat_bytes", None)
    if flat is None:
        flat = array.ravel().view(np.uint8)
        array._flat_bytes = flat
    return flat


def read_bytes(array, offset, out):
    """Copy len(out) bytes of a pool or a device array, from byte `offset`, into the NumPy array `out` (uint8)."""
    if not len(out):
        return
    if isinstance(array, Cells) and array.is_mirrored:
        cuda.synchronize()  # kernels may still be writing
        out[:] = array.host_bytes.reshape(-1)[offset : offset + len(out)]
        return
    _STAGING.read(_flat(array.device.bytes if isinstance(array, Cells) else array), offset, out)


def write_bytes(array, offset, data):
    """Copy `data` (NumPy, uint8) over the bytes of a pool or a device array from byte `offset`; `settle` follows."""
    if not len(data):
        return
    if isinstance(array, Cells) and array.is_mirrored:
        cuda.synchronize()  # kernels may still be reading
        array.host_bytes.reshape(-1)[offset : offset + len(data)] = data
        array.page_map.is_stale = True
        return
    _STAGING.write(_flat(array.device.bytes if isinstance(array, Cells) else array), offset, data)
