"""Flushing the store tier: after the planner's own part, which drains and empties device and host.

Flush(.. store ..) -> planner's FlushDone -> nothing on its way to the store -> StoreDesk.clear -> FlushDone to the frontend
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from forebay.core.messages import CancelFlush, Flush, FlushDone
from forebay.runtime.store_access import StoreCleared


@dataclass(slots=True)
class _Pending:
    deadline: float
    done: FlushDone | None = None  # the planner's part, once it is over
    clearing: bool = False


class StoreFlushes:
    """Flushes that name the store, from their arrival to their answer."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}

    def arrived(self, message: object, now: float) -> None:
        if isinstance(message, Flush) and "store" in message.tiers:
            self._pending[message.call] = _Pending(now + message.timeout_s)
        elif isinstance(message, CancelFlush):
            self._pending.pop(message.call, None)

    def settled(self, flushed: Iterable[FlushDone]) -> list[FlushDone]:
        """What the planner has flushed; those that are done with that, to be answered now."""
        ready = []
        for done in flushed:
            pending = self._pending.get(done.call)
            if pending is None or done.busy:
                self._pending.pop(done.call, None)
                ready.append(done)
            else:
                pending.done = done
        return ready

    def due(self, now: float, writing: bool) -> tuple[list[tuple[int, float]], list[FlushDone]]:
        """(call, seconds left) of those whose store may be cleared now, and those whose time is over. ``writing``: pages are on
        their way to the store."""
        start: list[tuple[int, float]] = []
        late: list[FlushDone] = []
        for call, pending in tuple(self._pending.items()):
            if pending.done is None or pending.clearing:
                continue
            if not writing:
                pending.clearing = True
                start.append((call, max(pending.deadline - now, 0.1)))
            elif now >= pending.deadline:
                del self._pending[call]
                late.append(
                    msgspec.structs.replace(pending.done, busy=("pages on their way to the store",))
                )
        return start, late

    def cleared(self, result: StoreCleared) -> FlushDone | None:
        """The answer; None if nobody waits for it any more."""
        pending = self._pending.pop(result.call, None)
        if pending is None or pending.done is None:
            return None
        busy = () if result.in_time else ("the store, which was not emptied in time",)
        return FlushDone(result.call, pending.done.freed_pages + result.pages, busy)
