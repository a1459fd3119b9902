"""The plan digest (rule R2): a hash chain over what each plan did to the workers' mirrors.

    d[n] = BLAKE2b-64(d[n-1] || n || remaps || for each piece: slot, start, table length, write_from, sample, new pages, tokens)

The planner computes it from its own page tables when it builds a plan. Each worker computes it again *from its mirror after
applying* the plan, so a missed, doubled or misapplied page shows at that plan and not as silent corruption later. The cost is
O(new work): a table's earlier entries were covered by the digests of the plans that appended them. Source: RFC 7693 (BLAKE2).
"""

import hashlib
import struct
from collections.abc import Sequence

DIGEST_BYTES = 8
ZERO = bytes(DIGEST_BYTES)

_PIECE = struct.Struct("<cIIIIB")
_REMAP = struct.Struct("<III")
_NUMBER = struct.Struct("<Q")
_PAGE = struct.Struct("<I")


class PlanDigest:
    """Takes one plan's remaps and its pieces, each in the plan's order; ``value`` is the chain value after it."""

    def __init__(self, previous: bytes, number: int) -> None:
        self._remaps = [previous, _NUMBER.pack(number)]
        self._pieces: list[bytes] = []

    def remap(self, slot: int, index: int, page: int) -> None:
        """Entry ``index`` of the slot's table, as it stands after the plan."""
        self._remaps += (b"r", _REMAP.pack(slot, index, page))

    def piece(
        self,
        slot: int,
        start: int,
        tokens: bytes,
        appended: Sequence[int],
        table_length: int,
        write_from: int,
        sample: bool,
    ) -> None:
        """``appended``: the last entries of the slot's table, those that this piece added; ``table_length`` counts all."""
        pieces = self._pieces
        pieces.append(_PIECE.pack(b"p", slot, start, table_length, write_from, sample))
        if appended:
            pieces += map(_PAGE.pack, appended)
        pieces.append(tokens)

    @property
    def value(self) -> bytes:
        return hashlib.blake2b(
            b"".join(self._remaps + self._pieces), digest_size=DIGEST_BYTES
        ).digest()
