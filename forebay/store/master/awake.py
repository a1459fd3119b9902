"""Answering at once whoever asks one thing after another.

A core that has gone to sleep takes tens of microseconds to wake up, and a server that is woken on the asker's core keeps it from its
other work. So between the questions of a near peer that asks again soon after each answer, the event loop looks for what has come
instead of waiting for it. The core is anybody else's who wants it, and nobody's from `AWAKE_S` after the last answer on.
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

AWAKE_S = 200e-6
_libc = ctypes.CDLL(None)


class Awake:
    """Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answered_at = -AWAKE_S
        self.now = False
        """Whether the loop does not wait."""

    def answered(self, asked_at: float, core: Callable[[], int]) -> None:
        """A question of ``asked_at`` has been answered, of a peer that runs on ``core()``."""
        soon = asked_at - self._answered_at < AWAKE_S
        self._answered_at = self._clock()
        if soon and not self.now:
            leave(core())
            self._look()

    def _look(self) -> None:
        self.now = self._clock() - self._answered_at < AWAKE_S
        if self.now:
            os.sched_yield()
            asyncio.get_running_loop().call_soon(self._look)


def leave(core: int) -> None:
    """Go to another core if this thread is on ``core``, and may."""
    if _libc.sched_getcpu() != core:
        return
    allowed = os.sched_getaffinity(0)
    if others := allowed - {core}:
        os.sched_setaffinity(0, others)
        os.sched_setaffinity(0, allowed)
