"""The life of one replica, as the only table that may change ``replica.state``.

put:        NONE -ALLOCATE-> WRITING   -COMMIT-> COMPLETE          REVOKE -> GONE
promotion:  NONE -PROMOTE--> PROMOTING -COMMIT-> COMPLETE          REVOKE -> GONE
SSD, restart: NONE -ADOPT-------------------------> COMPLETE
end:        COMPLETE -RETIRE-> GONE     (nobody holds a lease: the range is free at once)
            COMPLETE -DRAIN--> DRAINING -FREE-> GONE   (unlisted, but its range is not reused before its last lease ends)
LOSE: the holder, its DRAM or its file is gone, from any state that had a place.
"""

from enum import IntEnum
from typing import Protocol


class ReplicaState(IntEnum):
    NONE = 0
    WRITING = 1
    PROMOTING = 2
    COMPLETE = 3
    DRAINING = 4
    GONE = 5


class Cause(IntEnum):
    ALLOCATE = 0
    PROMOTE = 1
    ADOPT = 2
    COMMIT = 3
    REVOKE = 4
    RETIRE = 5
    DRAIN = 6
    FREE = 7
    LOSE = 8


S, C = ReplicaState, Cause
TABLE: dict[tuple[ReplicaState, Cause], ReplicaState] = {
    (S.NONE, C.ALLOCATE): S.WRITING,
    (S.NONE, C.PROMOTE): S.PROMOTING,
    (S.NONE, C.ADOPT): S.COMPLETE,
    (
        S.NONE,
        C.DRAIN,
    ): S.DRAINING,  # found in an inventory though it is removed: a lease of the last epoch may still read it
    (S.WRITING, C.COMMIT): S.COMPLETE,
    (S.PROMOTING, C.COMMIT): S.COMPLETE,
    (S.WRITING, C.REVOKE): S.GONE,
    (S.PROMOTING, C.REVOKE): S.GONE,
    (S.COMPLETE, C.RETIRE): S.GONE,
    (S.COMPLETE, C.DRAIN): S.DRAINING,
    (S.DRAINING, C.FREE): S.GONE,
    (S.WRITING, C.LOSE): S.GONE,
    (S.PROMOTING, C.LOSE): S.GONE,
    (S.COMPLETE, C.LOSE): S.GONE,
    (S.DRAINING, C.LOSE): S.GONE,
}


_AFTER = {  # by cause, then state: a put takes two steps, so it should cost no tuple
    cause: {before: after for (before, by), after in TABLE.items() if by is cause}
    for cause in Cause
}


class IllegalTransition(AssertionError):
    """A bug of ours: nothing on the wire can cause it."""


class _Stateful(Protocol):
    state: ReplicaState


def move(replica: _Stateful, cause: Cause) -> None:
    """Raises ``IllegalTransition`` and changes nothing if the table has no such step."""
    after = _AFTER[cause].get(replica.state)
    if after is None:
        raise IllegalTransition(f"{replica.state.name} replica cannot {cause.name}")
    replica.state = after
