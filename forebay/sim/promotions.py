"""SSD -> DRAM at a simulated holder: the throttle that ships, and the words that a holder and its master exchange.

    prefetch: throttle --> RegisterPrefetch --> Prefetchable ──┐
    hit:                                        Promote ───────┴─> AllocStart --> Allocated --> fill --> PromotionDone

As `store.holder.promoter`, whose steps are asyncio tasks; here they are callbacks in virtual time.
"""

from collections.abc import Callable, Sequence

from forebay.sim.heap import EventHeap
from forebay.store.holder.promoter import ALLOC_TASKS
from forebay.store.throttle import PrefetchThrottle, State
from forebay.store.wire.messages import (
    Allocated,
    AllocStart,
    Allotment,
    HolderToMaster,
    Prefetchable,
    PrefetchCode,
    PromotionDone,
    RegisterPrefetch,
)

Done = Callable[[bool], None]
Fill = Callable[[bytes, Allotment, Done], None]


class Promotions:
    """One holder's. ``send`` reaches its master; ``fill`` copies a record of a key into the room it got, and says how that went."""

    def __init__(self, heap: EventHeap, send: Callable[[HolderToMaster], None], fill: Fill) -> None:
        self._heap, self._send, self._fill = heap, send, fill
        self.throttle = PrefetchThrottle()
        self.forget_calls()

    def forget_calls(self) -> None:
        """The master is another one: what was asked of the last one is never answered."""
        self._calls: dict[int, Sequence[bytes]] = {}
        self._allotting: dict[int, Sequence[tuple[int, bytes]]] = {}
        self._call = 0

    def prefetch(self, tenant: str, keys: Sequence[bytes], hint_s: float) -> list[bytes]:
        """The local branch of prefetch on exist, for keys of which there is a record here. Those that were not promoted lately."""
        admitted = self.throttle.admit(keys, self._heap.now)
        if admitted:
            self._call += 1
            self._calls[self._call] = admitted
            self._send(RegisterPrefetch(self._call, tenant, admitted, hint_s))
        return admitted

    def registered(self, answer: Prefetchable) -> None:
        granted = []
        for code, task, key in zip(
            answer.codes, answer.tasks, self._calls.pop(answer.call, []), strict=False
        ):
            state = (
                State.ALREADY_RESIDENT
                if code == PrefetchCode.PROMOTION_ALREADY_EXISTS
                else State.FAILED
            )
            if code == PrefetchCode.OK:
                granted.append((task, key))
                state = State.IN_FLIGHT
            self._note(key, state)
        self.run(granted)

    def run(self, tasks: Sequence[tuple[int, bytes]]) -> None:
        """Tasks that the master has made: (number, key)."""
        for start in range(0, len(tasks), ALLOC_TASKS):
            self._call += 1
            some = self._allotting[self._call] = tasks[start : start + ALLOC_TASKS]
            self._send(AllocStart(self._call, [task for task, _ in some]))

    def allotted(self, answer: Allocated) -> None:
        for (task, key), spot in zip(
            self._allotting.pop(answer.call, []), answer.allotments, strict=False
        ):
            if spot.code is PrefetchCode.OK:
                self._fill(key, spot, lambda ok, task=task, key=key: self._end(task, key, ok))  # type: ignore[misc]
                continue
            if spot.code is PrefetchCode.NO_AVAILABLE_HANDLE:
                self.throttle.open_cooldown(self._heap.now)
            self._note(key, State.FAILED)

    def _end(self, task: int, key: bytes, ok: bool) -> None:
        self._send(PromotionDone(task, ok))
        self._note(key, State.COMPLETED if ok else State.FAILED)

    def _note(self, key: bytes, state: State) -> None:
        self.throttle.move([key], state, self._heap.now)
