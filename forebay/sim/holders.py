"""One machine of the store as a performance model: its NIC and its SSD are queues, its master is the one that ships.

    bytes of a put ──> nic_in ──> (DRAM: the master's books) ──> ssd_write ──> DiskLog ──Persisted──> master
    a get          <── nic_out <── DRAM, or ssd_read                            Promote, Allocated <── master

What lies in DRAM, and what leaves it, only the master knows. A record is read once however many want it at the time.
"""

import random
from collections.abc import Callable

from forebay.sim.cluster import Cluster
from forebay.sim.devices import Link
from forebay.sim.disk_log import DiskLog, Record
from forebay.sim.heap import EventHeap
from forebay.sim.promotions import Done, Promotions
from forebay.store.wire.messages import (
    Allocated,
    Allotment,
    Dropped,
    HeldSsd,
    HolderToMaster,
    Inventory,
    MasterToHolder,
    Persisted,
    Prefetchable,
    Promote,
    Register,
)

TENANT = "default"
HEARD = frozenset({Promote, Prefetchable, Allocated})  # the rest of a master's words is about bytes


class Holder:
    """``tell`` reaches its master after the time of one message."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        heap: EventHeap,
        randomness: random.Random,
        tell: Callable[[HolderToMaster], None],
    ):
        store, network = cluster.store, cluster.network
        self.name = name
        self.nic_in = Link(store.nic_gb_s, network.latency_s, network.jitter, randomness)
        self.nic_out = Link(store.nic_gb_s, network.latency_s, network.jitter, randomness)
        self.ssd_read = Link(store.ssd_read_gb_s, store.ssd_latency_s, network.jitter, randomness)
        self.ssd_write = Link(store.ssd_write_gb_s, 0.0, network.jitter, randomness)
        self.log = DiskLog(store.ssd)
        self._store, self._heap, self._tell = store, heap, tell
        self._promotions = Promotions(heap, tell, self._promote)
        self._under_way: dict[bytes, float] = {}  # reads of the log -> when they are done

    def introduction(self) -> tuple[Register, Inventory]:
        """A new holder with nothing in it."""
        register = Register(
            self.name, "1", self.name, 1, "", self.name, self._store.dram, self._store.ssd, 0, []
        )
        return register, Inventory(0, [], [], [], True)

    def hear(self, message: MasterToHolder) -> None:
        match message:
            case Promote(task, _, key):
                self._promotions.run([(task, key)])
            case Prefetchable():
                self._promotions.registered(message)
            case Allocated():
                self._promotions.allotted(message)

    def prefetch(self, keys: list[bytes], hint_s: float) -> None:
        """A client's word that these keys will be read soon."""
        self._promotions.prefetch(TENANT, [key for key in keys if key in self.log], hint_s)

    # ------------------------------------------------------------------------------------------ writing

    def written(self, key: bytes, generation: int, length: int) -> None:
        """A put's bytes are in DRAM: they go to the log as soon as that gets to them."""
        if not self.log.capacity:
            return
        record = Record(key, generation, length)
        if self.log.capacity < record.size:
            self._tell(Dropped([_held(record)]))  # it never will be there
            return
        self._heap.at(
            self.ssd_write.move(self._heap.now, record.size), lambda: self._logged(record)
        )

    def log_at_once(self, key: bytes, generation: int, length: int) -> list[Dropped | Persisted]:
        """As if it had been written long ago. What the holder says of it, and of what was lost for it."""
        record = Record(key, generation, length)
        if self.log.capacity < record.size:
            return [Dropped([_held(record)])]
        lost, _ = self.log.add(record)
        return [Dropped([_held(each) for each in lost]), Persisted([_held(record)])]

    def _logged(self, record: Record) -> None:
        lost, moved = self.log.add(record)
        if moved:
            self.ssd_read.move(self._heap.now, moved)
            self.ssd_write.move(self._heap.now, moved)
        if lost:
            self._tell(Dropped([_held(each) for each in lost]))
        self._tell(Persisted([_held(record)]))

    # ------------------------------------------------------------------------------------------ reading

    def read_log(self, key: bytes, generation: int) -> float | None:
        """When the whole record has been read, if it is there."""
        record = self.log.read(key, generation)
        if record is None:
            return None
        now = self._heap.now
        done_at = self._under_way.get(key, 0.0)
        if done_at <= now:
            done_at = self._under_way[key] = self.ssd_read.move(now, record.size)
            self._heap.at(done_at, lambda: self._read(key, done_at))
        return done_at

    def _read(self, key: bytes, done_at: float) -> None:
        if self._under_way.get(key) == done_at:
            del self._under_way[key]

    def _promote(self, key: bytes, spot: Allotment, done: Done) -> None:
        at = self.read_log(key, spot.generation)
        if at is None:
            done(False)
        else:
            self._heap.at(at, lambda: done(True))


def _held(record: Record) -> HeldSsd:
    return HeldSsd(TENANT, record.key, record.generation, record.length)
