"""What goes wrong in a history, drawn swarm-wise from its seed (Groce et al., Swarm Testing, ISSTA 2012): each history has its own few
kinds of fault, so that rare combinations get room, and "none" is always possible.

A fault is armed at a time. One with a ``during`` waits for that activity of the replica (a client's abort for that state of a request)
and strikes there, so that every kind meets every state; one that never finds it does not strike.
"""

import random
from dataclasses import dataclass
from enum import StrEnum

from forebay.core.lifecycle import Phase, RequestState
from forebay.core.messages import GridState
from forebay.core.planner import Planner
from forebay.core.request import Request
from forebay.sim.preset import Preset


class FaultKind(StrEnum):
    SLOW_RANK = "slow rank"
    PAUSED_RANK = "paused rank"
    SILENT_RANK = "silent rank"
    LOST_RANK = "lost rank"
    FAULTED_RANK = "faulted rank"
    POISONOUS_REQUEST = "poisonous request"
    POISONOUS_PAGES = "poisonous pages"
    LOST_START = "lost start"
    PAUSED_PLANNER = "paused planner"
    FAILED_ALLOCATION = "failed allocation"
    SMALLER_POOLS = "smaller pools"
    FAILED_BACKUP = "failed backup"
    IO_ERROR = "I/O error"
    SHORT_READ = "short read"
    CORRUPT_READ = "corrupt read"
    OTHER_KEYS_PAGE = "another key's page"
    HANGING_IO = "hanging I/O"
    STORE_EVICTION = "store eviction"
    EVICTION_AFTER_EXIST = "eviction between exist and get"
    SILENT_STORE = "silent store"
    STORE_DOWN_AT_START = "store down at start"
    STALE_MESSAGES = "stale messages"
    DUPLICATE_MESSAGE = "duplicate message"
    CLIENT_ABORT = "client abort"
    BURST = "burst of requests"


class Activity(StrEnum):
    """What a replica is at; several at once but for the first two."""

    STARTING = "starting"
    IDLE = "idle"
    COMPUTING = "computing"
    LOADING = "loading"
    SAVING = "saving"
    STORING = "storing"
    ASKING = "asking"
    FETCHING = "fetching"
    CANCELLING = "cancelling"
    RETRACTED = "retracted"
    FLUSHING = "flushing"


class RequestPoint(StrEnum):
    """Where a request stands, as far as an abort or a lost grid may care."""

    NOT_ASKED = "not asked"
    ASKING = "asking"
    FETCHING = "fetching"
    SETTLED = "settled"
    READY = "fetched"  # a ticket has brought pages, which are pinned for it
    PREFILLING = "prefilling"
    DECODING = "decoding"
    AWAITING = "awaiting a token"


HARMLESS = (
    FaultKind.SLOW_RANK, FaultKind.FAILED_ALLOCATION, FaultKind.FAILED_BACKUP, FaultKind.IO_ERROR, FaultKind.SHORT_READ,
    FaultKind.CORRUPT_READ, FaultKind.HANGING_IO, FaultKind.STORE_EVICTION, FaultKind.EVICTION_AFTER_EXIST, FaultKind.SILENT_STORE,
    FaultKind.STALE_MESSAGES, FaultKind.CLIENT_ABORT, FaultKind.BURST,
)  # fmt: skip
LATER = (
    FaultKind.OTHER_KEYS_PAGE,
    FaultKind.STORE_DOWN_AT_START,
)  # as harmless; they came after seeds were kept
LATER_SHARE = 0.15  # of histories with one of them
COSTS_A_GRID = frozenset(FaultKind) - {*HARMLESS, *LATER, FaultKind.PAUSED_PLANNER} | {
    FaultKind.SLOW_RANK
}
MAX_STORM_KINDS = 4
MAX_STRIKES = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """``seconds``: how long it lasts, where it lasts; ``share``: of what it may touch; ``rank``: modulo the grid's."""

    kind: FaultKind
    at: float
    during: Activity | RequestPoint | None
    seconds: float
    rank: int
    share: float


@dataclass(frozen=True, slots=True)
class Poison:
    """What ends a rank. ``late``: not before the piece that yields a token; ``faulted``: by an error or a crash, else as if killed."""

    late: bool
    faulted: bool


def draw_faults(randomness: random.Random, preset: Preset, horizon: float) -> list[Fault]:
    """The faults of one history, armed between 0 and ``horizon`` seconds."""
    kinds = [kind for kind in FaultKind if kind not in LATER]
    if preset is Preset.LITE:
        drawn = [randomness.choice(HARMLESS)] * randomness.choice([0, 1, 1])
    elif preset is Preset.ONE_FAULT:
        drawn = [randomness.choice(kinds)] * randomness.randint(1, 3)
    else:
        swarm = randomness.sample(kinds, randomness.randint(2, MAX_STORM_KINDS))
        drawn = [kind for kind in swarm for _ in range(randomness.randint(1, MAX_STRIKES))]
    return [_draw(randomness, kind, horizon) for kind in _with_later(randomness, preset, drawn)]


def _with_later(
    randomness: random.Random, preset: Preset, drawn: list[FaultKind]
) -> list[FaultKind]:
    """Now and then with a kind of `LATER`, from a copy of the stream: seeds without one are the histories that they were before."""
    copy = random.Random()
    copy.setstate(randomness.getstate())
    if copy.random() >= LATER_SHARE:
        return drawn
    kind = copy.choice(LATER)
    if preset is not Preset.STORM:
        return [kind] * max(1, len(drawn))
    most = len({*drawn}) == MAX_STORM_KINDS
    return [one for one in drawn if not (most and one is drawn[-1])] + [kind]


def _draw(randomness: random.Random, kind: FaultKind, horizon: float) -> Fault:
    during: Activity | RequestPoint | None = None
    if kind is FaultKind.CLIENT_ABORT:
        during = randomness.choice(list(RequestPoint))
    elif kind is FaultKind.STORE_DOWN_AT_START:
        during, horizon = (
            Activity.STARTING,
            randomness.choice([0.0, horizon]),
        )  # the first start, or one after a grid was lost
    elif kind is FaultKind.OTHER_KEYS_PAGE and randomness.random() < 0.5:
        during = Activity.FETCHING  # it does something to fetches alone
    elif randomness.random() < 0.6:
        during = randomness.choice(list(Activity))
    seconds = randomness.choice([0.05, 0.5, 3.0, 8.0, 30.0])
    return Fault(
        kind,
        randomness.uniform(0, horizon),
        during,
        seconds,
        randomness.randrange(64),
        randomness.choice([0.3, 1.0]),
    )


def activities(planner: Planner, flushing: bool) -> list[Activity]:
    """What the replica is at now."""
    if planner.state is GridState.FAILED:
        return []
    if planner.state is not GridState.READY:
        return [Activity.STARTING]
    replica = planner.replica
    assert replica.cache is not None
    phases = {request.phase for request in replica.waiting}
    retracted = any(request.emitted for request in replica.waiting)
    cancelling = Phase.FETCHING not in phases and bool(replica.tickets.held_pages)
    going = [
        (Activity.COMPUTING, bool(replica.in_flight)),
        (
            Activity.LOADING,
            bool(replica.loads) or any(fenced.loaded for fenced in replica.cache.fenced),
        ),
        (Activity.SAVING, bool(replica.backups.in_flight)),
        (Activity.STORING, bool(replica.stores.in_flight)),
        (Activity.ASKING, Phase.ASKING in phases),
        (Activity.FETCHING, Phase.FETCHING in phases),
        (Activity.CANCELLING, cancelling),
        (Activity.RETRACTED, retracted),
        (Activity.FLUSHING, flushing),
    ]
    return [activity for activity, goes_on in going if goes_on] or [Activity.IDLE]


def point_of(request: Request) -> RequestPoint:
    """Where a request that has not ended stands."""
    if request.state is RequestState.RUNNING:
        if request.prefilling:
            return RequestPoint.PREFILLING
        return RequestPoint.AWAITING if request.awaits_token else RequestPoint.DECODING
    if request.phase is Phase.SETTLED:
        return RequestPoint.READY if request.ready else RequestPoint.SETTLED
    return {
        Phase.NOT_ASKED: RequestPoint.NOT_ASKED,
        Phase.ASKING: RequestPoint.ASKING,
        Phase.FETCHING: RequestPoint.FETCHING,
    }[request.phase]
