"""Virtual time: a heap of things to happen, with channels that keep their own order.

A *weak* action (a clock's tick, a heartbeat) happens like any other but keeps no history alive: a history is over when only weak ones
are left.
"""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class EventHeap:
    """Actions by time; equal times in the order in which they were scheduled. Its length counts those that are not weak."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action, bool]] = []
        self._serial = 0
        self._strong = 0

    def __len__(self) -> int:
        return self._strong

    def at(self, time: float, action: Action, weak: bool = False) -> None:
        assert time >= self.now, "nothing happens in the past"
        self._serial += 1
        self._strong += not weak
        heapq.heappush(self._heap, (time, self._serial, action, weak))

    def after(self, delay: float, action: Action, weak: bool = False) -> None:
        self.at(self.now + delay, action, weak)

    def run_next(self) -> None:
        """Advance to the next action's time and run it, with all others of that very time."""
        self.now = self._heap[0][0]
        while self._heap and self._heap[0][0] == self.now:
            _, _, action, weak = heapq.heappop(self._heap)
            self._strong -= not weak
            action()


class Channel:
    """Delivers in order, each message after its own delay but never before an earlier one: a socket, in virtual time.

    ``count``: messages sent.
    """

    def __init__(self, heap: EventHeap) -> None:
        self._heap = heap
        self._last = 0.0
        self.count = 0

    def send(self, delay: float, action: Action) -> None:
        self._last = max(self._heap.now + delay, self._last)
        self._heap.at(self._last, action)
        self.count += 1
