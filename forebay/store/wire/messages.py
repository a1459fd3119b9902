"""Every message of the store, as it stands on the wire.

    client  -- Exists MatchPrefix Query Get PutStart PutEnd PutRevoke Remove ListKeys AskStats AskHolders -->  master
    client  <- Codes Count Located Granted KeyPage StoreStats HolderTable ----------------------------------  master
    holder  -- Register Inventory Beat Persisted Dropped Buried RegisterPrefetch AllocStart PromotionDone --->  master
    holder  <- Registered Peers Serving Retire Bury Forget Promote Prefetchable Allocated ------------------------  master
    client  -- Write ReadMemory ReadSsd Check CopyIn CopyOut PrefetchKeys Touched ------------------------->  holder
    client  <- Codes Part ---------------------------------------------------------------------------------  holder

Bodies are tagged arrays, so field *order* is the format: add fields at the end with a default, or raise
``frames.PROTOCOL_VERSION``. Requests carry ``call``, which the answer repeats. Payload (KV bytes) never is in a body: it travels
behind it (`wire.frames`). `tests/store/test_wire.py` holds golden bytes. ``codes`` is one byte per key: a ``Status``.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec

MAX_KEYS = 8192
MAX_KEY_BYTES = 1024
MAX_TENANT_CHARS = 64
MAX_ENTRIES = 8192  # of one list of a holder's message, or of its master's
MAX_PEERS = 1024
MAX_LINE_CHARS = 200
MAX_OBJECT_BYTES = 1 << 40

Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# What one holder says comes to others by way of the master, so all of it has limits that theirs can take:
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
MAX_CAPACITY = 1 << 50  # a thousand such add up to something that msgpack can say
Capacity = Annotated[int, msgspec.Meta(ge=0, le=MAX_CAPACITY)]
Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_OBJECT_BYTES)]
Key = Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]
TenantName = Annotated[str, msgspec.Meta(max_length=MAX_TENANT_CHARS)]
HolderName = Annotated[
    str, msgspec.Meta(pattern=r"^[!-~]{1,64}\Z")
]  # stands on a line of its own in files of other holders
MaybeHolder = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{0,64}\Z")]
Whereabouts = Annotated[
    str, msgspec.Meta(pattern=r"^[!-~]{0,255}\Z")
]  # a host, an abstract socket, a machine
Line = Annotated[
    str, msgspec.Meta(max_length=MAX_LINE_CHARS, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")
]  # ends up in terminals


_T = TypeVar("_T")


def batched(entries: Sequence[_T], size: int) -> list[list[_T]]:
    """In pieces that one message may have."""
    return [list(entries[start : start + size]) for start in range(0, len(entries), size)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class _Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Tier(IntEnum):
    MEMORY = 0
    SSD = 1


# ------------------------------------------------------------------------------------------------ opening a connection


class Role(IntEnum):
    CLIENT = 0
    HOLDER = 1


class Challenge(_Message, frozen=True):
    """First word of a server: ``nonce`` of 16 bytes to be signed (`wire.auth`)."""

    nonce: bytes


class Hello(_Message, frozen=True):
    role: Role
    tenant: str
    nonce: bytes
    mac: bytes


class Welcome(_Message, frozen=True):
    """The server's proof over the peer's nonce. ``epoch`` names this incarnation of the server.

    ``segment_bytes``: of a holder over its Unix socket, the size of the segment whose descriptor comes along; else 0.
    """

    mac: bytes
    epoch: int
    segment_bytes: int = 0


class Refused(_Message, frozen=True):
    """Why this peer is not served; the connection is closed after it."""

    reason: str


# ------------------------------------------------------------------------------------------------ client -> master


class Exists(_Message, frozen=True):
    """Read-only: neither a lease nor a use. Answer: ``Codes`` of OK, NOT_FOUND or UNAVAILABLE."""

    call: int
    keys: list[bytes]


class MatchPrefix(_Message, frozen=True):
    """How many leading ``keys`` have every ``key + part``; read-only. Answer: ``Count``."""

    call: int
    keys: list[bytes]
    parts: list[bytes]


class Query(_Message, frozen=True):
    """Where keys are, read-only: no lease, no promotion, no recency, no metrics. Answer: ``Located`` with ``ttl_s`` 0."""

    call: int
    keys: list[bytes]


class Get(_Message, frozen=True):
    """Where keys are, with a read lease on those in memory. Answer: ``Located``."""

    call: int
    keys: list[bytes]


class PutStart(_Message, frozen=True):
    """Ask for room. Answer: ``Granted``."""

    call: int
    keys: list[bytes]
    lengths: list[int]


class PutEnd(_Message, frozen=True):
    """The bytes of these puts are at the holders ``written`` (numbers; empty = all that were granted). Answer: ``Codes``."""

    call: int
    keys: list[bytes]
    generations: list[int]
    written: list[tuple[int, ...]]


class PutRevoke(_Message, frozen=True):
    """Give these puts up. Answer: ``Codes``."""

    call: int
    keys: list[bytes]
    generations: list[int]


class Remove(_Message, frozen=True):
    """Answered (``Codes``) once every replica's holder has logged the removal."""

    call: int
    keys: list[bytes]


class ListKeys(_Message, frozen=True):
    """Keys that begin with ``prefix`` and sort after ``after``, at most ``limit``. Answer: ``KeyPage``."""

    call: int
    prefix: bytes
    after: bytes
    limit: int


class AskStats(_Message, frozen=True):
    call: int


class AskHolders(_Message, frozen=True):
    call: int


# ------------------------------------------------------------------------------------------------ master -> client


class Codes(_Message, frozen=True):
    call: int
    codes: bytes


class Count(_Message, frozen=True):
    call: int
    count: int


class Spot(_Part, frozen=True):
    """One readable copy: at ``offset`` of the segment of holder number ``holder`` under ``stamp`` (MEMORY), or in its log (SSD)."""

    holder: int
    tier: Tier
    offset: Natural = 0
    stamp: Natural = 0


class Place(_Part, frozen=True):
    """Where one key is; ``spots`` memory first. ``code`` is a ``Status``."""

    code: int
    length: Natural = 0
    generation: Natural = 0
    spots: tuple[Spot, ...] = ()


class Located(_Message, frozen=True):
    """The memory of spots is not reused within ``ttl_s`` of the master's receipt of the Get (rule ST1)."""

    call: int
    ttl_s: float
    places: list[Place]


class Room(_Part, frozen=True):
    """Where one replica is to be written; ``token`` proves to the holder that the master said so."""

    holder: int
    offset: Natural
    token: bytes


class Grant(_Part, frozen=True):
    """``code`` OK: write to ``rooms``, then PutEnd. EXISTS: it is there. AGAIN: no room yet, end what was granted and ask again."""

    code: int
    generation: Natural = 0
    rooms: tuple[Room, ...] = ()


AGAIN = 255  # a code of Grant alone, never shown to callers


class Granted(_Message, frozen=True):
    call: int
    grants: list[Grant]


class KeyPage(_Message, frozen=True):
    """(key, length) pairs in key order."""

    call: int
    keys: list[tuple[bytes, int]]


class HolderEntry(_Part, frozen=True):
    """How to reach one holder. ``unix``: abstract socket name, usable only where ``machine`` is the reader's own."""

    number: int
    name: str
    instance: str
    host: str
    port: int
    unix: str
    machine: str
    usable: bool
    memory_bytes: int
    memory_used: int
    ssd_bytes: int
    ssd_used: int
    ssd_state: str


class HolderTable(_Message, frozen=True):
    call: int
    epoch: int
    holders: list[HolderEntry]


class StoreStats(_Message, frozen=True):
    """One master's figures. ``counters`` only rise within one epoch."""

    call: int
    epoch: int
    objects: int
    memory_bytes: int
    memory_used: int
    ssd_bytes: int
    ssd_used: int
    holders: int
    holders_usable: int
    waiting_puts: int
    promotions_in_flight: int
    counters: dict[str, int]
    tenants: dict[str, int]


# ------------------------------------------------------------------------------------------------ holder -> master


class Register(_Message, frozen=True):
    """A holder's first word. ``name`` is stable over restarts (kept beside the log), ``instance`` names this process's segment.

    ``peers``: all holders it was ever told of, so that a new master knows whom it has not heard yet.
    """

    name: HolderName
    instance: HolderName
    host: Whereabouts
    port: Port
    unix: Whereabouts
    machine: Whereabouts
    memory_bytes: Capacity
    ssd_bytes: Capacity
    highest_generation: Natural
    peers: Annotated[list[HolderName], msgspec.Meta(max_length=MAX_PEERS)] = []


class HeldMemory(_Part, frozen=True):
    """``buried``: removed, and here only until its last lease ends and it is retired."""

    tenant: TenantName
    key: Key
    generation: Natural
    length: Length
    offset: Natural
    stamp: Natural
    buried: bool = False


class HeldSsd(_Part, frozen=True):
    tenant: TenantName
    key: Key
    generation: Natural
    length: Length


class Grave(_Part, frozen=True):
    """``key`` is removed up to and including ``generation``; ``exact``: that generation alone (a put that was given up), so an
    older one stays. ``behalf``: the absent holder that has yet to hear of it, or ""."""

    tenant: TenantName
    key: Key
    generation: Natural
    exact: bool = False
    behalf: MaybeHolder = ""


Held = Annotated[list[HeldSsd], msgspec.Meta(max_length=MAX_ENTRIES)]
Graves = Annotated[list[Grave], msgspec.Meta(max_length=MAX_ENTRIES)]


class Inventory(_Message, frozen=True):
    """A piece of what a holder has; ``sequence`` counts from 0 without a hole; ``last`` ends it."""

    sequence: int
    memory: Annotated[list[HeldMemory], msgspec.Meta(max_length=MAX_ENTRIES)]
    ssd: Held
    graves: Graves
    last: bool


class Beat(_Message, frozen=True):
    """Every 0.5 s. ``ssd_state``: "none", "ok" or what is wrong with it, in one line. ``unasked``: gets since the last one that the
    master was not asked about, of ``unasked_bytes``."""

    ssd_used: Capacity
    ssd_state: Line
    ssd_ok: bool
    unasked: Capacity = 0
    unasked_bytes: Capacity = 0


class Persisted(_Message, frozen=True):
    """These are in the log, committed to its index. With --fsync never they may still be lost with the machine."""

    entries: Held


class Dropped(_Message, frozen=True):
    """Records that left the log (their file was evicted, or a read found them bad), or that will never be in it."""

    entries: Held


class Buried(_Message, frozen=True):
    """The tombstones of ``Bury`` number ``op`` are logged."""

    op: int


class RegisterPrefetch(_Message, frozen=True):
    """May this holder promote these keys of one tenant? ``hint_s``: for how long a read is expected. Answer: ``Prefetchable``."""

    call: int
    tenant: TenantName
    keys: list[bytes]
    hint_s: float


class AllocStart(_Message, frozen=True):
    """Memory for these tasks, please. Answer: ``Allocated``."""

    call: int
    tasks: Annotated[list[int], msgspec.Meta(max_length=MAX_ENTRIES)]


class PromotionDone(_Message, frozen=True):
    task: int
    ok: bool


# ------------------------------------------------------------------------------------------------ master -> holder


class Registered(_Message, frozen=True):
    """Send the inventory. ``token_key`` signs the rooms given to writers; ``lease_s`` is the ttl of read leases."""

    number: int
    epoch: int
    token_key: bytes
    lease_s: float


class Peers(_Message, frozen=True):
    """The names of all holders there are, to be remembered over restarts."""

    names: list[str]


class Serving(_Message, frozen=True):
    """The inventory is taken in: this holder's keys are served."""

    adopted: int


class Retire(_Message, frozen=True):
    """Memory that holds nothing any more: (offset, stamp) pairs."""

    ranges: list[tuple[Natural, Natural]]


class Bury(_Message, frozen=True):
    """Log these removals, never list the memory of these objects as alive again, then say ``Buried``."""

    op: int
    graves: Graves


class Forget(_Message, frozen=True):
    """Graves kept on behalf of this holder are delivered."""

    behalf: str


class Promote(_Message, frozen=True):
    """Run this task (promotion on hit)."""

    task: int
    tenant: str
    key: bytes


class PrefetchCode(IntEnum):
    """What register_prefetch and alloc_start say, in the order of the checks."""

    OK = 0
    UNAVAILABLE_IN_CURRENT_STATUS = 1
    OBJECT_NOT_FOUND = 2
    REPLICA_IS_NOT_READY = 3
    PROMOTION_ALREADY_EXISTS = 4
    INVALID_PARAMS = 5
    KEYS_ULTRA_LIMIT = 6
    NO_AVAILABLE_HANDLE = 7


class Prefetchable(_Message, frozen=True):
    """One ``PrefetchCode`` and one task number (0 unless OK) per key."""

    call: int
    codes: bytes
    tasks: list[int]


class Allotment(_Part, frozen=True):
    code: PrefetchCode
    generation: Natural = 0
    length: Natural = 0
    offset: Natural = 0
    stamp: Natural = 0


class Allocated(_Message, frozen=True):
    call: int
    allotments: list[Allotment]


# ------------------------------------------------------------------------------------------------ client -> holder


class Piece(_Part, frozen=True):
    """One object to write at ``offset`` under ``generation`` (= its stamp); ``crc`` is the CRC32C of its ``length`` bytes."""

    key: bytes
    generation: Natural
    offset: Natural
    length: Natural
    crc: Natural
    token: bytes


class Write(_Message, frozen=True):
    """The pieces' bytes follow as payload, one after another. Answer: ``Codes``."""

    call: int
    pieces: list[Piece]


class Slice(_Part, frozen=True):
    """``length`` bytes from ``start`` of the object in memory at ``offset`` under ``stamp``."""

    offset: Natural
    stamp: Natural
    start: Natural
    length: Natural


class ReadMemory(_Message, frozen=True):
    """Answer: ``Codes``, and as payload the bytes of the slices that are OK, one after another."""

    call: int
    slices: list[Slice]


class Cut(_Part, frozen=True):
    """``length`` bytes from ``start`` of a record of the log."""

    key: bytes
    generation: Natural
    start: Natural
    length: Natural


class ReadSsd(_Message, frozen=True):
    """Answer: one ``Part`` per cut, in the order they are ready."""

    call: int
    cuts: list[Cut]


class Check(_Message, frozen=True):
    """Is this memory still the same object? Answer: ``Codes``."""

    call: int
    ranges: list[tuple[Natural, Natural]]


class CopyIn(_Message, frozen=True):
    """Local put: the bytes lie in the staging memory handed over at the start, or in the ``lent`` one, at ``at``. Answer: ``Codes``."""

    call: int
    pieces: list[Piece]
    at: list[Natural]
    lent: bool = False


class CopyOut(_Message, frozen=True):
    """Local read from the log into staging memory at ``at``, up to the next 4 KiB behind what is wanted. Answer: ``Codes``."""

    call: int
    cuts: list[Cut]
    at: list[Natural]


class PrefetchKeys(_Message, frozen=True):
    """Bring these from SSD to memory if you can. No answer. Sent as an optional frame: who does not know it drops it.

    ``demand``: a get waits for them, so a cooldown of the receiver is no reason to decline.
    """

    keys: list[bytes]
    hint_s: float
    demand: bool = False


class Touched(_Message, frozen=True):
    """The client has read these (key, generation) records of the log itself, ``bytes`` of them all; ``unasked`` of them, of
    ``unasked_bytes``, without asking the master either. No answer; optional."""

    records: list[tuple[bytes, Natural]]
    bytes: Natural
    unasked: Natural = 0
    unasked_bytes: Natural = 0


# ------------------------------------------------------------------------------------------------ holder -> client


class Part(_Message, frozen=True):
    """Cut number ``index`` of a ReadSsd; its bytes follow as payload if ``code`` is OK."""

    call: int
    index: int
    code: int


ClientToMaster = (
    Exists
    | MatchPrefix
    | Query
    | Get
    | PutStart
    | PutEnd
    | PutRevoke
    | Remove
    | ListKeys
    | AskStats
    | AskHolders
)
MasterToClient = Codes | Count | Located | Granted | KeyPage | StoreStats | HolderTable
HolderToMaster = (
    Register
    | Inventory
    | Beat
    | Persisted
    | Dropped
    | Buried
    | RegisterPrefetch
    | AllocStart
    | PromotionDone
)
MasterToHolder = (
    Registered
    | Peers
    | Serving
    | Retire
    | Bury
    | Forget
    | Promote
    | Prefetchable
    | Allocated
    | Refused
)
ClientToHolder = Write | ReadMemory | ReadSsd | Check | CopyIn | CopyOut | PrefetchKeys | Touched
HolderToClient = Codes | Part
Opening = Challenge | Hello | Welcome | Refused
Message = (
    ClientToMaster
    | MasterToClient
    | HolderToMaster
    | MasterToHolder
    | ClientToHolder
    | HolderToClient
    | Opening
)
