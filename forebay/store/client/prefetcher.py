"""The threads behind ``exists(keys, prefetch=True)``: the probe itself only looks into the throttle and enqueues.

    probe -> throttle.admit -> queue -> [query read-only, keep what is on SSD only] -> PrefetchKeys to each holder, no answer wanted

What a get reads meanwhile is left out, here and at the holder: the hint came too late for it.
A holder that does not know the message drops it; one that does runs the promotions under its own id. A full queue declines.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.store.backend import Status
from forebay.store.throttle import PrefetchThrottle, State
from forebay.store.wire.messages import Place, Tier

THREADS = 4
CHUNK_KEYS = 128
MAX_QUEUED_CHUNKS = 256
BULK_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class PrefetchOptions:
    """``enabled``: whether probes with the hint do anything. ``get_wait_ms``: how long a get waits for promotions that are on their
    way before it reads the SSD (0 = not at all). ``hint_window_s``: for how long after a probe its read is expected."""

    enabled: bool = False
    dedup_ttl_s: float = 30.0
    cooldown_s: float = 5.0
    get_wait_ms: float = 0.0
    hint_window_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Chunk:
    keys: list[bytes]
    demand: bool


@dataclass
class PrefetchCounters:
    """Keys by what became of them. ``declined``: the queue was full."""

    sent: int = 0
    resident: int = 0
    missing: int = 0
    declined: int = 0
    failed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, other: "PrefetchCounters") -> None:
        for name in ("sent", "resident", "missing", "declined", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Prefetcher:
    """``query`` asks the master read-only; ``delegate(holder, keys, demand)`` hands keys to a holder, False if it cannot be reached.

    Threads start with the first key and end with ``close``.
    """

    def __init__(
        self,
        options: PrefetchOptions,
        query: Callable[[list[bytes], float], list[Place]],
        delegate: Callable[[int, list[bytes], bool], bool],
    ) -> None:
        self.options = options
        self.throttle = PrefetchThrottle(options.dedup_ttl_s, options.cooldown_s)
        self.counters = PrefetchCounters()
        self._query = query
        self._delegate = delegate
        self._queue: queue.Queue[Chunk | None] = queue.Queue(MAX_QUEUED_CHUNKS)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, keys: Sequence[bytes], *, demand: bool = False) -> int:
        """Enqueue those keys that were not prefetched lately; how many. ``demand``: a get wants them now."""
        admitted = self.throttle.admit(keys, time.monotonic(), despite_cooldown=demand)
        self._start()
        taken = 0
        for start in range(0, len(admitted), CHUNK_KEYS):
            chunk = admitted[start : start + CHUNK_KEYS]
            try:
                self._queue.put_nowait(Chunk(chunk, demand))
                taken += len(chunk)
            except queue.Full:
                self.throttle.move(chunk, State.FAILED, time.monotonic())
                self._count(declined=len(chunk))
        return taken

    def under_way(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of ``keys`` whose promotion was asked for and is not known to be over."""
        now = time.monotonic()
        live = (State.TRIGGERED, State.IN_FLIGHT, State.DELEGATED)
        return [key for key in keys if self.throttle.state(key, now) in live]

    def overtaken(self, keys: Sequence[bytes]) -> None:
        """A get reads these from the SSD now: a promotion that no holder was told of yet would read them a second time for nobody."""
        now = time.monotonic()
        late = [key for key in keys if self.throttle.state(key, now) is State.TRIGGERED]
        self.throttle.move(late, State.FAILED, now)

    def close(self) -> None:
        for _ in self._threads:
            try:
                self._queue.put(None, timeout=BULK_TIMEOUT_S)
            except queue.Full:
                break
        for thread in self._threads:
            thread.join(BULK_TIMEOUT_S)

    def _start(self) -> None:
        with self._lock:
            while len(self._threads) < THREADS:
                thread = threading.Thread(
                    target=self._run, name=f"prefetch-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _run(self) -> None:
        while (chunk := self._queue.get()) is not None:
            self._work(chunk)

    def _work(self, chunk: Chunk) -> None:
        places = self._query(chunk.keys, time.monotonic() + BULK_TIMEOUT_S)
        now = time.monotonic()
        if len(places) != len(chunk.keys):
            self.throttle.move(chunk.keys, State.FAILED, now)
            self._count(failed=len(chunk.keys))
            return
        resident, missing = [], []
        by_holder: dict[int, list[bytes]] = {}
        for key, place in zip(chunk.keys, places, strict=True):
            if place.code != Status.OK or place.length < 1:
                missing.append(key)
            elif place.spots[0].tier is Tier.MEMORY:
                resident.append(key)
            else:
                by_holder.setdefault(place.spots[0].holder, []).append(key)
        self.throttle.move(resident, State.ALREADY_RESIDENT, now)
        self.throttle.move(missing, State.FAILED, now)
        self._count(resident=len(resident), missing=len(missing))
        for holder, wanted in by_holder.items():
            keys = [key for key in wanted if self.throttle.state(key, now) is State.TRIGGERED]
            self._count(failed=len(wanted) - len(keys))
            if not keys:
                continue
            sent = self._delegate(holder, keys, chunk.demand)
            self.throttle.move(keys, State.DELEGATED if sent else State.FAILED, time.monotonic())
            self._count(**{"sent" if sent else "failed": len(keys)})

    def _count(self, **by: int) -> None:
        with self.counters.lock:
            for name, count in by.items():
                setattr(self.counters, name, getattr(self.counters, name) + count)
