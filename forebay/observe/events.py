"""The span ring: what each process did when, cheap enough to be always on.

A span is (kind, start, duration, id, extra). A ring keeps the last ``capacity`` spans of one process in preallocated lists, so
recording allocates nothing that grows and takes well under a microsecond; it can be drained to a file (a flight record) at any
moment. Rings of all processes are merged by `forebay timeline` into one Chrome/Perfetto trace. Times are
``time.monotonic_ns()``, which on Linux all processes of a machine share.
"""

import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

DEFAULT_CAPACITY = 1 << 16


class SpanKind(StrEnum):
    QUEUE = "queue"
    QUERY = "query"
    TICKET = "ticket"
    FETCH = "fetch"
    LOAD = "load"
    FORWARD = "forward"
    RECEIVE = "receive"
    BACKUP = "backup"
    STORE = "store"
    PLAN = "plan"
    ACK = "ack"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """``id`` names the plan, transfer or slot; ``value`` is the kind's own measure (tokens, pages, layer)."""

    kind: SpanKind
    start_ns: int
    duration_ns: int
    id: int = 0
    value: int = 0


class FlightRecord(msgspec.Struct, frozen=True):
    """A drained ring, as written to disk (msgpack)."""

    process: str
    pid: int
    reason: str
    spans: list[Span]


class SpanRing:
    """The last ``capacity`` spans of this process. One writer thread; readers take a snapshot."""

    def __init__(self, process: str, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"ring capacity is {capacity}; it must be at least 1")
        self.process = process
        self._spans: list[Span | None] = [None] * capacity
        self._next = 0

    def record(self, kind: SpanKind, start_ns: int, id: int = 0, value: int = 0, *, end_ns: int | None = None) -> None:
        """A span that began at ``start_ns`` and ends now (or at ``end_ns``)."""
        stop = time.monotonic_ns() if end_ns is None else end_ns
        self._spans[self._next % len(self._spans)] = Span(kind, start_ns, stop - start_ns, id, value)
        self._next += 1

    def __len__(self) -> int:
        return min(self._next, len(self._spans))

    def __iter__(self) -> Iterator[Span]:
        """Spans from the oldest kept to the newest."""
        capacity = len(self._spans)
        for index in range(max(0, self._next - capacity), self._next):
            span = self._spans[index % capacity]
            if span is not None:
                yield span

    def dump(self, path: Path, pid: int, reason: str) -> None:
        """Write a flight record beside and rename it into place, so that a reader never meets half of one."""
        record = FlightRecord(self.process, pid, reason, list(self))
        beside = path.with_name(f".{path.name}.{pid}.tmp")
        beside.write_bytes(msgspec.msgpack.encode(record))
        beside.replace(path)


def read_flight_record(path: Path) -> FlightRecord:
    """Raises ``ValueError`` naming the file if it is not a flight record."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=FlightRecord)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a flight record: {error}") from error
