"""A holder of the simulated store: the real index of memory over a fake segment, a log that is written later, the real throttle.

    write    room from the master --> begin --> first half --> second half --> publish --> log, a while later --> Persisted
    read     header, first half, second half, header again: what a client does to a segment that it has mapped
    promote  probe --> throttle --> RegisterPrefetch --> AllocStart --> read the log --> write --> PromotionDone

Bytes are real, so a range that is given away too early shows as wrong bytes in whoever reads it.
"""

import struct
from collections.abc import Callable

from forebay.sim.heap import EventHeap
from forebay.sim.promotions import Promotions
from forebay.store.holder.memory import Entry, Memory
from forebay.store.holder.node import not_being_buried
from forebay.store.master.puts import room_token
from forebay.store.wire.messages import (
    Allocated,
    Allotment,
    Beat,
    Buried,
    Bury,
    Dropped,
    Forget,
    Grave,
    HeldMemory,
    HeldSsd,
    HolderToMaster,
    Inventory,
    MasterToHolder,
    Peers,
    Persisted,
    Prefetchable,
    Promote,
    Register,
    Registered,
    Retire,
    Serving,
)

HEADER = struct.Struct("<QQQ")  # stamp, length, whether it is live
HEADER_BYTES = 64
LogKey = tuple[str, bytes, int]


class SimSegment:
    """As `store.holder.segment.Segment`, in a bytearray."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = bytearray(capacity)

    def fits(self, offset: int, length: int) -> bool:
        return offset + HEADER_BYTES + length <= self.capacity

    def begin(self, offset: int, stamp: int, length: int) -> None:
        HEADER.pack_into(self.bytes, offset, stamp, length, 0)

    def publish(self, offset: int) -> None:
        stamp, length, _ = HEADER.unpack_from(self.bytes, offset)
        HEADER.pack_into(self.bytes, offset, stamp, length, 1)

    def retire(self, offset: int) -> None:
        HEADER.pack_into(self.bytes, offset, 0, 0, 0)

    def header(self, offset: int) -> tuple[int, int, int]:
        found: tuple[int, int, int] = HEADER.unpack_from(self.bytes, offset)
        return found

    def write(self, offset: int, first: int, data: bytes) -> None:
        start = offset + HEADER_BYTES + first
        self.bytes[start : start + len(data)] = data

    def read(self, offset: int, first: int, last: int) -> bytes:
        return bytes(self.bytes[offset + HEADER_BYTES + first : offset + HEADER_BYTES + last])


class SimHolder:
    """Death loses memory, never the log.

    ``log_delay_s``: from written to logged and announced. ``ssd_fails``: the log can neither be written nor read meanwhile.
    """

    def __init__(
        self, name: str, heap: EventHeap, capacity: int, log_delay_s: float, read_s: float
    ) -> None:
        self.name = name
        self.heap = heap
        self.capacity = capacity
        self.log_delay_s = log_delay_s
        self.read_s = read_s
        self.link: Callable[[HolderToMaster], None] | None = None
        self.log: dict[LogKey, bytes] = {}
        self.left_log: set[LogKey] = set()  # evicted or buried
        self.logged: set[LogKey] = set()  # was there once
        self.on_logged: Callable[[LogKey], None] = lambda place: None
        self.evicted: set[LogKey] = set()
        self.kept: list[Grave] = []
        self.peers: list[str] = []
        self.highest = 0
        self.instance = 0
        self.alive = True
        self.ssd_fails = False
        self.paused_until = 0.0  # it says and hears nothing before; its memory can be read
        self.number = 0
        self.lease_s = 5.0
        self.asked: dict[bytes, list[float]] = {}  # when each key was registered for prefetch
        self.start()

    def start(self) -> None:
        """A new process: an empty segment, the log as it was."""
        self.instance += 1
        self.alive = True
        self.segment = SimSegment(self.capacity)
        self.memory = Memory(self.segment)  # type: ignore[arg-type]
        self.promotions = Promotions(self.heap, self.send, self._promote)
        self._burying: list[Bury] = []
        self.lost_master()

    def lost_master(self) -> None:
        """Rooms that were given before the next registration count no more, and the next master gives another number."""
        self.number = 0
        self.serving = False
        self.link = None
        self._held_back: list[HolderToMaster] | None = None
        self.token_key = b""
        self.promotions.forget_calls()

    # ------------------------------------------------------------------------------------------ the master's connection

    def register(self) -> Register:
        highest = max([self.highest, *(entry.stamp for entry in self.memory)], default=0)
        return Register(
            self.name,
            str(self.instance),
            "h",
            1,
            "",
            "m",
            self.capacity,
            1 << 30,
            highest,
            self.peers,
        )

    def join(self, link: Callable[[HolderToMaster], None]) -> None:
        """A new connection to a master."""
        self.link, self._held_back = link, []
        link(self.register())

    def send(self, message: HolderToMaster) -> None:
        """What is said without a master is lost: the next inventory says it all. What happens to records while the inventory is not
        yet sent is said after it."""
        if self.link is None:
            return
        if self._held_back is not None and isinstance(message, Persisted | Dropped):
            self._held_back.append(message)
        else:
            self.link(message)

    def beat(self) -> None:
        state = "failing" if self.ssd_fails else "ok"
        self.send(Beat(len(self.log), state, not self.ssd_fails))

    def hear(self, message: MasterToHolder) -> None:
        match message:
            case Registered(number, _, token_key, lease_s):
                self.number, self.token_key, self.lease_s = number, token_key, lease_s
                self._send_inventory()
            case Serving():
                self.serving = True
                self._log_what_is_missing()
            case Retire(ranges):
                for offset, stamp in ranges:
                    self.memory.retire(offset, stamp)
            case Bury():
                self._bury(message)
            case Forget(behalf):
                self.kept = [grave for grave in self.kept if grave.behalf != behalf]
            case Peers(names):
                self.peers = sorted({*names, *self.peers} - {self.name})
            case Promote(task, _, key):
                self.promotions.run([(task, key)])
            case Prefetchable():
                self.promotions.registered(message)
            case Allocated():
                self.promotions.allotted(message)

    def _send_inventory(self) -> None:
        """In two pieces, so that something can come between them."""
        memory = [
            HeldMemory(
                one.tenant, one.key, one.generation, one.length, one.offset, one.stamp, one.buried
            )
            for one in self.memory
            if one.live
        ]
        ssd = [
            HeldSsd(tenant, key, generation, len(value))
            for (tenant, key, generation), value in self.log.items()
        ]
        ssd = not_being_buried(ssd, self._burying)
        self.send(Inventory(0, memory, [], list(self.kept), False))
        self.send(Inventory(1, [], ssd, [], True))
        held, self._held_back = self._held_back or [], None
        for message in held:
            self.send(message)

    def _bury(self, message: Bury) -> None:
        """Marked at once, logged a while later, and only then said."""
        for grave in message.graves:
            self.highest = max(self.highest, grave.generation)
            for entry in () if grave.behalf else self.memory.of(grave.tenant, grave.key):
                entry.buried |= (
                    entry.generation == grave.generation
                    if grave.exact
                    else entry.generation <= grave.generation
                )

        self._burying.append(message)

        def logged() -> None:
            self._burying.remove(message)
            for grave in message.graves:
                if grave.behalf:
                    self.kept.append(grave)
                    continue
                for place in [place for place in self.log if _covers(grave, place)]:
                    del self.log[place]
                    self.left_log.add(place)
            if message.op:
                self.send(Buried(message.op))

        self._later(self.log_delay_s, logged)

    # ------------------------------------------------------------------------------------------ writing

    def write(
        self,
        tenant: str,
        key: bytes,
        generation: int,
        offset: int,
        token: bytes,
        value: bytes,
        seconds: float,
    ) -> Entry | None:
        """A put's bytes arrive, half by half; what it came to is the entry's ``live``. None: refused."""
        wanted = room_token(self.token_key, tenant, key, generation, offset, len(value))
        if not (self.alive and self.serving and self.token_key and token == wanted):
            return None
        entry = Entry(tenant, key, generation, generation, offset, len(value), crc=0)
        return entry if self._fill(entry, value, seconds, lambda ok: None) else None

    def _fill(
        self, entry: Entry, value: bytes, seconds: float, done: Callable[[bool], None]
    ) -> bool:
        if not self.memory.begin(entry):
            done(False)
            return False
        half = len(value) // 2
        self.segment.write(entry.offset, 0, value[:half])
        entry.busy = True  # a copying thread cannot be called back

        def finish() -> None:
            self.segment.write(entry.offset, half, value[half:])
            self.memory.copied(entry)
            ok = self.memory.publish(entry)
            if ok:
                self.highest = max(self.highest, entry.stamp)
                self._log_later(entry)
            done(ok)

        self._later(seconds, finish)
        return True

    def _log_later(self, entry: Entry) -> None:
        place = (entry.tenant, entry.key, entry.generation)
        if not entry.logging and place not in self.log:
            entry.logging = True
            self._later(self.log_delay_s, lambda: self._log(entry, place))

    def _log(self, entry: Entry, place: LogKey) -> None:
        entry.logging = False
        if self.ssd_fails or entry.gone or entry.buried or not entry.live:
            return
        self.log[place] = self.segment.read(entry.offset, 0, entry.length)
        self.logged.add(place)
        self.on_logged(place)
        self.highest = max(self.highest, entry.generation)
        self.send(Persisted([HeldSsd(*place, entry.length)]))

    def mend(self) -> None:
        """The disk works again: what is in memory alone is logged."""
        self.ssd_fails = False
        self._log_what_is_missing()

    def _log_what_is_missing(self) -> None:
        for entry in self.memory:
            if entry.live and not entry.buried:
                self._log_later(entry)

    def drop_record(self, place: LogKey) -> None:
        """Its file was evicted: the master hears first that it is gone."""
        value = self.log.pop(place)
        self.left_log.add(place)
        self.evicted.add(place)
        self.send(Dropped([HeldSsd(*place, len(value))]))

    # ------------------------------------------------------------------------------------------ promotions

    def prefetch(self, keys: list[bytes], tenant: str) -> None:
        """The local branch of prefetch on exist."""
        if not (self.alive and self.serving):
            return
        here = [key for key in keys if any(place[:2] == (tenant, key) for place in self.log)]
        for key in self.promotions.prefetch(tenant, here, 5.0):
            self.asked.setdefault(key, []).append(self.heap.now)

    def _promote(self, key: bytes, spot: Allotment, done: Callable[[bool], None]) -> None:
        place = next((place for place in self.log if place[1:] == (key, spot.generation)), None)
        if place is None or self.ssd_fails:
            done(False)
            return
        entry = Entry(place[0], key, spot.generation, spot.stamp, spot.offset, spot.length, crc=0)
        self._fill(entry, self.log[place], self.read_s, done)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """Not if the process has died meanwhile."""
        instance = self.instance
        self.heap.after(
            seconds, lambda: action() if self.alive and self.instance == instance else None
        )


def _covers(grave: Grave, place: LogKey) -> bool:
    same = (grave.tenant, grave.key) == place[:2]
    return same and (place[2] == grave.generation if grave.exact else place[2] <= grave.generation)
