"""What lies where in a holder's segment, and the rule that settles which of two writers of one range wins: the higher stamp.

The master never gives one range to two, but a message of its predecessor, or of a writer it gave up on, may still arrive. A write
retires everything older that it overlaps, and is refused if it overlaps anything newer.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator

from forebay.store.holder.segment import HEADER_BYTES, Segment
from forebay.store.master.extents import footprint


class Entry:
    """One object in memory. ``live``: all of it is written. ``gone``: its range is no longer its own; whoever still writes stops.

    ``busy``: a thread is copying into it, which cannot be called back; ``abort`` ends the connection that is filling it instead.
    ``buried``: removed, and only here until the master retires it. ``logging``: it waits for, or is in, the log.
    """

    __slots__ = (
        "abort",
        "buried",
        "busy",
        "crc",
        "generation",
        "gone",
        "key",
        "length",
        "live",
        "logging",
        "offset",
        "stamp",
        "tenant",
    )

    def __init__(
        self,
        tenant: str,
        key: bytes,
        generation: int,
        stamp: int,
        offset: int,
        length: int,
        crc: int,
    ) -> None:
        self.tenant = tenant
        self.key = key
        self.generation = generation
        self.stamp = stamp
        self.offset = offset
        self.length = length
        self.crc = crc
        self.live = self.gone = self.buried = self.logging = self.busy = False
        self.abort: Callable[[], None] | None = None

    @property
    def end(self) -> int:
        return self.offset + footprint(self.length, HEADER_BYTES)


class Memory:
    """The index of one segment. Used by the loop's thread alone. ``noticed`` hears of what has become readable, or no longer is."""

    def __init__(self, segment: Segment, noticed: Callable[[Entry], None] = lambda _: None) -> None:
        self._segment = segment
        self._noticed = noticed
        self._offsets: list[int] = []  # sorted
        self._entries: dict[int, Entry] = {}
        self._by_key: dict[tuple[str, bytes], tuple[Entry, ...]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """In order of offset."""
        return iter([self._entries[offset] for offset in self._offsets])

    def begin(self, entry: Entry) -> bool:
        """Take the range of ``entry`` for writing; False if it does not fit the segment, something newer has it, or a thread is
        still at work there."""
        if entry.length < 1 or not self._segment.fits(entry.offset, entry.length):
            return False
        overlapped = self._overlapping(entry.offset, entry.end)
        if any(other.busy or other.stamp >= entry.stamp for other in overlapped):
            return False
        for other in overlapped:
            self.drop(other)
        self._segment.begin(entry.offset, entry.stamp, entry.length)
        self._entries[entry.offset] = entry
        insort(self._offsets, entry.offset)
        place = (entry.tenant, entry.key)
        self._by_key[place] = (*self._by_key.get(place, ()), entry)
        return True

    def publish(self, entry: Entry) -> bool:
        """``entry`` is all written; False if its range was taken from it meanwhile."""
        if entry.gone:
            return False
        entry.live = True
        self._segment.publish(entry.offset)
        self._noticed(entry)
        return True

    def drop(self, entry: Entry) -> None:
        """Forget ``entry``, and let every reader know."""
        if entry.gone:
            return
        self._segment.retire(entry.offset)
        was_live = entry.live
        entry.gone, entry.live = True, False
        if entry.abort is not None:
            entry.abort()
        if not entry.busy:
            self._unlink(entry)
        if was_live:
            self._noticed(entry)

    def copied(self, entry: Entry) -> None:
        """The thread that copied into ``entry`` is done."""
        entry.busy = False
        if entry.gone:
            self._unlink(entry)

    def _unlink(self, entry: Entry) -> None:
        del self._entries[entry.offset]
        del self._offsets[bisect_left(self._offsets, entry.offset)]
        place = (entry.tenant, entry.key)
        rest = tuple(other for other in self._by_key[place] if other is not entry)
        if rest:
            self._by_key[place] = rest
        else:
            del self._by_key[place]

    def retire(self, offset: int, stamp: int) -> None:
        """The master's word that the range is free. Something newer there is left alone."""
        entry = self._entries.get(offset)
        if entry is not None and entry.stamp == stamp:
            self.drop(entry)

    def at(self, offset: int, stamp: int) -> Entry | None:
        """The live entry there, if it still is the one that is meant."""
        entry = self._entries.get(offset)
        return entry if entry is not None and entry.live and entry.stamp == stamp else None

    def of(self, tenant: str, key: bytes) -> tuple[Entry, ...]:
        return self._by_key.get((tenant, key), ())

    def _overlapping(self, start: int, end: int) -> list[Entry]:
        first = max(0, bisect_right(self._offsets, start) - 1)
        last = bisect_left(self._offsets, end)
        return [
            entry
            for offset in self._offsets[first:last]
            if (entry := self._entries[offset]).end > start
        ]
