"""Free space of one holder's segment: best fit over coalesced extents.

Only free extents are kept (who owns the rest is known by its owner), so a million objects cost nothing here:

    starts  {start: size}    ends  {end: start}    by size  {size: {start: None}} + sorted sizes

``take`` is a bisect over the *distinct* sizes, of which a store of equal pages has a handful.
"""

from bisect import bisect_left, bisect_right, insort

ALIGN_BYTES = 64


def footprint(length: int, header_bytes: int) -> int:
    """Bytes that an object of ``length`` bytes takes in a segment, header included, rounded up to ``ALIGN_BYTES``."""
    return (length + header_bytes + ALIGN_BYTES - 1) & -ALIGN_BYTES


class Extents:
    """Half-open free ranges in [0, capacity). Sizes and offsets are multiples of ``ALIGN_BYTES``."""

    __slots__ = ("_by_size", "_ends", "_order", "_sizes", "_starts", "capacity", "free_bytes")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity & -ALIGN_BYTES
        self.free_bytes = 0
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        self._order: list[int] | None = None  # sorted starts, kept only between calls of `reserve`
        if self.capacity:
            self._add(0, self.capacity)
            self.free_bytes = self.capacity

    def take(self, size: int) -> int | None:
        """The start of ``size`` bytes out of the smallest extent that has them, or None."""
        place = bisect_left(self._sizes, size)
        if place == len(self._sizes):
            return None
        found = self._sizes[place]
        start = next(iter(self._by_size[found]))
        self._cut(start, start, start + size)
        return start

    def reserve(self, start: int, size: int) -> bool:
        """Take exactly [start, start + size); False, and nothing taken, unless all of it is free.

        A run of calls (a holder's inventory) costs a bisect each.
        """
        order = sorted(self._starts) if self._order is None else self._order
        place = bisect_right(order, start) - 1
        if size <= 0 or place < 0 or start + size > order[place] + self._starts[order[place]]:
            self._order = order
            return False
        begin = order[place]
        stop = begin + self._starts[begin]
        self._cut(begin, start, start + size)
        pieces = [
            piece
            for piece, some in ((begin, begin < start), (start + size, start + size < stop))
            if some
        ]
        order[place : place + 1] = pieces
        self._order = order
        return True

    def give(self, start: int, size: int) -> None:
        """Return a range that was taken. It grows together with free neighbours."""
        self.free_bytes += size
        end = start + size
        assert end <= self.capacity and start not in self._starts and end not in self._ends, (
            start,
            size,
        )
        before = self._ends.pop(start, None)
        if before is not None:
            self._unfile(before, start - before)
            start = before
        after = self._starts.pop(end, None)
        if after is not None:
            self._unfile(end, after)
            end += after
        self._add(start, end - start)

    def ranges(self) -> list[tuple[int, int]]:
        """Free (start, size) pairs in order of start."""
        return sorted(self._starts.items())

    def _cut(self, begin: int, start: int, end: int) -> None:
        """Take [start, end) out of the free extent that begins at ``begin``."""
        size = self._starts.pop(begin)
        stop = begin + size
        self._unfile(begin, size)
        if begin < start:
            self._add(begin, start - begin)
        if end < stop:
            self._add(end, stop - end)
        else:
            del self._ends[stop]
        self.free_bytes -= end - start

    def _add(self, start: int, size: int) -> None:
        """A free extent, whose start is new and whose end is new or that of what it is the rest of."""
        self._order = None
        self._starts[start] = size
        self._ends[start + size] = start
        peers = self._by_size.get(size)
        if peers is None:
            self._by_size[size] = {start: None}
            insort(self._sizes, size)
        else:
            peers[start] = None

    def _unfile(self, start: int, size: int) -> None:
        """Out of its size; the caller sees to ``_starts`` and ``_ends``."""
        self._order = None
        peers = self._by_size[size]
        if len(peers) > 1:
            del peers[start]
        else:
            del self._by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
