"""The life of a request: the only table that may change ``state`` and ``phase`` of one.

                QUERY                ANSWER, LATE               ADMIT
    NOT_ASKED ---------> ASKING ---------------> SETTLED -----------------> RUNNING --END--> DONE
        |  '--NOTHING------------------------------^ |^ ^                     |
        '--------------FETCH------> FETCHING <-FETCH-'|  '------RETRACT-------'
                                        '---FETCHED---'

All but RUNNING and DONE are WAITING; END and LOSE_GRID may come at any time, and a lost grid sends
every request back to NOT_ASKED. Without a store a request is admitted as it came, NOT_ASKED.
"""

from enum import Enum, IntEnum, auto
from typing import Protocol


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


class Phase(Enum):
    """Where a waiting request stands with the store; a running one keeps where it stood."""

    NOT_ASKED = "not asked"
    ASKING = "asking"
    FETCHING = "fetching"
    SETTLED = "settled"


class Cause(IntEnum):
    QUERY = auto()  # the store is asked what it has of the prompt
    NOTHING = auto()  # there is nothing to ask for or to fetch, or no asking any more
    LATE = auto()  # the store has not answered in time
    ANSWER = auto()  # the store has answered, maybe late
    FETCH = auto()  # a fetch brings pages of its prompt
    FETCHED = auto()  # the fetch has ended, or the request waits for it no longer
    ADMIT = auto()
    RETRACT = auto()
    LOSE_GRID = auto()
    END = auto()


Place = tuple[RequestState, Phase]
W, R, D = RequestState
NEW, ASKING, FETCHING, SETTLED = Phase

TABLE: dict[Cause, dict[Place, Place]] = {
    Cause.QUERY: {(W, NEW): (W, ASKING), (W, SETTLED): (W, ASKING)},
    Cause.NOTHING: {(W, NEW): (W, SETTLED), (W, SETTLED): (W, SETTLED)},
    Cause.LATE: {(W, ASKING): (W, SETTLED)},
    Cause.ANSWER: {(W, ASKING): (W, SETTLED), (W, SETTLED): (W, SETTLED)},
    Cause.FETCH: {(W, NEW): (W, FETCHING), (W, SETTLED): (W, FETCHING)},
    Cause.FETCHED: {(W, FETCHING): (W, SETTLED)},
    Cause.ADMIT: {(W, NEW): (R, NEW), (W, SETTLED): (R, SETTLED)},
    Cause.RETRACT: {(R, NEW): (W, NEW), (R, SETTLED): (W, SETTLED)},
    Cause.LOSE_GRID: {(state, phase): (W, NEW) for state in (W, R) for phase in Phase},
    Cause.END: {(state, phase): (D, phase) for state in (W, R) for phase in Phase},
}


class IllegalMove(AssertionError):
    """A bug of ours: no message can cause it."""


class _Living(Protocol):
    state: RequestState
    phase: Phase


def move(request: _Living, cause: Cause) -> None:
    """Raises ``IllegalMove`` and changes nothing if the table has no such step."""
    after = TABLE[cause].get((request.state, request.phase))
    if after is None:
        raise IllegalMove(
            f"a request that is {request.state.value} and {request.phase.value} cannot {cause.name}"
        )
    request.state, request.phase = after
