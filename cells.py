"""K/V cells as bytes: storages, formats, pages.

It owns what a cell of one head looks like and which formats there are; it knows no kernel and no pool. Invariant: a
format's code is the one in session files, so formats are only ever added to. Read next: cpuattention.py, which writes
and reads cells; kvcache.py, which keeps them.

A storage is how the K or the V of one head lies in a cell:

    CELL_F16   float16 [D]
    CELL_INT8  int8 [D], and apart from it a float16 scale for each SCALE_GROUP values
    CELL_Q4_0  for each Q4_VALUES values a float16 scale and a nibble for each: byte Q4_CODES + k has value k in its low
               half and value k + 16 in its high half
    CELL_F32   float32 [D]; for comparing with exact values, in no format
"""

from typing import NamedTuple

PAGE = 4  # cells of a page
SEGMENT = 64  # pages whose softmax is taken together; both backends merge such partial results in their order
CELL_F16, CELL_INT8, CELL_Q4_0, CELL_F32 = range(4)
SCALE_GROUP = 64  # values that share an int8 scale
Q4_VALUES, Q4_BYTES, Q4_CODES = 32, 18, 2  # of a block: values, bytes, and where its nibbles begin


def head_bytes(storage: int, head_dim: int) -> int:
    """Bytes of one head's K or V in one cell, int8 scales apart."""
    if storage == CELL_Q4_0:
        return head_dim // Q4_VALUES * Q4_BYTES
    return head_dim * {CELL_F16: 2, CELL_INT8: 1, CELL_F32: 4}[storage]


def scale_bytes(storage: int, head_dim: int) -> int:
    """Bytes of the float16 scales of one head's K or V in one cell."""
    return head_dim // SCALE_GROUP * 2 if storage == CELL_INT8 else 0


def _fits(storage: int, head_dim: int) -> bool:
    """Whether a head can be cut into a storage's groups; one that is rotated is a power of two wide."""
    if storage == CELL_Q4_0:
        return head_dim % Q4_VALUES == 0 and head_dim & (head_dim - 1) == 0
    return head_dim % (SCALE_GROUP if storage == CELL_INT8 else 16) == 0


class CellFormat(NamedTuple):
    """How one layer keeps K and V; `code` is the number in a session file."""

    code: int
    k_storage: int
    v_storage: int

    @property
    def rotate_k(self) -> bool:
        """Whether K (and so the query) is stored after a Hadamard rotation, which spreads outliers over 4-bit codes."""
        return self.k_storage == CELL_Q4_0

    @property
    def rotate_v(self) -> bool:
        """Whether V is stored after that rotation."""
        return self.v_storage == CELL_Q4_0


FORMATS = {
    "fp16": CellFormat(0, CELL_F16, CELL_F16),
    "int8": CellFormat(1, CELL_INT8, CELL_INT8),
    "q4_0": CellFormat(2, CELL_Q4_0, CELL_Q4_0),
    "k8v4": CellFormat(3, CELL_INT8, CELL_Q4_0),
}
# Exact K/V, for comparing a forward pass with a float reference; no option offers it and no file may hold it.
EXACT = CellFormat(-1, CELL_F32, CELL_F32)
NAMES = tuple(FORMATS)  # by their code
ROTATED = 16  # added to the code of fp16 or int8 by the reference engine where K and V were rotated


def draft_format(trunk: CellFormat) -> CellFormat:
    """The format of the draft layer, which never keeps K and V apart."""
    return trunk if trunk.k_storage == trunk.v_storage else FORMATS["int8"]


def formats_for(head_dim: int) -> list[str]:
    """The K/V formats that a head width can be cut into."""
    return [name for name, f in FORMATS.items() if _fits(f.k_storage, head_dim) and _fits(f.v_storage, head_dim)]


class Residency(NamedTuple):
    """How many pages of a layer stay on the device (the others in host memory); ring: only the last ones."""

    n_slots: int
    ring: bool = False


class KvHeader(NamedTuple):
    """One layer's cells, as a session file describes them."""

    format: int
    cells: int
    heads: int
    head_dim: int
    page_size: int
    pooled_rows: int
    idx_dim: int

    @property
    def format_name(self) -> str:
        """The word for the format code, or the bare code where it has none."""
        rotated = self.format in (ROTATED, ROTATED + 1)
        code = self.format - ROTATED if rotated else self.format
        if not 0 <= code < len(NAMES):
            return f"code {self.format}"
        return NAMES[code] + (" rotated" if rotated else "")
