"""The master's tables. A million objects must fit in 1 GiB, so what exists once per object has slots and no dictionaries.

    State -> tenants {name: Tenant -> objects {key: Object -> memory (MemoryReplica..), ssd (SsdReplica..)}, pending {key: Put}}
          -> holders {number: Holder -> extents, lanes {tenant: Lanes -> three intrusive lists of MemoryReplica}}

A Lane is in order of use, oldest first, so evicting is taking from a head; the tick tells lanes of different tenants apart.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from msgspec import Struct

from forebay.store.backend import Status
from forebay.store.master.extents import Extents, footprint
from forebay.store.master.sketch import CountMinSketch
from forebay.store.master.transitions import ReplicaState
from forebay.store.wire.messages import Grave, MasterToClient, MasterToHolder, Register

NONE = ReplicaState.NONE  # an enum's member is slow to look up
HEADER_BYTES = 64
LEASE_SLACK_S = 0.1


@dataclass(frozen=True)
class MasterConfig:
    """Times in seconds, shares of a holder's DRAM in [0, 1], sizes in bytes.

    ``inflight_promotions``: tasks of both kinds at once. ``hit_threshold``: sketch estimate at which a get promotes.
    """

    lease_s: float = 5.0
    high_watermark: float = 0.90
    low_watermark: float = 0.85
    put_wait_s: float = 2.0
    replicas: int = 1
    promotion_on_hit: bool = False
    ssd_prefetch: bool = False
    prefetch_share: float = 0.2
    hit_threshold: int = 2
    inflight_promotions: int = 512
    task_timeout_s: float = 10.0
    silence_s: float = 2.0
    settle_s: float = 2.0
    max_waiting_puts: int = 4096
    quotas: dict[str, int] = field(default_factory=dict)


class Kind(IntEnum):
    """Why a replica is where it is in the order of eviction."""

    VOLATILE = 0  # the only copy, on its way to a log: never evicted while the holder's SSD works
    DURABLE = 1  # has a copy on SSD, or had one that was evicted there: it may go
    PREFETCHED = 2  # promoted on a hint, not read yet


class MemoryReplica:
    """One copy in a holder's segment, at ``offset``; its header carries ``stamp``. In ``lane`` exactly while COMPLETE."""

    __slots__ = (
        "after",
        "before",
        "holder",
        "lane",
        "object",
        "offset",
        "round",
        "size",
        "stamp",
        "state",
        "tick",
    )

    def __init__(self, object: "Object", holder: "Holder", offset: int, stamp: int) -> None:
        self.object = object
        self.holder = holder
        self.offset = offset
        self.size = footprint(object.length, HEADER_BYTES)
        self.stamp = stamp
        self.state = NONE
        self.round = holder.round
        self.tick = 0
        self.lane: Lane | None = None
        self.before: MemoryReplica | None = None
        self.after: MemoryReplica | None = None


class SsdReplica:
    """One copy in a holder's log."""

    __slots__ = ("holder", "round", "state")

    def __init__(self, holder: "Holder") -> None:
        self.holder = holder
        self.round = holder.round
        self.state = ReplicaState.NONE


class Object:
    """What one key holds. ``task``: the promotion that pins its SSD source. ``unheard``: holders that lost its memory replica and
    may have logged it before, though they have not said so: a removal must reach them too."""

    __slots__ = (
        "generation",
        "key",
        "lease_until",
        "length",
        "memory",
        "ssd",
        "task",
        "tenant",
        "unheard",
    )

    def __init__(self, tenant: "Tenant", key: bytes, generation: int, length: int) -> None:
        self.tenant = tenant
        self.key = key
        self.generation = generation
        self.length = length
        self.lease_until = 0.0
        self.memory: tuple[MemoryReplica, ...] = ()
        self.ssd: tuple[SsdReplica, ...] = ()
        self.unheard: tuple[Holder, ...] = ()
        self.task: Task | None = None

    def readable(self) -> bool:
        for replica in self.memory:  # plain loops: this is most of what an ``exists`` costs
            if replica.holder.usable:
                return True
        return self.durable()

    def holders(self) -> "dict[int, Holder]":
        """All that may have it, by number."""
        known = [replica.holder for replica in self.memory] + [copy.holder for copy in self.ssd]
        return {holder.number: holder for holder in (*known, *self.unheard)}

    def unhear(self, holder: "Holder") -> None:
        """Its memory replica at ``holder`` goes; whether the log there has it is not known unless it is in ``ssd``."""
        if (
            holder.has_log
            and holder not in self.unheard
            and not any([copy.holder is holder for copy in self.ssd])
        ):
            self.unheard = (*self.unheard, holder)

    def heard(self, holder: "Holder") -> None:
        """``holder`` has said what its log has of it."""
        if self.unheard:
            self.unheard = tuple([other for other in self.unheard if other is not holder])

    def durable(self) -> bool:
        for copy in self.ssd:  # noqa: SIM110
            if copy.holder.usable:
                return True
        return False


class Lane:
    """Memory replicas of one kind, tenant and holder in order of use: an intrusive doubly linked list."""

    __slots__ = ("bytes", "head", "kind", "tail")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.head: MemoryReplica | None = None
        self.tail: MemoryReplica | None = None
        self.bytes = 0

    def append(self, replica: MemoryReplica, tick: int) -> None:
        """``replica`` is the most recently used from now on."""
        assert replica.lane is None
        replica.lane, replica.tick, replica.before = self, tick, self.tail
        if self.tail is None:
            self.head = replica
        else:
            self.tail.after = replica
        self.tail = replica
        self.bytes += replica.size

    def remove(self, replica: MemoryReplica) -> None:
        assert replica.lane is self
        if replica.before is None:
            self.head = replica.after
        else:
            replica.before.after = replica.after
        if replica.after is None:
            self.tail = replica.before
        else:
            replica.after.before = replica.before
        replica.lane = replica.before = replica.after = None
        self.bytes -= replica.size

    def __iter__(self) -> Iterator[MemoryReplica]:
        """Oldest first; the current one may be removed on the way."""
        replica = self.head
        while replica is not None:
            following = replica.after
            yield replica
            replica = following


class Lanes:
    """One tenant's lanes at one holder."""

    __slots__ = ("_of", "durable", "prefetched", "volatile")

    def __init__(self) -> None:
        self.volatile = Lane(Kind.VOLATILE)
        self.durable = Lane(Kind.DURABLE)
        self.prefetched = Lane(Kind.PREFETCHED)
        self._of = (self.volatile, self.durable, self.prefetched)

    def of(self, kind: Kind) -> Lane:
        return self._of[kind]


class Holder:
    """One holder. ``round`` counts its registrations; a replica of an older round is not confirmed yet.

    ``present``: connected and registered. ``complete``: its inventory is in. ``suspect``: silent for too long.
    ``open``: the master as a whole serves. ``usable`` is all of it together, kept as a field since every read looks at it.
    """

    __slots__ = (
        "complete",
        "draining",
        "extents",
        "in_flight_bytes",
        "inventory_next",
        "lanes",
        "last_seen",
        "number",
        "open",
        "present",
        "register",
        "round",
        "session",
        "ssd_ok",
        "ssd_state",
        "ssd_used",
        "suspect",
        "suspect_since",
        "token_key",
        "usable",
    )

    def __init__(self, number: int, register: Register, session: int, token_key: bytes) -> None:
        self.number = number
        self.register = register
        self.session = session
        self.token_key = token_key
        self.round = 0
        self.present = self.complete = self.suspect = self.open = self.usable = False
        self.last_seen = self.suspect_since = 0.0
        self.inventory_next = 0
        self.extents = Extents(register.memory_bytes)
        self.in_flight_bytes = 0
        self.lanes: dict[str, Lanes] = {}
        self.draining: dict[int, MemoryReplica] = {}  # by stamp
        self.ssd_ok = register.ssd_bytes > 0
        self.ssd_state = "ok" if self.ssd_ok else "none"
        self.ssd_used = 0

    @property
    def has_log(self) -> bool:
        return self.register.ssd_bytes > 0

    @property
    def used(self) -> int:
        return self.extents.capacity - self.extents.free_bytes

    def settle(self) -> None:
        self.usable = self.open and self.present and self.complete and not self.suspect

    def lanes_of(self, tenant: str) -> Lanes:
        lanes = self.lanes.get(tenant)
        if lanes is None:
            lanes = self.lanes[tenant] = Lanes()
        return lanes

    def prefetched_bytes(self) -> int:
        return sum(lanes.prefetched.bytes for lanes in self.lanes.values())


class Put:
    """A put between start and end: invisible to readers, owned by the connection ``session`` until ``deadline``. ``persisted``: already
    in these logs; ``unloggable``: one of them will never have it."""

    __slots__ = ("deadline", "object", "persisted", "session", "unloggable")

    def __init__(self, object: Object, session: int, deadline: float) -> None:
        self.object = object
        self.session = session
        self.deadline = deadline
        self.persisted: list[Holder] = []
        self.unloggable = False


class Tenant:
    """``memory_bytes``: DRAM taken by its replicas, puts in flight and draining ranges included."""

    __slots__ = ("memory_bytes", "name", "objects", "pending", "quota")

    def __init__(self, name: str, quota: int | None) -> None:
        self.name = name
        self.quota = quota
        self.objects: dict[bytes, Object] = {}
        self.pending: dict[bytes, Put] = {}
        self.memory_bytes = 0


class Trigger(IntEnum):
    HIT = 0
    PREFETCH = 1


class Task:
    """One promotion: SSD -> DRAM of one object at one holder. ``replica`` once alloc_start gave it room."""

    __slots__ = ("deadline", "hint_s", "holder", "number", "object", "replica", "trigger")

    def __init__(
        self,
        number: int,
        object: Object,
        holder: Holder,
        trigger: Trigger,
        deadline: float,
        hint_s: float,
    ) -> None:
        self.number = number
        self.object = object
        self.holder = holder
        self.trigger = trigger
        self.deadline = deadline
        self.hint_s = hint_s
        self.replica: MemoryReplica | None = None


@dataclass(slots=True)
class Waiting:
    """A PutStart of which nothing could be granted yet."""

    session: int
    call: int
    keys: list[bytes]
    lengths: list[int]
    deadline: float


@dataclass(slots=True)
class Burial:
    """Removals on their way into logs. ``missing``: number of a Bury -> (holder number, graves), until it is Buried.

    The answer (if ``call`` is not None) goes out when nothing is missing. ``delivers``: the returned holder whose
    graves these are. ``places``: tenants and keys that it is about.
    """

    session: int
    call: int | None
    codes: bytes
    missing: dict[int, tuple[int, list[Grave]]]
    delivers: str = ""
    delivered: list[Grave] = field(default_factory=list)
    places: set[tuple[str, bytes]] = field(default_factory=set)


@dataclass(slots=True)
class Session:
    tenant: Tenant
    holder: Holder | None = None
    puts: dict[tuple[bytes, int], Put] = field(default_factory=dict)  # by (key, generation)


class Send(Struct, frozen=True):
    """Effect: this message to this connection, after all earlier effects for it."""

    session: int
    message: MasterToClient | MasterToHolder


@dataclass(frozen=True, slots=True)
class Close:
    """Effect: end this connection; a Disconnected event follows as for any other loss."""

    session: int
    reason: str


Effect = Send | Close


@dataclass(slots=True)
class State:
    """Everything a master knows. ``out`` collects the effects of the step in progress."""

    config: MasterConfig
    epoch: int
    started: float
    next_generation: int
    tenants: dict[str, Tenant] = field(default_factory=dict)
    holders: dict[int, Holder] = field(default_factory=dict)
    by_name: dict[str, Holder] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    waiting: deque[Waiting] = field(default_factory=deque)
    waiting_keys: int = 0  # of all of them
    burials: dict[int, Burial] = field(default_factory=dict)
    buries: dict[int, int] = field(default_factory=dict)  # number of a Bury under way -> its burial
    graves: dict[str, dict[tuple[str, bytes], tuple[Grave, ...]]] = field(
        default_factory=dict
    )  # absent holder -> what it must hear
    unheard: dict[str, None] = field(
        default_factory=dict
    )  # holders that exist and never told this master all they have
    tasks: dict[int, Task] = field(default_factory=dict)
    sketch: CountMinSketch = field(default_factory=CountMinSketch)
    counters: dict[str, int] = field(default_factory=dict)
    open: bool = False
    puts_checked: float = 0.0
    tick: int = 0
    number: int = 0
    turn: int = 0
    out: list[Effect] = field(default_factory=list)

    def send(self, session: int, message: MasterToClient | MasterToHolder) -> None:
        if session in self.sessions:
            self.out.append(Send(session, message))

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    def new_generation(self) -> int:
        self.next_generation += 1
        return self.next_generation - 1

    def new_number(self) -> int:
        """For tasks and burials."""
        self.number += 1
        return self.number

    def new_tick(self) -> int:
        self.tick += 1
        return self.tick

    def tenant(self, name: str) -> Tenant:
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = Tenant(name, self.config.quotas.get(name))
        return found

    def usable_holders(self) -> list[Holder]:
        return [holder for holder in self.holders.values() if holder.usable]

    def absent_code(self, now: float) -> Status:
        """What an unknown key is told: missing only if everyone who could have it was heard (rule ST4)."""
        hearing = any(holder.present and not holder.complete for holder in self.holders.values())
        if now < self.started + self.config.settle_s or not self.holders or hearing:
            return Status.UNAVAILABLE
        return Status.NOT_FOUND
