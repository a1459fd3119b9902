"""One history of the store: the real master, holders, writers and readers in virtual time, with faults drawn from the seed.

    client --> channel --> Master.step --> channel --> client, holder        every connection may break, every process may die
    client --> holder: a put's bytes; holder's memory --> client: header, bytes in two halves, header again

Checked from outside: a get brings what the key names and nothing that was removed or replaced before it was asked for; leases have a
reason (a get, a finished promotion, an inventory); a copy that the master believes in is there (durability); one key is not promoted
again and again; and at the end everything that was acknowledged and logged is found, and nothing waits.
"""

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import pairwise

from forebay.sim.coverage import Cell
from forebay.sim.heap import Channel, EventHeap
from forebay.sim.preset import Preset
from forebay.sim.store_coverage import StoreActivity, StoreFault, cells_of
from forebay.sim.store_holder import LogKey, SimHolder
from forebay.store.backend import Status
from forebay.store.master.invariants import check
from forebay.store.master.machine import (
    Connected,
    Disconnected,
    Event,
    FromClient,
    FromHolder,
    Master,
    Ticked,
)
from forebay.store.master.membership import RESTART_GRACE_S
from forebay.store.master.promotion import MAX_COMMIT_LEASE_S
from forebay.store.master.records import LEASE_SLACK_S, Close, MasterConfig, Send
from forebay.store.wire.messages import (
    ClientToMaster,
    Codes,
    Count,
    Get,
    Grant,
    Granted,
    HolderToMaster,
    Inventory,
    Located,
    MasterToClient,
    MasterToHolder,
    MatchPrefix,
    Persisted,
    Place,
    PromotionDone,
    PutEnd,
    PutRevoke,
    PutStart,
    Remove,
    Spot,
    Tier,
)

TENANT = "default"
KEYS = [b"k%d" % index for index in range(10)]
LENGTHS = (1000, 3000, 6000)
TICK_S = 0.2
BEAT_S = 0.5
RECONNECT_S = 0.3
SETTLE_S = 20.0
AWAY_S = (
    0.1,
    0.5,
    3.0,
    8.0,
)  # for how long a fault keeps something away: shorter than a put that is held up, and longer than any
HELD_UP = 0.2  # share of puts and reads whose client stands still meanwhile
RUSH = 6  # puts at once of a client that has found a master again
HARMLESS = (StoreFault.WRITER_LOST, StoreFault.SLOW_COPIES, StoreFault.RECORD_EVICTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    holders: int
    capacity: int
    replicas: int
    operations: int
    pace_s: float
    delay_s: float
    copy_s: float
    log_delay_s: float
    prefetch: bool
    revoked_share: float  # of puts that their writer gives up
    faults: tuple[StoreFault, ...]


@dataclass(slots=True)
class StoreReport:
    steps: int = 0
    met: Counter[str] = field(default_factory=Counter)
    cells: Counter[Cell] = field(default_factory=Counter)


def draw_store(randomness: random.Random, preset: Preset | None = None) -> StoreOptions:
    """Each history has its own mix; ``preset`` as for the engine, or any number of kinds up to three."""
    choice = randomness.choice
    faults = _draw_faults(randomness, preset)
    return StoreOptions(
        holders=choice([1, 2, 3]),
        capacity=choice([9_000, 20_000, 60_000]),
        replicas=choice([1, 2]),
        operations=randomness.randint(40, 120),
        pace_s=choice([0.02, 0.2, 0.6]),
        delay_s=choice([0.001, 0.02, 0.2]),
        copy_s=choice([0.001, 0.05, 0.5]),
        log_delay_s=choice([0.01, 0.3, 3.0]),
        prefetch=choice([True, True, False]),
        faults=faults,
        revoked_share=choice([0.0, 0.0, 0.3]),
    )


def _draw_faults(randomness: random.Random, preset: Preset | None) -> tuple[StoreFault, ...]:
    kinds, strikes = list(StoreFault), 3
    match preset:
        case Preset.LITE:
            swarm, strikes = randomness.sample(HARMLESS, randomness.randint(0, 1)), 1
        case Preset.ONE_FAULT:
            swarm = randomness.sample(kinds, 1)
        case Preset.STORM:
            swarm = randomness.sample(kinds, randomness.randint(2, 5))
        case None:
            swarm = randomness.sample(kinds, randomness.randint(0, 3))
    return tuple(kind for kind in swarm for _ in range(randomness.randint(1, strikes)))


def run_store_history(seed: int, preset: Preset | None = None) -> StoreReport:
    """Run one history to its end. Raises ``AssertionError`` if anything it checks does not hold."""
    return StoreHistory(seed, preset).run()


def value_of(key: bytes, length: int) -> bytes:
    """Keys name their content: equal key and length, equal bytes."""
    unit = hashlib.sha256(b"%s %d" % (key, length)).digest()
    return (unit * (length // len(unit) + 1))[:length]


class Peer:
    """One connection: in order each way; what is under way when it breaks is lost."""

    def __init__(
        self, heap: EventHeap, session: int, hear: Callable[..., None], lost: Callable[[], None]
    ) -> None:
        self.session = session
        self.hear = hear
        self.lost = lost
        self.alive = True
        self.up, self.down = Channel(heap), Channel(heap)


class Oracle:
    """What clients may and must see. An item is (key, length); ``put``: the newest generation that was offered of each."""

    def __init__(self) -> None:
        self.put: dict[tuple[bytes, int], int] = {}
        self.dead: dict[
            tuple[bytes, int], float
        ] = {}  # since when it was acknowledged as removed or replaced
        self.stored_as: dict[tuple[bytes, int], int] = {}
        self.unsure: set[bytes] = (
            set()
        )  # a put or a removal of it is under way, or its answer never came
        self.acknowledged: dict[bytes, int] = {}

    def offered(self, key: bytes, length: int, generation: int) -> None:
        self.put[key, length] = generation
        self.dead.pop((key, length), None)
        self.unsure.add(key)

    def stored(self, key: bytes, length: int, generation: int, now: float, alone: bool) -> None:
        """``alone``: no other write or removal of the key was under way."""
        self.acknowledged[key] = length
        self.stored_as[key, length] = generation
        if alone:
            self.unsure.discard(key)
        self._kill(key, generation - 1, now)

    def removed(self, key: bytes, newest: int, now: float, alone: bool) -> None:
        """``newest``: the highest generation of the key that was known to be stored when the removal was asked for."""
        if alone:
            self.acknowledged.pop(key, None)
            self.unsure.discard(key)
        self._kill(key, newest, now)

    def newest(self, key: bytes) -> int:
        """The highest generation of the key that is known to be stored."""
        return max(
            (generation for item, generation in self.stored_as.items() if item[0] == key), default=0
        )

    def got(self, key: bytes, length: int, asked_at: float) -> None:
        assert (key, length) in self.put, f"a get of {key!r} brought what nobody put"
        died_at = self.dead.get((key, length))
        assert died_at is None or died_at >= asked_at, (
            f"{key!r} of {length} bytes was removed or replaced, and came back"
        )

    def _kill(self, key: bytes, newest: int, now: float) -> None:
        for item, generation in self.put.items():
            if item[0] == key and generation <= newest:
                self.dead.setdefault(item, now)


class StoreHistory:
    """``partial``: the master has restarted while a holder was away, so what it kept may be missing or, removed, be seen again."""

    def __init__(self, seed: int, preset: Preset | None = None) -> None:
        self.random = random.Random(seed)
        self.options = draw_store(self.random, preset)
        self._waits = preset is Preset.STORM  # half of the faults wait for something to strike at
        self._armed: list[tuple[StoreFault, StoreActivity]] = []
        self._traffic_ends = 0.0
        self.heap = EventHeap()
        self.report = StoreReport()
        self.config = MasterConfig(
            replicas=self.options.replicas, ssd_prefetch=self.options.prefetch, promotion_on_hit=self.options.prefetch,
            prefetch_share=0.4, task_timeout_s=5.0, settle_s=6.0 if self._waits else 2.0,
        )  # fmt: skip
        self.epoch = 1
        self.master: Master | None = Master(self.config, 0.0, epoch=1, secret=b"s")
        self.oracle = Oracle()
        self.partial = False
        self.slow = 1.0
        self._peers: dict[int, Peer] = {}
        self._sessions = 0
        self._calls: dict[int, Callable[[MasterToClient], None]] = {}
        self._call = 0
        self._puts = 0
        self._reading = 0
        self._writing: defaultdict[bytes, set[int]] = defaultdict(
            set
        )  # puts and removals under way
        self._overlapped: set[int] = (
            set()
        )  # those that were under way together with another of their key
        self._leases: dict[bytes, float] = {}
        self._durable: set[LogKey] = set()
        self._unheard: set[LogKey] = set()  # of those, what the master has yet to hear of
        self._over_puts: list[tuple[bytes, int]] = []
        self._over = False
        self.holders = [
            SimHolder(
                f"h{index}",
                self.heap,
                self.options.capacity,
                self.options.log_delay_s,
                self.options.copy_s,
            )
            for index in range(self.options.holders)
        ]
        for holder in self.holders:
            holder.on_logged = lambda place, holder=holder: self._logged(holder, place)  # type: ignore[misc]
        self._links: dict[str, Peer] = {}
        self._client: Peer | None = None
        self._client_known = False  # it had a connection before

    def run(self) -> StoreReport:
        self._schedule()
        for holder in self.holders:
            self._join(holder)
        self._connect_client()
        self.heap.after(TICK_S, self._tick, weak=True)
        self.heap.after(BEAT_S, self._beat, weak=True)
        while len(self.heap):
            self.heap.run_next()
        self._check_end()
        return self.report

    def _schedule(self) -> None:
        at = 1.0
        for _ in range(self.options.operations):
            at += self.random.uniform(0, 2 * self.options.pace_s)
            self.heap.at(at, self._operate)
        self._traffic_ends = at
        for kind in self.options.faults:
            self.heap.at(self.random.uniform(1.0, at), lambda kind=kind: self._arm(kind))  # type: ignore[misc]
        self.heap.at(at + SETTLE_S, self._audit)
        self.heap.at(at + 2 * SETTLE_S, self._end)

    # ------------------------------------------------------------------------------------------ the master and its connections

    def _delay(self) -> float:
        return self.random.uniform(self.options.delay_s / 10, self.options.delay_s)

    def _step(self, event: Event) -> None:
        master = self.master
        if master is None:
            return
        self.report.steps += 1
        self.report.cells.update(cells_of(master, self.heap.now, event, TENANT))
        self._excuse(master, event)
        unlogged = master.state.counters.get("evicted_unlogged", 0)
        for effect in master.step(self.heap.now, event):
            peer = self._peers.get(effect.session)
            if peer is None:
                continue
            if isinstance(effect, Close):
                self._break(peer)
            else:
                self._answer(peer, effect)
        check(master.state)
        self._check_leases(master)
        self._note_durable(master, event)
        if master.state.counters.get("evicted_unlogged", 0) > unlogged:
            self._note_evicted(master)
        if self._armed:
            self._strike_armed()

    def _answer(self, peer: Peer, effect: Send) -> None:
        message = effect.message
        peer.down.send(self._delay(), lambda: peer.hear(message) if peer.alive else None)

    def _open(self, hear: Callable[..., None], lost: Callable[[], None], tenant: str) -> Peer:
        self._sessions += 1
        peer = Peer(self.heap, self._sessions, hear, lost)
        self._peers[peer.session] = peer
        peer.up.send(
            self._delay(),
            lambda: self._step(Connected(peer.session, tenant)) if peer.alive else None,
        )
        return peer

    def _break(self, peer: Peer) -> None:
        """Both ends notice."""
        if not peer.alive:
            return
        peer.alive = False
        session = peer.session

        def noticed() -> None:
            if self._peers.pop(session, None) is not None:
                self._step(Disconnected(session))

        self.heap.after(self._delay(), noticed)
        peer.lost()

    def _tick(self) -> None:
        self._step(Ticked())
        self.heap.after(TICK_S, self._tick, weak=True)

    def _beat(self) -> None:
        for holder in self.holders:
            if holder.alive and holder.name in self._links and self.heap.now >= holder.paused_until:
                holder.beat()
        self.partial = self.partial and not all(holder.serving for holder in self.holders)
        self.heap.after(BEAT_S, self._beat, weak=True)

    # ------------------------------------------------------------------------------------------ holders

    def _join(self, holder: SimHolder) -> None:
        """Connect and register; again and again while there is no master."""
        if not holder.alive or holder.name in self._links:
            return
        if self.master is None:
            self.heap.after(RECONNECT_S, lambda: self._join(holder))
            return

        def lost() -> None:
            self._links.pop(holder.name, None)
            holder.lost_master()
            self.heap.after(RECONNECT_S, lambda: self._join(holder))

        def hear(message: MasterToHolder) -> None:
            if self.heap.now < holder.paused_until:
                self.heap.at(holder.paused_until, lambda: hear(message) if peer.alive else None)
            else:
                holder.hear(message)

        peer = self._open(hear, lost, "@holder")
        self._links[holder.name] = peer

        def send(message: HolderToMaster) -> None:
            pause_s = max(holder.paused_until - self.heap.now, 0.0)
            peer.up.send(pause_s + self._delay(), lambda: self._from_holder(holder, peer, message))

        holder.join(send)

    def _from_holder(self, holder: SimHolder, peer: Peer, message: HolderToMaster) -> None:
        if not peer.alive:
            return
        if isinstance(message, Persisted):
            for entry in message.entries:
                place = (entry.tenant, entry.key, entry.generation)
                assert place in holder.log or place in holder.left_log, (
                    f"{place} is announced, and was never in the log"
                )
        self._step(FromHolder(peer.session, message))

    # ------------------------------------------------------------------------------------------ clients

    def _connect_client(self) -> None:
        if self.master is None:
            self.heap.after(RECONNECT_S, self._connect_client)
            return

        def lost() -> None:
            self._client = None
            self._calls.clear()
            self._writing.clear()
            self.heap.after(RECONNECT_S, self._connect_client)

        def hear(message: MasterToClient) -> None:
            waiter = self._calls.pop(message.call, None)
            if waiter is not None:
                waiter(message)

        again = self._client_known
        self._client, self._client_known = self._open(hear, lost, TENANT), True
        if again and self.random.random() < 0.5:
            for key in self.random.sample(
                KEYS, RUSH
            ):  # what waited meanwhile: room is wanted at once
                self._put(key, max(LENGTHS))

    def _ask(self, make: Callable[[int], ClientToMaster], then: Callable[..., None]) -> None:
        peer = self._client
        if peer is None:
            return
        self._call += 1
        self._calls[self._call] = then
        message = make(self._call)
        peer.up.send(
            self._delay(),
            lambda: self._step(FromClient(peer.session, message)) if peer.alive else None,
        )

    def _operate(self) -> None:
        key = self.random.choice(KEYS)
        kind = self.random.choice(
            ["put", "put", "get", "get", "get", "remove", "probe", "match", "stray"]
        )
        self.report.met[kind] += 1
        match kind:
            case "put":
                self._put(key, self.random.choice(LENGTHS))
            case "get":
                self._get(key)
            case "remove":
                self._remove(key)
            case "stray":
                self._end_again()
            case "match":
                self._match(self.random.sample(KEYS, 4))
            case _ if self.options.prefetch:
                keys = self.random.sample(KEYS, 4)
                for holder in self.holders:
                    self.heap.after(
                        self._delay(),
                        lambda holder=holder: holder.prefetch(keys, TENANT),  # type: ignore[misc]
                    )

    def _begin_write(self, key: bytes) -> int:
        """Of a put or a removal: which of two that overlap has the last word, nobody outside can know."""
        self._puts += 1
        others = self._writing[key]
        if others:
            self._overlapped |= others | {self._puts}
        others.add(self._puts)
        return self._puts

    def _end_write(self, key: bytes, number: int) -> bool:
        """Whether it was alone all the time."""
        self._writing[key].discard(number)
        return number not in self._overlapped

    def _end_again(self) -> None:
        """A second end or revoke of a put that was ended or given up: nobody's any more (field report E3)."""
        if self._over_puts and self._client is not None:
            key, generation = self.random.choice(self._over_puts[-8:])

            def answered(answer: Codes) -> None:
                assert answer.codes[0] == Status.NOT_FOUND, f"a put of {key!r} could be ended twice"

            if self.random.random() < 0.5:
                self._ask(lambda call: PutEnd(call, [key], [generation], [()]), answered)
            else:
                self._ask(lambda call: PutRevoke(call, [key], [generation]), answered)

    def _match(self, keys: list[bytes]) -> None:
        def answered(answer: Count) -> None:
            assert 0 <= answer.count <= len(keys)
            for key in keys[: answer.count]:
                assert any(item[0] == key for item in self.oracle.put), (
                    f"{key!r} is said to be there, and nobody put it"
                )

        self._ask(lambda call: MatchPrefix(call, keys, []), answered)

    def _put(self, key: bytes, length: int) -> None:
        if self._client is None:
            return
        number = self._begin_write(key)

        def granted(answer: Granted) -> None:
            grant = answer.grants[0]
            if grant.code == Status.OK:
                self.oracle.offered(key, length, grant.generation)
                self._write(key, length, grant, number)
            else:
                self.report.met[
                    f"put {Status(grant.code).name}" if grant.code < 100 else "put AGAIN"
                ] += 1
                self._end_write(key, number)

        self._ask(lambda call: PutStart(call, [key], [length]), granted)

    def _write(self, key: bytes, length: int, grant: Grant, number: int) -> None:
        """Send the bytes to each holder, then say where they are."""
        value, entries = value_of(key, length), []
        seconds = self.random.uniform(0, self.options.copy_s)
        for room in grant.rooms:
            holder = next(
                (one for one in self.holders if one.number == room.holder and self._answers(one)),
                None,
            )
            entry = (
                holder.write(TENANT, key, grant.generation, room.offset, room.token, value, seconds)
                if holder
                else None
            )
            entries.append((room, entry))

        def written() -> None:
            good = tuple(room.holder for room, entry in entries if entry is not None and entry.live)
            self._ask(lambda call: PutEnd(call, [key], [grant.generation], [good or (0,)]), ended)

        def ended(answer: Codes) -> None:
            self._over_puts.append((key, grant.generation))
            alone = self._end_write(key, number)
            if answer.codes[0] == Status.OK:
                self.report.met["put acknowledged"] += 1
                self.oracle.stored(key, length, grant.generation, self.heap.now, alone)

        def given_up() -> None:
            self._ask(lambda call: PutRevoke(call, [key], [grant.generation]), revoked)

        def revoked(answer: Codes) -> None:
            """The key stays unsure: what of it is there is an earlier put's."""
            self._over_puts.append((key, grant.generation))
            self._end_write(key, number)
            self.report.met["put revoked"] += answer.codes[0] == Status.OK

        gives_up = self.random.random() < self.options.revoked_share
        self.heap.after(
            seconds + self._held_up() + self._delay(), given_up if gives_up else written
        )

    def _held_up(self) -> float:
        """Seconds that a client stands still: for the rest of its batch, or because its machine is busy. Mostly none."""
        return (
            self.random.uniform(0, self.config.lease_s) if self.random.random() < HELD_UP else 0.0
        )

    def _answers(self, holder: SimHolder) -> bool:
        return holder.alive and self.heap.now >= holder.paused_until

    def _get(self, key: bytes) -> None:
        asked_at = self.heap.now

        def located(answer: Located) -> None:
            place = answer.places[0]
            if place.code != Status.OK:
                self.report.met["get missed"] += 1
                return
            self._read(key, place, place.spots[0], asked_at)

        self._ask(lambda call: Get(call, [key]), located)

    def _read(self, key: bytes, place: Place, spot: Spot, asked_at: float) -> None:
        holder = next((one for one in self.holders if one.number == spot.holder), None)
        if holder is None:
            return
        if spot.tier is Tier.SSD:
            self._read_log(holder, key, place, asked_at)
            return
        segment, half = holder.segment, place.length // 2
        deadline = asked_at + self.config.lease_s - LEASE_SLACK_S
        if segment.header(spot.offset) != (spot.stamp, place.length, 1):
            self.report.met["copy refused before"] += 1
            return
        first = segment.read(spot.offset, 0, half)
        self._reading += 1

        def finish() -> None:
            self._reading -= 1
            if not self._still_good(
                segment.header(spot.offset), spot.stamp, place.length, deadline
            ):
                self.report.met["copy refused after"] += 1
                return
            self.report.met["got from memory"] += 1
            self._seen(
                key, place.length, first + segment.read(spot.offset, half, place.length), asked_at
            )

        self.heap.after(
            self.random.uniform(0, self.options.copy_s) * self.slow + self._held_up(), finish
        )

    def _still_good(
        self, header: tuple[int, int, int], stamp: int, length: int, deadline: float
    ) -> bool:
        """Rule S1: finished within the lease, or the range is still this object's."""
        return self.heap.now <= deadline or header == (stamp, length, 1)

    def _read_log(self, holder: SimHolder, key: bytes, place: Place, asked_at: float) -> None:
        self._reading += 1

        def finish() -> None:
            self._reading -= 1
            if not (self._answers(holder) and holder.serving) or holder.ssd_fails:
                return
            found = holder.log.get((TENANT, key, place.generation))
            if found is None:
                known = (TENANT, key, place.generation) in holder.left_log
                assert known, f"{key!r} is listed on the SSD of {holder.name}, and never was there"
                return
            self.report.met["got from SSD"] += 1
            self._seen(key, place.length, found, asked_at)

        self.heap.after(self.random.uniform(0, self.options.copy_s), finish)

    def _seen(self, key: bytes, length: int, found: bytes, asked_at: float) -> None:
        assert found == value_of(key, length), f"a get of {key!r} brought other bytes"
        if not self.partial:
            self.oracle.got(key, length, asked_at)

    def _remove(self, key: bytes) -> None:
        newest = self.oracle.newest(key)
        number = self._begin_write(key)

        def removed(answer: Codes) -> None:
            alone = self._end_write(key, number)
            if answer.codes[0] == Status.OK:
                self.report.met["removed"] += 1
                self.oracle.removed(key, newest, self.heap.now, alone)

        self.oracle.unsure.add(key)
        self._ask(lambda call: Remove(call, [key]), removed)

    # ------------------------------------------------------------------------------------------ faults

    def _arm(self, kind: StoreFault) -> None:
        """Strike now, or once the store is at something (never, if it never is)."""
        if self._waits and self.random.random() < 0.5:
            self._armed.append((kind, self._moment(kind)))
        else:
            self._strike(kind)

    def _moment(self, kind: StoreFault) -> StoreActivity:
        """What a fault waits for. Masters die under readers more often: the next one does not know of their leases."""
        if kind is StoreFault.MASTER_KILLED and self.random.random() < 0.5:
            return StoreActivity.READING
        return self.random.choice(list(StoreActivity))

    def _strike_armed(self) -> None:
        if self.heap.now > self._traffic_ends:
            self._armed.clear()  # the rest of the history is for healing
            return
        going = self._activities()
        due = [fault for fault in self._armed if fault[1] in going]
        for fault in due:
            self._armed.remove(fault)
            self.heap.after(0.0, lambda kind=fault[0]: self._strike(kind))  # type: ignore[misc]

    def _strike(self, kind: StoreFault) -> None:
        self.report.met[kind] += 1
        self.report.cells.update((kind, activity) for activity in self._activities())
        holder = self.random.choice(self.holders)
        seconds = self.random.choice(AWAY_S)
        match kind:
            case StoreFault.HOLDER_KILLED:
                self._kill_holder(holder, seconds)
            case StoreFault.HOLDER_CUT_OFF:
                if holder.name in self._links:
                    self._break(self._links[holder.name])
            case StoreFault.HOLDER_PAUSED:
                holder.paused_until = self.heap.now + seconds
            case StoreFault.MASTER_KILLED:
                self._kill_master(self.random.choice([0.1, 1.0]))
                if self.random.random() < 0.4:  # they were on one machine
                    self._kill_holder(holder, seconds)
            case StoreFault.WRITER_LOST:
                if self._client is not None:
                    self._break(self._client)
            case StoreFault.SLOW_COPIES:
                self.slow = 20.0
                self.heap.after(seconds, lambda: setattr(self, "slow", 1.0))
            case StoreFault.DISK_FAILS:
                holder.ssd_fails = True
                self.heap.after(seconds, holder.mend)
            case StoreFault.RECORD_EVICTED:
                if holder.log:
                    holder.drop_record(self.random.choice(list(holder.log)))

    def _activities(self) -> list[StoreActivity]:
        """What the store is at now."""
        state = self.master.state if self.master is not None else None
        serving = state is not None and all(
            holder.alive and holder.serving for holder in self.holders
        )
        going = [
            (
                StoreActivity.PUTTING,
                state is not None and any(tenant.pending for tenant in state.tenants.values()),
            ),
            (StoreActivity.WAITING_FOR_ROOM, state is not None and bool(state.waiting)),
            (StoreActivity.READING, self._reading > 0),
            (
                StoreActivity.LOGGING,
                any(entry.logging for holder in self.holders for entry in holder.memory),
            ),
            (StoreActivity.PROMOTING, state is not None and bool(state.tasks)),
            (StoreActivity.BURYING, state is not None and bool(state.burials)),
            (StoreActivity.RECOVERING, not serving),
        ]
        return [activity for activity, goes_on in going if goes_on] or [StoreActivity.IDLE]

    def _kill_holder(self, holder: SimHolder, seconds: float) -> None:
        """kill -9; its log is kept, and it comes back."""
        if not holder.alive:
            return
        holder.alive = False
        self.partial |= self.master is None
        link = self._links.get(holder.name)
        if link is not None:
            self._break(link)

        def restart() -> None:
            holder.start()
            self._join(holder)

        self.heap.after(seconds, restart)

    def _kill_master(self, seconds: float) -> None:
        if self.master is None:
            return
        self.master = None
        self.partial = True
        for peer in list(self._peers.values()):
            del self._peers[peer.session]
            if peer.alive:  # one that broke just now has lost it already
                peer.alive = False
                peer.lost()

        def restart() -> None:
            self.epoch += 1
            self.master = Master(
                self.config,
                self.heap.now,
                epoch=self.epoch,
                first_generation=self.epoch * 1_000_000,
                secret=b"s",
            )

        self.heap.after(seconds, restart)

    # ------------------------------------------------------------------------------------------ checks

    def _excuse(self, master: Master, event: Event) -> None:
        """What may lease an object: a get, a promotion that has come to its end, and a holder's memory that is found again."""
        now, lease_s = self.heap.now, self.config.lease_s
        match event:
            case FromClient(_, Get(_, keys)):
                self._may_lease(keys, now + lease_s + LEASE_SLACK_S)
            case FromHolder(_, PromotionDone(number, True)) if number in master.state.tasks:
                self._may_lease(
                    [master.state.tasks[number].object.key],
                    now + MAX_COMMIT_LEASE_S + LEASE_SLACK_S,
                )
            case FromHolder(_, Inventory(memory=memory)):
                self._may_lease([held.key for held in memory], now + lease_s + RESTART_GRACE_S)

    def _may_lease(self, keys: list[bytes], until: float) -> None:
        self._leases |= {key: max(self._leases.get(key, 0.0), until) for key in keys}

    def _logged(self, holder: SimHolder, place: LogKey) -> None:
        """Promised from now on, unless the master has given this copy up already and the holder has yet to hear of it."""
        if self.master is None or not holder.serving:
            self._durable.add(place)
            return
        tenant = self.master.state.tenant(TENANT)
        put = tenant.pending.get(place[1])
        for found in (tenant.objects.get(place[1]), put.object if put is not None else None):
            of_this_put = found is not None and found.generation == place[2]
            if (
                found is not None
                and of_this_put
                and any(one.holder.register.name == holder.name for one in found.memory)
            ):
                self._durable.add(place)
                self._unheard.add(place)

    def _note_evicted(self, master: Master) -> None:
        """While its SSD fails a holder's memory may be evicted though it is on its way to the log. A record that got there after all,
        and of which the master has not heard, goes with it."""
        tenant = master.state.tenant(TENANT)
        pending = {put.object.generation for put in tenant.pending.values()}
        known = pending | {found.generation for found in tenant.objects.values()}
        gone = {place for place in self._unheard if place[2] not in known}
        self._durable -= gone
        self._unheard -= gone

    def _note_durable(self, master: Master, event: Event) -> None:
        """A record that its master has taken in: before, nothing was promised of it."""
        match event:
            case FromHolder(_, Persisted(entries=entries)) | FromHolder(_, Inventory(ssd=entries)):
                tenant = master.state.tenant(TENANT)
                for entry in entries:
                    found, put = tenant.objects.get(entry.key), tenant.pending.get(entry.key)
                    if (
                        found is not None and found.generation == entry.generation and found.ssd
                    ) or (
                        put is not None
                        and put.object.generation == entry.generation
                        and put.persisted
                    ):
                        self._durable.add((TENANT, entry.key, entry.generation))
                        self._unheard.discard((TENANT, entry.key, entry.generation))

    def _check_leases(self, master: Master) -> None:
        for tenant in master.state.tenants.values():
            for key, found in tenant.objects.items():
                excuse = self._leases.get(key, 0.0)
                assert found.lease_until <= excuse + 1e-6, (
                    f"{key!r} is leased until {found.lease_until}, excused until {excuse}"
                )

    def _audit(self) -> None:
        """Everything has healed: what the master believes in is there, and what was acknowledged and logged is found."""
        master = self.master
        assert master is not None
        state = master.state
        for holder in self.holders:
            assert holder.serving, f"{holder.name} does not serve though all has healed"
        assert not state.waiting and not state.burials, "a put or a removal waits for ever"
        named = {holder.number: holder for holder in self.holders}
        listed = state.tenant(TENANT).objects
        for key, found in listed.items():
            for replica in found.memory:
                segment = named[replica.holder.number].segment
                assert segment.header(replica.offset) == (replica.stamp, found.length, 1), (
                    f"{key!r} is not where the master has it"
                )
                assert segment.read(replica.offset, 0, found.length) == value_of(
                    key, found.length
                ), f"{key!r}: other bytes"
            for copy in found.ssd:
                held = named[copy.holder.number].log.get((TENANT, key, found.generation))
                assert held == value_of(key, found.length), (
                    f"{key!r} is believed on the SSD of {copy.holder.register.name}"
                )
        self._check_found(listed)
        for holder in self.holders:
            self._check_throttle(holder)
            for _, key, generation in holder.log:
                known = listed.get(key)
                copies = () if known is None or known.generation != generation else known.ssd
                assert any(copy.holder.register.name == holder.name for copy in copies), (
                    f"{key!r} would come back from {holder.name}"
                )

    def _check_found(self, listed: Container[bytes]) -> None:
        """What was acknowledged, and durable as the master knew, is found, but for records whose file was evicted."""
        evicted = {place for holder in self.holders for place in holder.evicted}
        for key, length in self.oracle.acknowledged.items():
            place = (TENANT, key, self.oracle.stored_as[key, length])
            if (
                key not in self.oracle.unsure
                and (key, length) not in self.oracle.dead
                and place in self._durable - evicted
            ):
                assert key in listed, f"{key!r} was acknowledged and logged, and is not found"

    def _check_throttle(self, holder: SimHolder) -> None:
        """Repeats are for keys that failed (after the cooldown) or whose time is over."""
        cooldown_s = holder.promotions.throttle.cooldown_s
        for key, times in holder.asked.items():
            for earlier, later in pairwise(times):
                assert later - earlier >= cooldown_s or holder.instance > 1, (
                    f"{key!r} is promoted again"
                )

    def _end(self) -> None:
        """The last word: with all at rest a put of each key, and a get that finds it."""
        assert self.master is not None and self._client is not None
        assert not self.master.state.tasks, "a promotion never ended"
        self._over = True

    def _check_end(self) -> None:
        assert self._over
