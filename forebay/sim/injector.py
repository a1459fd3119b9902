"""Faults as they strike: armed at their time, struck at the first turn at which the replica is at what they wait for."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from forebay.core.messages import GridState
from forebay.core.planner import Event, Planner
from forebay.sim.coverage import Cell
from forebay.sim.fake_store import FakeStore, Outcome, Spell
from forebay.sim.faults import (
    COSTS_A_GRID,
    Activity,
    Fault,
    FaultKind,
    Poison,
    RequestPoint,
    activities,
    point_of,
)
from forebay.sim.grid import Acknowledgement, FakeGrid
from forebay.sim.heap import EventHeap
from forebay.sim.options import Options

SLOWNESS = 30.0
BURST_REQUESTS = 8
FOR_GOOD_S = 30.0  # a rank that is stopped for so long is never resumed
MOST_LOST_STARTS = 6  # in a row: often more than the planner puts up with
STANDSTILL_S = 1.0  # the real loop notices when it has stood still for longer
SPELLS = {
    FaultKind.IO_ERROR: Outcome.ERROR,
    FaultKind.SHORT_READ: Outcome.SHORT,
    FaultKind.CORRUPT_READ: Outcome.CORRUPT,
    FaultKind.OTHER_KEYS_PAGE: Outcome.OTHER,
    FaultKind.HANGING_IO: Outcome.HANG,
}


class Tally(Protocol):
    """What a history reports of its faults."""

    faults: int
    met: Counter[Cell]


class Victim(Protocol):
    """What faults strike: a history (`sim.history`), as far as they touch it."""

    planner: Planner
    options: Options
    heap: EventHeap
    store: FakeStore
    grid: FakeGrid | None
    inbox: list[Event]
    newest: Acknowledgement | None
    pages: int
    poison: dict[str, Poison]
    poisonous_pages: dict[bytes, Poison]
    failing_starts: int
    may_restart: bool
    stands_until: float

    @property
    def report(self) -> Tally: ...

    @property
    def recent(self) -> Mapping[type, list[Acknowledgement]]: ...

    @property
    def is_flushing(self) -> bool: ...

    def submit(self, request_id: str, max_tokens: int | None = None) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def lose(self, grid: FakeGrid, reason: str, *, faulted: bool = False) -> None: ...


class Injector:
    """The faults of one history."""

    def __init__(self, history: Victim) -> None:
        self._history = history
        self._armed: list[Fault] = []
        self._bursts = 0

    def arm(self, fault: Fault) -> None:
        if fault.during is None:
            self._strike(fault, self._activities())
        else:
            self._armed.append(fault)

    def tend(self) -> None:
        """After a turn: whose moment has come?"""
        if not self._armed:
            return
        going = self._activities()
        waiting, self._armed = self._armed, []
        for fault in waiting:
            if not self._may_strike(fault, going):
                self._armed.append(fault)

    def _activities(self) -> list[Activity]:
        return activities(self._history.planner, self._history.is_flushing)

    def _may_strike(self, fault: Fault, going: list[Activity]) -> bool:
        """Whether it has struck."""
        if isinstance(fault.during, RequestPoint):
            requests = self._history.planner.replica.requests.values()
            found = next(
                (request for request in requests if point_of(request) is fault.during), None
            )
            if found is None:
                return False
            self._history.abort(found.request_id)
            self._count(fault, going)
            return True
        too_late = (
            self._history.planner.state is GridState.FAILED
            and fault.kind is FaultKind.STALE_MESSAGES
        )
        if fault.during not in going and not too_late:
            return False
        self._strike(fault, going)
        return True

    def _count(self, fault: Fault, going: list[Activity]) -> None:
        self._history.report.faults += 1
        for activity in going:
            self._history.report.met[str(fault.kind), str(activity)] += 1

    def _strike(self, fault: Fault, going: list[Activity]) -> None:
        history = self._history
        if history.planner.state is GridState.FAILED and fault.kind is not FaultKind.STALE_MESSAGES:
            return
        self._count(fault, going)
        history.may_restart |= fault.kind in COSTS_A_GRID
        match fault.kind:
            case FaultKind.PAUSED_PLANNER:
                self._pause_planner(fault.seconds)
            case FaultKind.STORE_EVICTION:
                history.store.evict(fault.share)
            case FaultKind.EVICTION_AFTER_EXIST:
                self._for_a_while(
                    fault.seconds,
                    lambda on: setattr(history.store, "loses_on_query", fault.share if on else 0.0),
                )
            case FaultKind.SILENT_STORE:
                history.store.silent_until = history.heap.now + fault.seconds
            case FaultKind.STORE_DOWN_AT_START:
                history.store.down_until = history.heap.now + fault.seconds
            case kind if kind in SPELLS:
                history.store.enchant(
                    Spell(SPELLS[kind], history.heap.now + fault.seconds, fault.share)
                )
            case FaultKind.STALE_MESSAGES:
                for each in (each for same in history.recent.values() for each in same):
                    history.inbox.append(
                        msgspec.structs.replace(
                            each, epoch=min(each.epoch, history.planner.epoch - 1)
                        )
                    )
            case FaultKind.DUPLICATE_MESSAGE:
                history.inbox += [] if history.newest is None else [history.newest]
            case FaultKind.CLIENT_ABORT:
                raise AssertionError("an abort strikes at a request's point")
            case FaultKind.BURST:
                self._burst()
            case FaultKind.SMALLER_POOLS:
                history.pages = max(history.pages // 2, 1)
                self._kill_rank(fault)
            case _:
                self._strike_rank(fault)

    def _strike_rank(self, fault: Fault) -> None:
        history = self._history
        grid = history.grid
        assert grid is not None
        number = fault.rank % len(grid.ranks)
        rank = grid.ranks[number]
        match fault.kind:
            case FaultKind.SLOW_RANK:
                self._for_a_while(
                    fault.seconds, lambda on: setattr(rank, "slowness", SLOWNESS if on else 1.0)
                )
            case FaultKind.SILENT_RANK:
                self._for_a_while(fault.seconds, lambda on: setattr(rank, "silent", on))
            case FaultKind.PAUSED_RANK if fault.seconds >= FOR_GOOD_S:
                grid.stop(number)
                history.heap.after(
                    FOR_GOOD_S, lambda: None
                )  # no history ends before its silence has been noticed
            case FaultKind.PAUSED_RANK:
                self._for_a_while(
                    fault.seconds, lambda on: grid.stop(number) if on else grid.resume(number)
                )
            case FaultKind.FAILED_ALLOCATION:
                grid.refusals[number] += 1
            case FaultKind.FAILED_BACKUP:
                grid.failing_copies[number] += 1
            case FaultKind.LOST_START:
                history.failing_starts += fault.rank % MOST_LOST_STARTS
                self._kill_rank(fault)
            case FaultKind.LOST_RANK:
                self._kill_rank(fault)
            case FaultKind.FAULTED_RANK:
                rank.dead = True
                history.lose(grid, "a rank failed at its work", faulted=True)
            case FaultKind.POISONOUS_REQUEST:
                victims = list(history.planner.replica.requests)
                if victims:
                    history.poison[victims[fault.rank % len(victims)]] = _poison(fault)
            case FaultKind.POISONOUS_PAGES:
                stored = sorted({hash for hash, _ in history.store.ever})
                history.poisonous_pages |= dict.fromkeys(
                    stored[fault.rank % 2 :: 2 if fault.share < 1 else 1], _poison(fault)
                )
            case _:
                raise AssertionError(f"nothing strikes as {fault.kind}")

    def _kill_rank(self, fault: Fault) -> None:
        grid = self._history.grid
        assert grid is not None
        grid.kill_rank(fault.rank % len(grid.ranks))
        self._history.lose(grid, "a rank was lost")

    def _pause_planner(self, seconds: float) -> None:
        """SIGSTOP: what arrives waits, and is taken in one step when the process goes on."""
        history = self._history
        history.stands_until = max(history.stands_until, history.heap.now + seconds)

        def resume() -> None:
            if seconds > STANDSTILL_S and history.heap.now >= history.stands_until:
                history.planner.resume(history.heap.now)

        history.heap.after(seconds, resume)

    def _burst(self) -> None:
        """More long outputs at once than device memory can hold: they push each other out."""
        for _ in range(BURST_REQUESTS):
            self._bursts += 1
            self._history.submit(f"burst{self._bursts}", self._history.options.max_context)

    def _for_a_while(self, seconds: float, switch: Callable[[bool], None]) -> None:
        switch(True)
        self._history.heap.after(seconds, lambda: switch(False))


def _poison(fault: Fault) -> Poison:
    """Half of each, whichever the fault's other numbers are."""
    return Poison(late=bool(fault.rank & 2), faulted=bool(fault.rank & 4))
