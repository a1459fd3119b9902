"""What a process measures of its own work: bytes, seconds and outcomes that the planner's core knows nothing of.

    rank's copy and I/O threads --> Meter --beside each heartbeat--> planner's process, which adds its own
    planner's process --beside each Snapshot--> frontend --> /metrics, /cache

Figures only rise while their process lives, and add up over processes. They are for metrics; nothing is decided by them.
"""

import bisect
import threading
from collections.abc import Iterator
from typing import TypeVar

import msgspec

SECONDS_BOUNDS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
TRANSFER_KINDS = ("backup", "load", "store", "fetch")
TICKET_PHASES = ("query", "fetch")
STORE_OPS = ("match", "get", "put")

T = TypeVar("T")


class Timing(msgspec.Struct, array_like=True):
    """A histogram of seconds: one bucket for each bound of `SECONDS_BOUNDS`, and one above."""

    total_s: float = 0.0
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))

    def observe(self, seconds: float) -> None:
        self.total_s += seconds
        self.buckets[bisect.bisect_left(SECONDS_BOUNDS, seconds)] += 1

    def add(self, other: "Timing") -> None:
        self.total_s += other.total_s
        self.buckets = [own + more for own, more in zip(self.buckets, other.buckets, strict=True)]


class Figures(msgspec.Struct, array_like=True):
    """Transfers by kind, the steps of tickets by phase, and ``store_ops``: keys by ``op/outcome``."""

    transfer_bytes: dict[str, int] = {}
    transfer_seconds: dict[str, Timing] = {}
    ticket_seconds: dict[str, Timing] = {}
    store_ops: dict[str, int] = {}

    def add(self, other: "Figures") -> None:
        """Add another process's figures to these."""
        for mine, more in (
            (self.transfer_bytes, other.transfer_bytes),
            (self.store_ops, other.store_ops),
        ):
            for key, count in more.items():
                mine[key] = mine.get(key, 0) + count
        for timings, others in (
            (self.transfer_seconds, other.transfer_seconds),
            (self.ticket_seconds, other.ticket_seconds),
        ):
            for key, timing in others.items():
                timings.setdefault(key, Timing()).add(timing)


class StoreState(msgspec.Struct, frozen=True):
    """The store as this replica last saw it. ``use``: objects and bytes by name; ``counters``: its own, if it keeps any.

    ``writing``: pages are on their way to it, or wait for that. ``lost``: what this kind of store
    cannot do, a line each. ``url``: without its password.
    """

    url: str = "none"
    writing: bool = False
    lost: tuple[str, ...] = ()
    use: dict[str, int] = {}
    counters: dict[str, int] = {}
    throttle: dict[str, int] = {}


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What goes beside a Snapshot. ``identity_s``: the model's content hashes took so long.
    ``without``: what nobody asked for and this machine does not give, so that the server does without,
    a line each."""

    figures: Figures = msgspec.field(default_factory=Figures)
    store: StoreState = StoreState()
    identity_s: float = 0.0
    without: tuple[str, ...] = ()


class Meter:
    """The figures of one process, fed by any of its threads."""

    def __init__(self) -> None:
        self._figures = Figures()
        self._lock = threading.Lock()

    def transfer(self, kind: str, size: int, seconds: float) -> None:
        """``size`` bytes were moved; ``kind`` is one of `TRANSFER_KINDS`."""
        assert kind in TRANSFER_KINDS, kind
        with self._lock:
            self._figures.transfer_bytes[kind] = self._figures.transfer_bytes.get(kind, 0) + size
            self._figures.transfer_seconds.setdefault(kind, Timing()).observe(seconds)

    def ticket(self, phase: str, seconds: float) -> None:
        assert phase in TICKET_PHASES, phase
        with self._lock:
            self._figures.ticket_seconds.setdefault(phase, Timing()).observe(seconds)

    def store_op(self, op: str, outcome: str, count: int = 1) -> None:
        assert op in STORE_OPS, op
        with self._lock:
            key = f"{op}/{outcome}"
            self._figures.store_ops[key] = self._figures.store_ops.get(key, 0) + count

    def encoded(self) -> bytes:
        """The figures of now, as msgpack."""
        with self._lock:
            return msgspec.msgpack.encode(self._figures)


class FiguresOfRanks:
    """Sums over ranks that come and go: what an earlier epoch's ranks said last still counts."""

    def __init__(self) -> None:
        self._past = Figures()
        self._now: dict[int, Figures] = {}

    def heard(self, rank: int, encoded: bytes) -> None:
        """Raises ``ValueError`` if these are no figures."""
        self._now[rank] = _decode(Figures, encoded)

    def end_epoch(self) -> None:
        for figures in self._now.values():
            self._past.add(figures)
        self._now.clear()

    def total(self, *more: bytes) -> Figures:
        """Of all ranks, and of ``more`` encoded figures."""
        total = Figures()
        for figures in self._all(more):
            total.add(figures)
        return total

    def _all(self, more: tuple[bytes, ...]) -> Iterator[Figures]:
        yield self._past
        yield from self._now.values()
        for encoded in more:
            yield _decode(Figures, encoded)


def decode_report(encoded: bytes) -> Report:
    """Raises ``ValueError``."""
    return _decode(Report, encoded)


def encode_report(report: Report) -> bytes:
    return msgspec.msgpack.encode(report)


def _decode(kind: type[T], encoded: bytes) -> T:
    try:
        return msgspec.msgpack.decode(encoded, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"no figures: {error}") from error
