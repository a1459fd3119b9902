"""What a campaign over the store has met, as tables; what it should have met and has not fails it.

master's state x event      every message that a master gets, and what becomes of its connections
key's state x event         where an object stood when an event came that concerns it
fault kind x activity       what the store was at when the fault struck
"""

from collections.abc import Iterator
from enum import StrEnum

from forebay.sim.coverage import Cell, Coverage, table
from forebay.store.master.machine import Disconnected, Event, FromClient, FromHolder, Master
from forebay.store.master.records import State
from forebay.store.wire.messages import (
    AllocStart,
    Beat,
    Buried,
    Dropped,
    Get,
    Inventory,
    MatchPrefix,
    Persisted,
    PromotionDone,
    PutEnd,
    PutRevoke,
    PutStart,
    Register,
    RegisterPrefetch,
    Remove,
)


class StoreFault(StrEnum):
    HOLDER_KILLED = "holder killed"
    HOLDER_CUT_OFF = "holder cut off"
    HOLDER_PAUSED = "holder paused"
    MASTER_KILLED = "master killed"
    WRITER_LOST = "writer lost"
    SLOW_COPIES = "slow copies"
    DISK_FAILS = "disk fails"
    RECORD_EVICTED = "record evicted"


class MasterState(StrEnum):
    CLOSED = "not open yet"  # it has not heard every holder that there is
    PARTIAL = "a holder is away"
    WHOLE = "all holders serve"


class KeyState(StrEnum):
    ABSENT = "absent"
    BEING_PUT = "being put"
    AWAY = "holder away"
    PROMOTING = "being promoted"
    LEASED = "leased"
    MEMORY = "in memory alone"
    BOTH = "in memory and on SSD"
    SSD = "on SSD alone"


class StoreActivity(StrEnum):
    """What the store is at; several at once but for the first."""

    IDLE = "idle"
    PUTTING = "putting"
    WAITING_FOR_ROOM = "waiting for room"
    READING = "reading"
    LOGGING = "logging"
    PROMOTING = "promoting"
    BURYING = "burying"
    RECOVERING = "recovering"  # a holder or the master is away, or was not heard yet


CLIENTS = (MatchPrefix, Get, PutStart, PutEnd, PutRevoke, Remove)
HOLDERS = (
    Register,
    Inventory,
    Beat,
    Persisted,
    Dropped,
    Buried,
    RegisterPrefetch,
    AllocStart,
    PromotionDone,
)
EVENTS = ("Connected", "Disconnected", "Ticked", *(kind.__name__ for kind in CLIENTS + HOLDERS))
CONCERNING = (
    Get,
    PutStart,
    PutEnd,
    PutRevoke,
    Remove,
    Inventory,
    Persisted,
    Dropped,
    RegisterPrefetch,
    PromotionDone,
)
LOST = "holder lost"

_TASKS = "a holder forgets what it asked of the last master, and this one gives no task before it is open"
_COUNTED = "only keys that are there are counted for a lost holder"

UNREACHABLE: dict[Cell, str] = {
    (MasterState.CLOSED, AllocStart.__name__): _TASKS,
    (
        MasterState.WHOLE,
        Inventory.__name__,
    ): "a holder that has yet to tell what it has does not serve",
    (KeyState.ABSENT, LOST): _COUNTED,
    **{
        (key, PromotionDone.__name__): "an object with a task is being promoted"
        for key in (KeyState.LEASED, KeyState.MEMORY, KeyState.BOTH, KeyState.SSD)
    },
}

STORE = Coverage(
    (
        table(MasterState, EVENTS),
        table(KeyState, (*(kind.__name__ for kind in CONCERNING), LOST)),
        table(StoreFault, StoreActivity),
    ),
    UNREACHABLE,
)


def cells_of(master: Master, now: float, event: Event, tenant: str) -> Iterator[Cell]:
    """The cells of the first two tables that a step with ``event`` meets."""
    state = master.state
    message = event.message if isinstance(event, FromClient | FromHolder) else event
    yield state_of(state), type(message).__name__
    if isinstance(event, Disconnected):
        session = state.sessions.get(event.session)
        if session is not None and session.holder is not None:
            for key in [*state.tenant(tenant).objects, *state.tenant(tenant).pending]:
                yield key_state(state, now, tenant, key), LOST
    elif isinstance(message, PromotionDone):
        yield from _promotion(state, now, tenant, message)
    elif isinstance(message, CONCERNING):
        for key in _keys_of(message):
            yield key_state(state, now, tenant, key), type(message).__name__


def state_of(state: State) -> MasterState:
    if not state.open:
        return MasterState.CLOSED
    known = state.holders.values()
    return (
        MasterState.WHOLE
        if known and all(holder.usable for holder in known)
        else MasterState.PARTIAL
    )


def key_state(state: State, now: float, tenant: str, key: bytes) -> KeyState:
    owner = state.tenant(tenant)
    if key in owner.pending:
        return KeyState.BEING_PUT
    found = owner.objects.get(key)
    if found is None:
        return KeyState.ABSENT
    if not found.readable():
        return KeyState.AWAY
    if found.task is not None:
        return KeyState.PROMOTING
    if found.memory and found.lease_until > now:
        return KeyState.LEASED
    if not found.memory:
        return KeyState.SSD
    return KeyState.BOTH if found.ssd else KeyState.MEMORY


def _promotion(state: State, now: float, tenant: str, message: PromotionDone) -> Iterator[Cell]:
    """An object that was removed or replaced meanwhile is absent, whatever has its key now."""
    task = state.tasks.get(message.task)
    if task is not None:
        key = task.object.key
        listed = state.tenant(tenant).objects.get(key) is task.object
        yield (
            key_state(state, now, tenant, key) if listed else KeyState.ABSENT,
            PromotionDone.__name__,
        )


def _keys_of(message: object) -> list[bytes]:
    match message:
        case (
            Get(keys=keys)
            | PutStart(keys=keys)
            | PutEnd(keys=keys)
            | PutRevoke(keys=keys)
            | Remove(keys=keys)
        ):
            return list(keys)
        case RegisterPrefetch(keys=keys):
            return list(keys)
        case Persisted(entries=entries) | Dropped(entries=entries):
            return [entry.key for entry in entries]
        case Inventory(memory=memory, ssd=ssd):
            return [entry.key for entry in memory] + [entry.key for entry in ssd]
    return []
