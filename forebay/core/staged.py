"""The usual path as a measured baseline: a stored prefix is fetched stage by stage, each looking only between its forwards.

    planner --StagedTicket--> stage 0 --StagedTaken--> planner --StagedTicket--> stage 1 ... the last stage
                                 each asks for its own part and starts to read once its compute loop gets to it
    planner <--FetchProgress (final)-- stage 0 <--StagedReturn-- planner <--FetchProgress (final)-- stage 1 ... the last stage
                                 each answers once what it reads is done, what is behind it has answered, and its compute loop looks

Nothing sleeps and nothing is slowed on purpose: what a stage has not looked at yet waits for its running forward and for nothing else.
A miss makes the same round. The planner only carries the word from stage to stage.
"""

from dataclasses import dataclass, field

from forebay.core.messages import PageKey, StagedReturn, StagedTicket

StagedOrder = StagedTicket | StagedReturn


@dataclass(slots=True)
class Walk:
    """How far one staged fetch is on its way down and back. Stages 0 to ``stage`` have been told."""

    epoch: int
    transfer: int
    pages: tuple[PageKey, ...]
    pp: int
    tp: int
    stage: int = -1
    _waits_for: set[int] = field(default_factory=set)

    @property
    def told(self) -> range:
        """Ranks that have been told."""
        return range((self.stage + 1) * self.tp)

    def advance(self) -> StagedTicket:
        """Tell the next stage."""
        self.stage += 1
        self._waits_for = set(range(self.stage * self.tp, (self.stage + 1) * self.tp))
        return StagedTicket(self.epoch, self.transfer, self.stage, self.pages)

    def expects(self, rank: int) -> bool:
        """Whether ``rank`` has been told and has not yet taken it."""
        return rank in self._waits_for

    def taken(self, rank: int) -> StagedTicket | None:
        """``rank`` has begun; once its whole stage has, the next stage is told."""
        self._waits_for.remove(rank)
        return self.advance() if not self._waits_for and self.stage + 1 < self.pp else None

    def answered(self, rank: int, running: set[int]) -> StagedReturn | None:
        """``rank`` has said its final word; once its whole stage has, the stage before may."""
        stage = rank // self.tp
        mine = range(stage * self.tp, (stage + 1) * self.tp)
        return (
            StagedReturn(self.epoch, self.transfer, stage - 1)
            if stage and not running.intersection(mine)
            else None
        )
