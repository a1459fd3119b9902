"""The store of a simulated cluster: the master that ships, holders as performance models, and what ranks ask of them.

    Replay ──MatchPrefix──┐
    StageGrid ──Get───────┼──> Master.step ──Located, Granted──> reads and writes on the holders' links
    StageGrid ──PutStart, PutEnd─┘    └──Promote, Allocated, Prefetchable──> Holder

Eviction, leases, quotas of promotions, refusals and waits for room are the master's own. An object is what one stage stores of a page:
its tensor-parallel ranks' parts together, since they write and read in step. Questions of ranks take the time that reads and writes
have for latency; words between holders and master take `network.latency_s`.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.sim.cluster import Cluster
from forebay.sim.devices import Link
from forebay.sim.heap import EventHeap
from forebay.sim.holders import HEARD, TENANT, Holder
from forebay.store.backend import Status
from forebay.store.client.gets import LEASE_MARGIN_S
from forebay.store.client.prefetcher import CHUNK_KEYS, PrefetchOptions
from forebay.store.master.machine import Connected, Event, FromClient, FromHolder, Master, Ticked
from forebay.store.master.records import MasterConfig, Send
from forebay.store.throttle import PrefetchThrottle, State
from forebay.store.wire.messages import (
    AGAIN,
    ClientToMaster,
    Count,
    Get,
    Grant,
    Granted,
    HolderToMaster,
    Located,
    MasterToClient,
    MatchPrefix,
    Place,
    PutEnd,
    PutStart,
    Query,
    Tier,
)

TICK_S = 0.05
CLIENT = 1  # the session of all ranks; holders' follow


@dataclass(slots=True)
class Read:
    """Objects that one get located, from the front, and when its lease ends. ``at``: when they have left their holders."""

    keys: list[bytes]
    places: list[Place]
    lease_ends: float
    at: float


class StoreModel:
    """``part_bytes``: what one stage stores of a page; ``read_bytes``: what its ranks read of it together."""

    def __init__(self, cluster: Cluster, heap: EventHeap, randomness: random.Random) -> None:
        self._cluster, self._heap = cluster, heap
        self.part_bytes = cluster.block_bytes * cluster.writers
        self.read_bytes = cluster.block_bytes * cluster.engine.tp
        self.read_from = {"dram": 0, "ssd": 0}
        self.expired = 0
        self._parts = [bytes([stage]) for stage in range(cluster.engine.pp)]
        self.master = Master(_config(cluster), 0.0, epoch=1, secret=b"simulated")
        self._waiters: dict[int, Callable[[MasterToClient], None]] = {}
        self._call = 0
        self._ticked_at = 0.0
        self._tick_due = False
        self._throttle = PrefetchThrottle(*_throttle_times())
        self._step(Connected(CLIENT, TENANT))
        self.holders: list[Holder] = []
        for number in range(cluster.store.holders):
            self._join(number, randomness)

    @property
    def counters(self) -> dict[str, int]:
        """The master's."""
        return self.master.state.counters

    # ------------------------------------------------------------------------------------------ the master

    def _join(self, number: int, randomness: random.Random) -> None:
        session = CLIENT + 1 + number
        latency_s = self._cluster.network.latency_s

        def tell(message: HolderToMaster) -> None:
            self._heap.after(latency_s, lambda: self._step(FromHolder(session, message)))

        holder = Holder(f"holder-{number}", self._cluster, self._heap, randomness, tell)
        self.holders.append(holder)
        self._step(Connected(session, "@holder"))
        for message in holder.introduction():
            self._step(FromHolder(session, message))

    def _step(self, event: Event) -> None:
        """With the tick that is due, so that nobody has to be woken only for it."""
        now = self._heap.now
        if now - self._ticked_at >= TICK_S:
            self._ticked_at = now
            self._carry_out(self.master.step(now, Ticked()))
        self._carry_out(self.master.step(now, event))
        if self.master.state.waiting and not self._tick_due:
            self._tick_due = True
            self._heap.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        self._step(Ticked())

    def _carry_out(self, effects: Sequence[object]) -> None:
        for effect in effects:
            assert isinstance(effect, Send), f"the master closed a connection: {effect}"
            if effect.session == CLIENT:
                self._waiters.pop(effect.message.call)(effect.message)  # type: ignore[union-attr, arg-type]
            elif type(effect.message) in HEARD:
                holder = self.holders[effect.session - CLIENT - 1]
                self._heap.after(
                    self._cluster.network.latency_s,
                    lambda holder=holder, effect=effect: holder.hear(effect.message),  # type: ignore[misc]
                )

    def _ask(self, make: Callable[[int], ClientToMaster], then: Callable[..., None]) -> None:
        self._call += 1
        self._waiters[self._call] = then
        self._step(FromClient(CLIENT, make(self._call)))

    # ------------------------------------------------------------------------------------------ what ranks and planners ask

    def match(self, hashes: Sequence[bytes]) -> int:
        """Leading pages of which all stages' parts are there."""
        found: list[int] = []

        def answered(answer: Count) -> None:
            found.append(answer.count)

        self._ask(lambda call: MatchPrefix(call, [*hashes], self._parts), answered)
        return found[0]

    def get(self, hashes: Sequence[bytes], stage: int) -> Read:
        """Lease and read a stage's part of pages, as many from the front as are there."""
        keys = [hash + self._parts[stage] for hash in hashes]
        located: list[Located] = []
        self._ask(lambda call: Get(call, keys), located.append)
        now = self._heap.now
        read = Read([], [], now + located[0].ttl_s - LEASE_MARGIN_S, now)
        for key, place in zip(keys, located[0].places, strict=True):
            left_at = self._leave(key, place) if place.code == Status.OK else None
            if left_at is None:
                break
            read.keys.append(key)
            read.places.append(place)
            read.at = max(read.at, left_at)
        return read

    def good(self, read: Read) -> int:
        """How many of the objects count, now that the last byte is there: those that a lease kept, or that still are where they were
        (rule ST1)."""
        if self._heap.now <= read.lease_ends or not read.keys:
            return len(read.keys)
        located: list[Located] = []
        self._ask(lambda call: Query(call, read.keys), located.append)
        count = 0
        for before, after in zip(read.places, located[0].places, strict=True):
            if before.spots[0].tier is Tier.MEMORY and (
                after.code != Status.OK or before.spots[0] not in after.spots
            ):
                self.expired += 1
                break
            count += 1
        return count

    def hint(self, hashes: Sequence[bytes], stage: int) -> None:
        """Prefetch on exist, as a client does it: keys not asked for lately that are on SSD alone are named to their holders."""
        if not self._cluster.store.ssd_prefetch:
            return
        keys = self._throttle.admit([hash + self._parts[stage] for hash in hashes], self._heap.now)
        for start in range(0, len(keys), CHUNK_KEYS):
            some = keys[start : start + CHUNK_KEYS]
            self._ask(
                lambda call, some=some: Query(call, some),  # type: ignore[misc]
                lambda answer, some=some: self._delegate(some, answer),
            )

    def _delegate(self, keys: Sequence[bytes], answer: Located) -> None:
        now = self._heap.now
        by_holder: dict[int, list[bytes]] = {}
        for key, place in zip(keys, answer.places, strict=True):
            if place.code != Status.OK:
                self._throttle.move([key], State.FAILED, now)
            elif place.spots[0].tier is Tier.MEMORY:
                self._throttle.move([key], State.ALREADY_RESIDENT, now)
            else:
                by_holder.setdefault(place.spots[0].holder, []).append(key)
        for number, some in by_holder.items():
            self._throttle.move(some, State.DELEGATED, now)
            holder = self.holders[number - 1]
            self._heap.after(
                self._cluster.network.latency_s,
                lambda holder=holder, some=some: holder.prefetch(
                    some, PrefetchOptions.hint_window_s
                ),  # type: ignore[misc]
            )

    def put(
        self, hashes: Sequence[bytes], stage: int, nic: Link, done: Callable[[bytes], None]
    ) -> None:
        """Store a stage's part of pages; ``nic``: of each of its ranks. ``done`` hears page by page whether it is there."""
        Put(self, [hash + self._parts[stage] for hash in hashes], nic, done).round()

    def fill(self, hashes: Sequence[bytes]) -> None:
        """These pages are there from the start, as if they had been stored long ago."""
        for hash in hashes:
            for part in self._parts:
                self._fill(hash + part)

    def _fill(self, key: bytes) -> None:
        granted: list[Granted] = []
        self._ask(lambda call: PutStart(call, [key], [self.part_bytes]), granted.append)
        grant = granted[0].grants[0]
        if grant.code != Status.OK:
            return
        holder = grant.rooms[0].holder
        for word in self.holders[holder - 1].log_at_once(key, grant.generation, self.part_bytes):
            self._step(FromHolder(CLIENT + holder, word))
        self._ask(lambda call: PutEnd(call, [key], [grant.generation], [()]), lambda answer: None)

    def _leave(self, key: bytes, place: Place) -> float | None:
        """When an object has left its holder; None if the log lost it a moment ago."""
        spot, now = place.spots[0], self._heap.now
        holder = self.holders[spot.holder - 1]
        ready = now
        if spot.tier is Tier.SSD:
            read_at = holder.read_log(key, place.generation)
            if read_at is None:
                return None
            ready = read_at
            self.read_from["ssd"] += self.read_bytes
        else:
            self.read_from["dram"] += self.read_bytes
        return max(holder.nic_out.move(now, self.read_bytes), ready)


class Put:
    """One order of a stage's ranks: rounds of PutStart, bytes, PutEnd, until every key has an answer (as `store.client.puts`)."""

    def __init__(
        self, store: StoreModel, keys: list[bytes], nic: Link, done: Callable[[bytes], None]
    ) -> None:
        self._store, self._keys, self._nic, self._done = store, keys, nic, done
        self._stored: dict[bytes, bool] = {}

    def round(self) -> None:
        pending = [key for key in self._keys if key not in self._stored]
        if not pending:
            self._done(bytes(self._stored[key] for key in self._keys))
            return
        length = self._store.part_bytes
        self._store._ask(
            lambda call: PutStart(call, pending, [length] * len(pending)),
            lambda answer: self._granted(pending, answer),
        )

    def _granted(self, pending: list[bytes], answer: Granted) -> None:
        rooms: list[tuple[bytes, Grant]] = []
        for key, grant in zip(pending, answer.grants, strict=True):
            if grant.rooms:
                rooms.append((key, grant))
            elif grant.code != AGAIN:
                self._stored[key] = grant.code == Status.EXISTS
        if not rooms:
            self.round()
            return
        store, heap = self._store, self._store._heap
        now, size, holders = heap.now, store.part_bytes, store.holders
        sent = self._nic.move(now, len(rooms) * store._cluster.block_bytes)
        arrivals = [holders[grant.rooms[0].holder - 1].nic_in.move(now, size) for _, grant in rooms]
        heap.at(max(sent, *arrivals), lambda: self._written(rooms))

    def _written(self, rooms: list[tuple[bytes, Grant]]) -> None:
        store = self._store
        for key, grant in rooms:
            store.holders[grant.rooms[0].holder - 1].written(
                key, grant.generation, store.part_bytes
            )
        keys, generations = [key for key, _ in rooms], [grant.generation for _, grant in rooms]

        def ended(answer: MasterToClient) -> None:
            for key, code in zip(keys, answer.codes, strict=True):  # type: ignore[union-attr]
                self._stored[key] = code == Status.OK
            self.round()

        store._ask(lambda call: PutEnd(call, keys, generations, [()] * len(keys)), ended)


def _config(cluster: Cluster) -> MasterConfig:
    """Nobody falls silent here, and all holders are there from the start."""
    store = cluster.store
    return MasterConfig(
        lease_s=store.lease_s, high_watermark=store.high_watermark, low_watermark=store.low_watermark, put_wait_s=store.put_wait_s,
        promotion_on_hit=store.promotion_on_hit, ssd_prefetch=store.ssd_prefetch, prefetch_share=store.prefetch_share,
        hit_threshold=store.hit_threshold, silence_s=math.inf, settle_s=0.0,
    )  # fmt: skip


def _throttle_times() -> tuple[float, float]:
    return PrefetchOptions.dedup_ttl_s, PrefetchOptions.cooldown_s
