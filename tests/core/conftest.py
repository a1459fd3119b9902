"""A planner with one rank per stage that the tests acknowledge by hand, so that each rule can be told as a story."""

from dataclasses import dataclass, field

import pytest

from forebay.core import invariants
from forebay.core.messages import (
    Abort,
    FinishReason,
    Output,
    Plan,
    PlanDone,
    Sample,
    Submit,
    pack_tokens,
    unpack_tokens,
)
from forebay.core.planner import Effects, Event, GridReady, Planner
from forebay.core.replica import PlannerConfig
from forebay.core.sampling import SamplingParams

PAGE = 4


@dataclass
class Desk:
    """Drives one planner. Time stands still unless a test moves ``now``."""

    planner: Planner
    now: float = 0.0
    outputs: list[Output] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def step(self, *events: Event) -> list[Plan]:
        """One turn of the event loop; the plans that it built."""
        built: list[Plan] = []
        effects: Effects = self.planner.step(self.now, events)
        while True:
            invariants.check(self.planner.replica)
            self.outputs += effects.outputs
            if effects.plan is None:
                self.plans += built
                return built
            built.append(effects.plan)
            effects = self.planner.step(self.now)

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        salt: bytes = b"",
        **params: object,
    ) -> list[Plan]:
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, **params)  # type: ignore[arg-type]
        return self.step(Submit(request_id, pack_tokens(prompt), sampling, (0,), salt))

    def abort(self, request_id: str) -> list[Plan]:
        return self.step(Abort(request_id))

    def done(self, plan: Plan, rank: int, token: int = 9) -> list[Plan]:
        """``rank`` acknowledges; the sampling rank answers ``token`` everywhere."""
        samples = ()
        if rank == self.planner.config.sampling_rank:
            samples = tuple(Sample(piece.slot, token) for piece in plan.pieces if piece.sample)
        return self.step(PlanDone(plan.epoch, rank, plan.number, samples))

    def run(self, plan: Plan, token: int = 9) -> list[Plan]:
        """All ranks acknowledge."""
        built = []
        for rank in range(self.planner.config.ranks):
            built += self.done(plan, rank, token)
        return built

    def run_all(self, plans: list[Plan], token: int = 9) -> None:
        """Until nothing more is built."""
        waiting = list(plans)
        while waiting:
            waiting += self.run(waiting.pop(0), token)

    def finish(self, request_id: str) -> FinishReason | None:
        return next(
            (
                output.finish
                for output in self.outputs
                if output.request_id == request_id and output.finish
            ),
            None,
        )

    def tokens(self, request_id: str) -> list[int]:
        return [
            token
            for output in self.outputs
            if output.request_id == request_id
            for token in output.tokens
        ]

    @property
    def free(self) -> int:
        assert self.planner.replica.cache is not None
        return self.planner.replica.cache.device.free


def make_desk(pages: int = 32, host_pages: int = 0, **config: object) -> Desk:
    defaults: dict[str, object] = {
        "pp": 1, "page_size": PAGE, "chunk_size": 8, "max_context": 64, "max_running": 8, "max_waiting": 8,
    }  # fmt: skip
    desk = Desk(Planner(PlannerConfig(**(defaults | config))))  # type: ignore[arg-type]
    desk.step(GridReady(1, pages, 0.001, host_pages))
    return desk


@pytest.fixture
def desk() -> Desk:
    return make_desk()


def spans(plan: Plan) -> list[tuple[int, int]]:
    """(start, stop) of each piece."""
    return [(piece.start, piece.start + len(unpack_tokens(piece.tokens))) for piece in plan.pieces]
