"""A holder's log as a performance model: which records its files have, and what is lost when one goes.

As `store.holder.log.log` without bytes: records fill files one after another; when the log is full the file that was least recently
read goes, and what was read in it since it was sealed is written anew, newest reads first, up to a quarter of the file.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from forebay.store.holder.log.log import (
    FILES_AT_CAPACITY,
    MAX_FILE_BYTES,
    MIN_FILE_BYTES,
    MOVED_SHARE,
)
from forebay.store.holder.log.record import BLOCK_BYTES, padded


@dataclass(slots=True, eq=False)
class Record:
    """One object. ``read_at``: tick of its last read, 0 if it was not read."""

    key: bytes
    generation: int
    length: int
    read_at: int = 0

    @property
    def size(self) -> int:
        """With its head, as it lies in the file."""
        return BLOCK_BYTES + padded(self.length)


@dataclass(slots=True, eq=False)
class LogFile:
    """``used``: tick of its last read, or of its sealing."""

    size: int = 0
    used: int = 0
    sealed_at: int = 0
    records: dict[bytes, Record] = field(default_factory=dict)


class DiskLog:
    """At most ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used_bytes = 0
        self._file_bytes = max(MIN_FILE_BYTES, min(MAX_FILE_BYTES, capacity // FILES_AT_CAPACITY))
        self._sealed: OrderedDict[int, LogFile] = OrderedDict()
        self._active = LogFile()
        self._places: dict[bytes, LogFile] = {}
        self._tick = 0
        self._number = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def add(self, record: Record) -> tuple[list[Record], int]:
        """Append it. What was lost to make room for it, and bytes that were moved meanwhile. It must not be larger than the log."""
        lost, moved = self._make_room(record.size)
        self._append(record)
        return lost, moved

    def read(self, key: bytes, generation: int) -> Record | None:
        """The record, as read now."""
        file = self._places.get(key)
        record = file.records[key] if file is not None else None
        if file is None or record is None or record.generation != generation:
            return None
        self._tick += 1
        record.read_at = file.used = self._tick
        return record

    def _append(self, record: Record) -> None:
        if self._active.size and self._active.size + record.size > self._file_bytes:
            self._seal()
        stale = self._places.get(record.key)
        if stale is not None:  # its bytes stay in their file until that goes
            del stale.records[record.key]
        self._active.records[record.key] = record
        self._active.size += record.size
        self.used_bytes += record.size
        self._places[record.key] = self._active

    def _seal(self) -> None:
        self._tick += 1
        self._number += 1
        self._active.used = self._active.sealed_at = self._tick
        self._sealed[self._number] = self._active
        self._active = LogFile()

    def _make_room(self, size: int) -> tuple[list[Record], int]:
        lost: list[Record] = []
        moved = 0
        while self.used_bytes + size > self.capacity:
            if self._active.size:
                self._seal()
            records, kept = self._evict()
            lost += records
            moved += kept
        return lost, moved

    def _evict(self) -> tuple[list[Record], int]:
        number = min(self._sealed, key=lambda each: self._sealed[each].used)
        file = self._sealed.pop(number)
        self.used_bytes -= file.size
        for key in file.records:
            del self._places[key]
        budget = min(file.size // MOVED_SHARE, self.capacity - self.used_bytes)
        lost, moved = [], 0
        for record in sorted(file.records.values(), key=lambda each: -each.read_at):
            if record.read_at > file.sealed_at and moved + record.size <= budget:
                moved += record.size
                self._append(record)
            else:
                budget = 0
                lost.append(record)
        return lost, moved
