"""A count-min sketch of recent gets, to admit to DRAM what is read often enough.

Cormode and Muthukrishnan 2005: ``ROWS`` hashed rows of counters, an estimate is the smallest of its row's counters, never too
low. All counters are halved after ``width`` additions, so old fame fades. Hashes are BLAKE2b of the key: equal in every process.
"""

from hashlib import blake2b
from struct import Struct

ROWS = 4
_WORDS = Struct("<4I")


class CountMinSketch:
    """``width`` counters a row, rounded up to a power of two; memory is ``ROWS * width`` bytes."""

    __slots__ = ("_added", "_mask", "_rows")

    def __init__(self, width: int = 1 << 16) -> None:
        width = 1 << max(4, (width - 1).bit_length())
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(ROWS)]
        self._added = 0

    def add(self, key: bytes) -> int:
        """Count one more of ``key``; the new estimate, at most 255."""
        low = 255
        for row, word in zip(
            self._rows, _WORDS.unpack(blake2b(key, digest_size=16).digest()), strict=True
        ):
            place = word & self._mask
            count = min(255, row[place] + 1)
            row[place] = count
            low = min(low, count)
        self._added += 1
        if self._added > self._mask:
            self._halve()
        return low

    def estimate(self, key: bytes) -> int:
        words: tuple[int, ...] = _WORDS.unpack(blake2b(key, digest_size=16).digest())
        return min(row[word & self._mask] for row, word in zip(self._rows, words, strict=True))

    def _halve(self) -> None:
        self._added = 0
        halves = bytes(value >> 1 for value in range(256))
        self._rows = [row.translate(halves) for row in self._rows]
