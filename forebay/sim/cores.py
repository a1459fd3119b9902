"""Cores that several workers share, in virtual time: everyone who computes gets an equal part (processor sharing).

With k at work on n cores each goes on at min(1, n / k) of its own pace, and slower by ``contention`` for each further busy core, since
they share caches and memory.
"""

from collections.abc import Callable

from forebay.sim.heap import EventHeap


class Cores:
    """``count`` 0: everyone has a core of their own, and nobody is in another's way."""

    def __init__(self, heap: EventHeap, count: int, contention: float) -> None:
        self._heap, self._count, self._contention = heap, count, contention
        self._left: dict[int, float] = {}  # job -> seconds of work left, at the pace of one alone
        self._done: dict[int, Callable[[], None]] = {}
        self._number = 0
        self._seen_at = 0.0
        self._turn = 0

    @property
    def pace(self) -> float:
        """Seconds of work that each job gets done in a second."""
        busy = len(self._left)
        if not busy:
            return 1.0
        return min(1.0, self._count / busy) / (
            1.0 + self._contention * (min(busy, self._count) - 1)
        )

    def run(self, work_s: float, done: Callable[[], None]) -> None:
        """``done`` is called once ``work_s`` seconds of work are done."""
        if not self._count:
            self._heap.after(work_s, done)
            return
        self._catch_up()
        self._number += 1
        self._left[self._number] = work_s
        self._done[self._number] = done
        self._look_forward()

    def _catch_up(self) -> None:
        now = self._heap.now
        worked = (now - self._seen_at) * self.pace
        self._seen_at = now
        for job in self._left:
            self._left[job] -= worked

    def _look_forward(self) -> None:
        """The next end, as things are; whatever begins or ends before it makes another one."""
        self._turn += 1
        if not self._left:
            return
        turn, job = self._turn, min(self._left, key=lambda each: self._left[each])
        self._heap.after(
            max(self._left[job], 0.0) / self.pace,
            lambda: self._end(job) if turn == self._turn else None,
        )

    def _end(self, job: int) -> None:
        self._catch_up()
        del self._left[job]
        done = self._done.pop(job)
        self._look_forward()
        done()
