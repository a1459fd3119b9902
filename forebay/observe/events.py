"""The span ring: what each process did when, cheap enough to be always on.

A ring keeps the last ``capacity`` spans of one process in memory that others may share (a memfd): whoever holds it reads what a
process did up to its last moment, also when that process was killed or stands still. Recording takes about a microsecond and
never waits. Times are ``time.monotonic_ns()``, which on Linux all processes of a machine share.

    | sequence | start | duration | id | value | request | pid | kind | part | sequence again |   64 bytes, little endian

A reader takes a record only if both sequence numbers are those that belong there: one that is just being written has two.
"""

import contextlib
import itertools
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.core.spans import SpanKind, TimedSpan

CAPACITY = 1 << 15
RECORD_BYTES = 64
NS = 1_000_000_000
_RECORD = struct.Struct("<QqqqqqIHhQ")
_FIELDS = np.dtype(
    [
        ("sequence", "<u8"), ("start_ns", "<i8"), ("duration_ns", "<i8"), ("id", "<i8"), ("value", "<i8"),
        ("request", "<i8"), ("pid", "<u4"), ("kind", "<u2"), ("part", "<i2"), ("check", "<u8"),
    ]
)  # fmt: skip
_KINDS = tuple(SpanKind)
_INDEX = {kind: index for index, kind in enumerate(_KINDS)}
_VERSION = 1

Records = npt.NDArray[np.void]


class Span(msgspec.Struct, frozen=True):
    """``kind`` is a `SpanKind` of the program that wrote it; the others are said there."""

    kind: str
    start_ns: int
    duration_ns: int
    id: int = 0
    value: int = 0
    part: int = -1
    request: int = 0
    pid: int = 0


class RingDump(msgspec.Struct, frozen=True):
    """The records of one ring, oldest first."""

    process: str
    records: bytes


class FlightRecord(msgspec.Struct, frozen=True):
    """All rings of one server at one moment, as written to disk (msgpack).

    ``wall_ns`` - ``monotonic_ns`` places the spans on the wall clock, which records of other machines share; those of the same
    ``boot_id`` share the monotonic clock itself.
    """

    version: int
    reason: str
    wall_ns: int
    monotonic_ns: int
    boot_id: str
    kinds: tuple[str, ...]
    rings: tuple[RingDump, ...]


class SpanRing:
    """Spans of one process, in shared or private memory. Threads of the process may record at once; others only read."""

    def __init__(self, process: str, memory: mmap.mmap | None = None) -> None:
        """``memory``: a map of whole records, zero or filled by an earlier process of the same name; None = a private one."""
        self.process = process
        self._memory = mmap.mmap(-1, CAPACITY * RECORD_BYTES) if memory is None else memory
        self._capacity = len(self._memory) // RECORD_BYTES
        assert self._capacity >= 1
        self._pid = os.getpid()
        self._sequence = itertools.count(int(self.snapshot()["sequence"].max(initial=0)) + 1)

    @classmethod
    def at(cls, process: str, fd: int) -> "SpanRing":
        """The ring in the memory behind a descriptor, which stays the caller's."""
        return cls(process, mmap.mmap(fd, 0))

    def record(
        self,
        kind: SpanKind,
        start_ns: int,
        id: int = 0,
        value: int = 0,
        part: int = -1,
        request: int = 0,
        *,
        end_ns: int | None = None,
    ) -> None:
        """A span that began at ``start_ns`` and ends now (or at ``end_ns``)."""
        duration = (time.monotonic_ns() if end_ns is None else end_ns) - start_ns
        number = next(
            self._sequence
        )  # one step under the interpreter's lock, so no two threads get the same
        at = number % self._capacity * RECORD_BYTES
        _RECORD.pack_into(
            self._memory, at, number, start_ns, duration, id, value, request, self._pid, _INDEX[kind], part, number
        )  # fmt: skip

    def record_all(self, spans: Sequence[TimedSpan]) -> None:
        """Spans as the planner's core says them."""
        for span in spans:
            start = int(span.start * NS)
            self.record(
                span.kind,
                start,
                span.id,
                span.value,
                span.part,
                span.request,
                end_ns=int(span.end * NS),
            )

    def snapshot(self) -> Records:
        """The records that are whole, oldest first; a copy."""
        found: Records = np.frombuffer(self._memory[:], _FIELDS)
        slots = np.arange(self._capacity, dtype=np.uint64)
        whole = (found["sequence"] == found["check"]) & (found["sequence"] > 0)
        found = found[whole & (found["sequence"] % np.uint64(self._capacity) == slots)]
        return found[np.argsort(found["sequence"])]

    def __iter__(self) -> Iterator[Span]:
        return _spans(self.snapshot(), _KINDS)


class Rings:
    """The rings of all processes of one server, made by the first of them and handed down to the others by descriptor.

    Anonymous memory (memfd): nothing of it is left when the last of them has ended, however that happened.
    """

    def __init__(self, names: Sequence[str], fds: Sequence[int]) -> None:
        self.fds = tuple(fds)
        self.rings = {name: SpanRing.at(name, fd) for name, fd in zip(names, fds, strict=True)}

    @classmethod
    def create(cls, names: Sequence[str]) -> "Rings":
        fds = [os.memfd_create(f"forebay-spans-{name.replace(' ', '-')}") for name in names]
        for fd in fds:
            os.ftruncate(fd, CAPACITY * RECORD_BYTES)
        return cls(names, fds)

    def close(self) -> None:
        """Give the descriptors back; the rings stay readable as long as this object lives. Safe to call again."""
        for fd in self.fds:
            os.close(fd)
        self.fds = ()

    def fd(self, name: str) -> int:
        return self.fds[list(self.rings).index(name)]

    def flight_record(self, reason: str, since_ns: int = 0) -> FlightRecord:
        """What all rings hold now; ``since_ns``: without spans that ended before."""
        dumps = []
        for name, ring in self.rings.items():
            records = ring.snapshot()
            records = records[records["start_ns"] + records["duration_ns"] >= since_ns]
            dumps.append(RingDump(name, records.tobytes()))
        kinds = tuple(kind.value for kind in _KINDS)
        return FlightRecord(
            _VERSION, reason, time.time_ns(), time.monotonic_ns(), _boot_id(), kinds, tuple(dumps)
        )


def spans_of(record: FlightRecord) -> dict[str, list[Span]]:
    """Spans by process, oldest first."""
    found = {}
    for ring in record.rings:
        found[ring.process] = list(_spans(np.frombuffer(ring.records, _FIELDS), record.kinds))
    return found


def write_flight_record(record: FlightRecord, path: Path) -> None:
    """Beside and renamed into place, so that a reader never meets half of one. Raises ``OSError``."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(msgspec.msgpack.encode(record))
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def read_flight_record(path: Path) -> FlightRecord:
    """Raises ``ValueError`` naming the file if it is not a flight record, and ``OSError``."""
    try:
        record = msgspec.msgpack.decode(path.read_bytes(), type=FlightRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a flight record: {error}") from error
    if record.version != _VERSION:
        raise ValueError(
            f"{path} is a flight record of version {record.version}; this program reads version {_VERSION}"
        )
    for ring in record.rings:
        if len(ring.records) % RECORD_BYTES or np.any(
            np.frombuffer(ring.records, _FIELDS)["kind"] >= len(record.kinds)
        ):
            raise ValueError(
                f"{path} is a damaged flight record: the spans of {ring.process!r} cannot be read"
            )
    return record


def _spans(records: Records, kinds: Sequence[str]) -> Iterator[Span]:
    for _, start, duration, id, value, request, pid, kind, part, _ in records.tolist():
        yield Span(kinds[kind], start, duration, id, value, part, request, pid)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
