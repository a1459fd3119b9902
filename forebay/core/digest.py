"""The plan digest (rule R2): a hash chain over what each plan did to the workers' mirrors.

    d[n] = BLAKE2b-64(d[n-1] || n || for each piece: slot, start, tokens, table length, last page, write_from, sample)

The planner computes it from its own page tables when it builds a plan. Each worker computes it again *from its mirror after
applying* the plan, so a missed, doubled or misapplied page shows at that plan and not as silent corruption later. The cost is
O(new work): a table's earlier entries were covered by the digests of the plans that appended them, and remaps are fed as such.
Source of the function: RFC 7693 (BLAKE2).
"""

import hashlib
import struct
from collections.abc import Iterable

DIGEST_BYTES = 8
ZERO = bytes(DIGEST_BYTES)

_PIECE = struct.Struct("<IIIIIB")
_REMAP = struct.Struct("<III")
_NUMBER = struct.Struct("<Q")


class PlanDigest:
    """Feeds one plan's effects; ``value`` is the chain value after it."""

    def __init__(self, previous: bytes, number: int) -> None:
        self._hash = hashlib.blake2b(previous + _NUMBER.pack(number), digest_size=DIGEST_BYTES)

    def remap(self, slot: int, index: int, page: int) -> None:
        self._hash.update(b"r" + _REMAP.pack(slot, index, page))

    def piece(self, slot: int, start: int, tokens: bytes, table: list[int], write_from: int, sample: bool) -> None:
        """``table``: the slot's whole page table after the plan's additions; only its length and its last page are read."""
        self._hash.update(b"p" + _PIECE.pack(slot, start, len(table), table[-1], write_from, sample) + tokens)

    def pages(self, slot: int, first_index: int, pages: Iterable[int]) -> None:
        """Pages appended to a slot's table, as they stand in it from ``first_index`` on."""
        for offset, page in enumerate(pages):
            self._hash.update(b"a" + _REMAP.pack(slot, first_index + offset, page))

    @property
    def value(self) -> bytes:
        return self._hash.digest()
