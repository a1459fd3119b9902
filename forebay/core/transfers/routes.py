"""How one fetch reaches the ranks: by ticket, or stage by stage, the usual way, kept as a baseline.

By ticket every rank is told at once. What there is to fetch is known before, since the store has
been asked, so pages may be used as soon as every rank has them.

On the staged route each stage asks for its own part, and looks only between its forwards:

    planner --StagedTicket--> stage 0 --StagedTaken--> planner --StagedTicket--> stage 1 ...
                  each asks, and starts to read, once its compute loop gets to it
    planner <--FetchProgress (final)-- stage 0 <--StagedReturn-- planner <--FetchProgress-- stage 1
                  each answers once its reads are done, the stage behind has answered, and it looks

Nothing sleeps and nothing is slowed on purpose: what a stage has not looked at yet waits for its
running forward and for nothing else. A miss makes the same round. The planner only carries the word
from stage to stage. Host pages are taken for all that is missing, and what the store had, and what
a fetch that is cut short has brought, is known only with the final words.

Another source of pages, a peer replica, is another route.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar, Protocol

from forebay.core.messages import Cancel, PageKey, StagedReturn, StagedTicket, Ticket
from forebay.core.transfers.policy import TICKETS_AT_ONCE

FetchOrder = Ticket | Cancel | StagedTicket | StagedReturn


@dataclass(frozen=True, slots=True)
class FetchTarget:
    """What is fetched: numbered ``pages`` for the ranks of a ``pp`` x ``tp`` grid."""

    epoch: int
    transfer: int
    pages: tuple[PageKey, ...]
    pp: int
    tp: int

    @property
    def ranks(self) -> int:
        return self.pp * self.tp


class Route(Protocol):
    """The orders of one fetch. ``asks_ahead``: what there is to fetch is known before it begins."""

    asks_ahead: ClassVar[bool]

    def __init__(self, target: FetchTarget) -> None: ...

    @staticmethod
    def starts_late(under_way: int, grid_is_busy: bool) -> bool:
        """Whether a rank will not read it at once, with as many fetches ``under_way`` before it."""

    @property
    def told(self) -> Set[int]:
        """Ranks that have been told."""

    def begin(self) -> FetchOrder: ...

    def expects(self, rank: int) -> bool:
        """Whether ``rank`` has been told and has yet to say that it begins."""

    def taken(self, rank: int) -> FetchOrder | None:
        """``rank`` begins."""

    def answered(self, rank: int, left: Set[int]) -> FetchOrder | None:
        """``rank`` has said its final word; the ranks in ``left`` have not."""


class TicketRoute:
    """All ranks at once."""

    asks_ahead: ClassVar[bool] = True

    def __init__(self, target: FetchTarget) -> None:
        self._target = target

    @staticmethod
    def starts_late(under_way: int, grid_is_busy: bool) -> bool:
        return under_way >= TICKETS_AT_ONCE

    @property
    def told(self) -> Set[int]:
        return set(range(self._target.ranks))

    def begin(self) -> FetchOrder:
        return Ticket(self._target.epoch, self._target.transfer, self._target.pages)

    def expects(self, rank: int) -> bool:
        return False

    def taken(self, rank: int) -> FetchOrder | None:
        return None

    def answered(self, rank: int, left: Set[int]) -> FetchOrder | None:
        return None


class StagedRoute:
    """Stage by stage. Stages 0 to ``_stage`` have been told."""

    asks_ahead: ClassVar[bool] = False

    def __init__(self, target: FetchTarget) -> None:
        self._target = target
        self._stage = -1
        self._waits_for: set[int] = set()

    @staticmethod
    def starts_late(under_way: int, grid_is_busy: bool) -> bool:
        return under_way >= TICKETS_AT_ONCE or grid_is_busy

    @property
    def told(self) -> Set[int]:
        return set(range((self._stage + 1) * self._target.tp))

    def begin(self) -> FetchOrder:
        return self._advance()

    def expects(self, rank: int) -> bool:
        return rank in self._waits_for

    def taken(self, rank: int) -> FetchOrder | None:
        """Once its whole stage has begun, the next stage is told."""
        self._waits_for.remove(rank)
        more = self._stage + 1 < self._target.pp
        return self._advance() if more and not self._waits_for else None

    def answered(self, rank: int, left: Set[int]) -> FetchOrder | None:
        """Once its whole stage has answered, the stage before may."""
        target = self._target
        stage = rank // target.tp
        if not stage or not left.isdisjoint(self._ranks(stage)):
            return None
        return StagedReturn(target.epoch, target.transfer, self._ranks(stage - 1))

    def _advance(self) -> StagedTicket:
        target = self._target
        self._stage += 1
        ranks = self._ranks(self._stage)
        self._waits_for = set(ranks)
        return StagedTicket(target.epoch, target.transfer, target.pages, ranks)

    def _ranks(self, stage: int) -> tuple[int, ...]:
        return tuple(range(stage * self._target.tp, (stage + 1) * self._target.tp))
