"""Passes of stages that share a machine's cores: how long one takes depends on what else computes meanwhile, so its end is known when
it comes. (`StageGrid` plans passes ahead where each stage has cores of its own.)

    plan arrives ──> in line behind the stage's earlier plans ──> hidden states and first layer are there ──> Cores.run ──> end
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.core.messages import Plan
from forebay.sim.cluster import StagedLook
from forebay.sim.cores import Cores
from forebay.sim.heap import EventHeap

Action = Callable[[], None]


@dataclass(slots=True, eq=False)
class Flight:
    """A plan on its way. By stage: what its pass costs alone; when its hidden states, its first layer and its last are there;
    and when the pass was taken, began and ended."""

    plan: Plan
    epoch: int
    costs_s: Sequence[float]
    prefill_tokens: int
    decodes: int
    hop_s: float
    handed_at: list[float] = field(init=False)
    first_layer_at: list[float] = field(init=False)
    last_layer_at: list[float] = field(init=False)
    taken_at: list[float] = field(init=False)
    began_at: list[float] = field(init=False)
    ended_at: list[float] = field(init=False)

    def __post_init__(self) -> None:
        stages = len(self.costs_s)
        self.handed_at = [0.0] + [math.inf] * (stages - 1)
        self.first_layer_at, self.last_layer_at = [0.0] * stages, [0.0] * stages
        self.taken_at, self.began_at, self.ended_at = [0.0] * stages, [0.0] * stages, [0.0] * stages


@dataclass(slots=True)
class _Lane:
    queue: deque[Flight] = field(default_factory=deque)
    running: bool = False
    free_at: float = 0.0
    looks: list[Action] = field(default_factory=list)


class SharedPasses:
    """``load`` starts a plan's copies at one stage and says when the first layer and the last are there; ``ended`` hears of every end,
    in the order of stages for each plan. ``layers``: of one stage."""

    def __init__(
        self,
        heap: EventHeap,
        cores: Cores,
        look: StagedLook,
        stages: int,
        layers: int,
        load: Callable[[int, Flight, float], tuple[float, float]],
        ended: Callable[[int, Flight], None],
    ) -> None:
        self._heap, self._cores, self._staged_look = heap, cores, look
        self._layers, self._load, self._ended = layers, load, ended
        self._lanes = [_Lane() for _ in range(stages)]

    def send(self, flight: Flight, arrivals: Sequence[float]) -> None:
        for stage, at in enumerate(arrivals):
            self._heap.at(at, lambda stage=stage: self._arrive(stage, flight))  # type: ignore[misc]

    def look(self, stage: int, action: Action) -> None:
        """``action`` when the stage's loop looks next (`StagedLook`)."""
        lane = self._lanes[stage]
        if lane.running or (self._staged_look is StagedLook.PLAN and lane.queue):
            lane.looks.append(action)
        else:
            self._heap.after(0.0, action)

    def _arrive(self, stage: int, flight: Flight) -> None:
        if flight.plan.loads:
            flight.first_layer_at[stage], flight.last_layer_at[stage] = self._load(
                stage, flight, self._heap.now
            )
        lane = self._lanes[stage]
        lane.queue.append(flight)
        flight.taken_at[stage] = self._heap.now
        self._begin(stage)

    def _begin(self, stage: int) -> None:
        """The next plan in line, if all that it needs is there; else once it is."""
        lane, now = self._lanes[stage], self._heap.now
        if lane.running or not lane.queue:
            return
        flight = lane.queue[0]
        ready_at = max(flight.handed_at[stage], flight.first_layer_at[stage])
        if ready_at > now:
            if ready_at < math.inf:
                self._heap.at(ready_at, lambda: self._begin(stage))
            return
        lane.running = True
        flight.taken_at[stage] = max(flight.taken_at[stage], lane.free_at)
        flight.began_at[stage] = now
        self._cores.run(flight.costs_s[stage], lambda: self._computed(stage, flight))

    def _computed(self, stage: int, flight: Flight) -> None:
        """It ends no sooner than its last layer's copies let it."""
        end_at = self._heap.now
        if flight.plan.loads:
            end_at = max(end_at, flight.last_layer_at[stage] + flight.costs_s[stage] / self._layers)
        self._heap.at(end_at, lambda: self._end(stage, flight))

    def _end(self, stage: int, flight: Flight) -> None:
        lane, now = self._lanes[stage], self._heap.now
        lane.queue.popleft()
        lane.running, lane.free_at = False, now
        flight.ended_at[stage] = now
        looks, lane.looks = lane.looks, []
        for action in looks:
            action()
        if stage + 1 < len(self._lanes):
            flight.handed_at[stage + 1] = now + flight.hop_s
            self._heap.at(now + flight.hop_s, lambda: self._begin(stage + 1))
        self._ended(stage, flight)
        self._begin(stage)
