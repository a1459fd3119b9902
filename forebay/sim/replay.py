"""Requests on a described cluster, in virtual time: the planner that ships, over performance models of everything else.

    arrivals ──> Replay ──Submit──> planner.step ──plans, orders──> StageGrid ──acknowledgements──> planner ...
                    ^                    │ queries                      │ reads, writes
                    '──── outputs ───────┴───────> StoreModel <─────────'

One event heap serves all replicas and the store that they share. One seed is one history.
"""

import gc
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forebay.core.messages import Output, Submit
from forebay.core.planner import Effects, Event, GridReady, Planner
from forebay.core.sampling import SamplingParams
from forebay.core.transfers.lookup import Query, QueryDone
from forebay.settings import FetchRoute
from forebay.sim.cluster import Cluster
from forebay.sim.heap import EventHeap
from forebay.sim.measures import Measures
from forebay.sim.stages import Acknowledgement, Pass, StageGrid
from forebay.sim.store_model import StoreModel

TICK_S = 0.5  # as the real event loop turns at least
NEVER_TOKENS = 1 << 62
PROGRESS_TURNS = 5000
OWN_TOKEN = 1 << 31  # tokens that requests emit: beyond all ids of traces


@dataclass(frozen=True, slots=True)
class Job:
    """One request to come. ``at_s``: arrival, if arrivals are by the clock. ``prompt`` makes its packed tokens when it arrives."""

    at_s: float
    input_tokens: int
    output_tokens: int
    prompt: Callable[[], bytes]
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How jobs are run. ``concurrency``: that many at a time, the next when one ends; None: each at its time. ``exact``: the planner
    hears every rank on its own, instead of what is the same for it in fewer messages (`StageGrid`). ``window``: of virtual
    time, whose passes are kept; ``journal``: keep all plans and acknowledgements; ``stored``: pages that the store has from the start.
    """

    route: FetchRoute = FetchRoute.TICKET
    replicas: int = 1
    concurrency: int | None = None
    seed: int = 0
    exact: bool = False
    window: tuple[float, float] | None = None
    journal: bool = False
    stored: Sequence[bytes] = ()

    def of(self, route: FetchRoute) -> "Options":
        return replace(self, route=route)


class _Replica:
    """One planner and its grid. ``load``: prompt tokens of its open requests."""

    def __init__(self, index: int, replay: "Replay") -> None:
        cluster, options = replay.cluster, replay.options
        self.index = index
        self._replay = replay
        self._heap = replay.heap
        config = replace(cluster.planner_config(), staged=options.route is FetchRoute.STAGED)
        if options.route is FetchRoute.OFF:
            config = replace(config, fetch_threshold=NEVER_TOKENS)
        if not options.exact:
            config = replace(config, tp=1)
        self.planner = Planner(config)
        self.grid = StageGrid(
            cluster,
            not options.exact,
            replay.heap,
            replay.randomness,
            replay.store,
            self.hear,
            self,
        )
        self.grid.token_of = lambda request_id: OWN_TOKEN + int(request_id)
        self.load = 0
        self._inbox: list[Event] = []
        self._timer_at = -1.0
        forward = cluster.forward
        ready = GridReady(
            self.planner.epoch, cluster.device_pages, forward.linear_s, cluster.host_pages
        )
        self.planner.step(0.0, [ready])

    # ------------------------------------------------------------------------------------------ in

    def take(self, event: Event) -> None:
        self._inbox.append(event)
        self._replay.touched.add(self.index)

    def hear(self, messages: Sequence[Acknowledgement]) -> None:
        self._replay.measures.said(self._heap.now, messages)
        self._inbox += messages
        self._replay.touched.add(self.index)

    # ------------------------------------------------------------------------------------------ the planner's loop

    def step(self) -> None:
        now = self._heap.now
        while True:
            events, self._inbox = self._inbox, []
            effects = self.planner.step(now, events)
            self._carry_out(effects)
            if effects.plan is None and not self._inbox:
                break
        self._set_timer(now)

    def _carry_out(self, effects: Effects) -> None:
        assert effects.restart is None, f"the simulated grid was lost: {effects.restart}"
        if effects.plan is not None:
            self._replay.measures.built(self._heap.now, effects.plan)
            self.grid.send(effects.plan, self.planner.epoch)
        for order in effects.orders:
            self.grid.order(order)
        for query in effects.queries:
            self._heap.after(
                self._replay.cluster.store.query_s,
                lambda query=query: self._answer(query),  # type: ignore[misc]
            )
        self._replay.outputs(self, effects.outputs)

    def _answer(self, query: Query) -> None:
        self.take(QueryDone(query.number, self._replay.store.match(query.hashes)))

    def _set_timer(self, now: float) -> None:
        """The real loop turns at its planner's deadline, and at least every tick; here only while that can change anything."""
        due = self.planner.next_deadline()
        if self.planner.replica.tickets.will_retry:
            due = now + TICK_S if due is None else min(due, now + TICK_S)
        if due is None or due == math.inf:
            return
        if due <= now:
            due = now + TICK_S
        if now < self._timer_at <= due:
            return
        self._timer_at = due
        self._heap.at(self._timer_at, lambda: self._replay.touched.add(self.index))

    def passed(self, stage: int, one: Pass) -> None:
        self._replay.measures.passed(self.index, stage, one)


class Replay:
    """One run of ``jobs`` on a cluster."""

    def __init__(self, cluster: Cluster, jobs: Sequence[Job], options: Options) -> None:
        self.cluster, self.options = cluster, options
        self.randomness = random.Random(options.seed)
        self.heap = EventHeap()
        self.store = StoreModel(cluster, self.heap, self.randomness)
        self.store.fill(options.stored)
        self.measures = Measures(options.window, options.journal)
        self.touched: set[int] = set()
        self.replicas = [_Replica(index, self) for index in range(options.replicas)]
        self._jobs = jobs
        self._next = 0
        self._open: dict[str, _Replica] = {}

    def run(self, progress: Callable[[int], None] = lambda ended: None) -> Measures:
        """Until every request has ended. ``progress`` is called with the number of those that have, now and then."""
        collects = gc.isenabled()
        gc.disable()  # millions of nodes and messages, and no cycles: collections would only look at them again and again
        try:
            self._run(progress)
        finally:
            if collects:
                gc.enable()
        assert not self._open, f"{len(self._open)} requests never ended"
        return self.measures

    def _run(self, progress: Callable[[int], None]) -> None:
        heap, replicas, touched = self.heap, self.replicas, self.touched
        self._schedule_arrivals()
        turns = 0
        while len(heap) or touched:
            if not touched:
                heap.run_next()
            while touched:
                index = min(touched)
                touched.discard(index)
                replicas[index].step()
            turns += 1
            if turns % PROGRESS_TURNS == 0:
                progress(self.measures.ended)
        progress(self.measures.ended)

    def _schedule_arrivals(self) -> None:
        concurrency = self.options.concurrency
        if concurrency is None:
            self._next_arrival()
        else:
            for _ in range(min(concurrency, len(self._jobs))):
                self._submit_next()

    def _next_arrival(self) -> None:
        """Arrivals are put on the heap one by one, so that it stays small."""
        if self._next < len(self._jobs):
            self.heap.at(self._jobs[self._next].at_s, self._arrive_and_go_on)

    def _arrive_and_go_on(self) -> None:
        self._submit_next()
        self._next_arrival()

    def _submit_next(self) -> None:
        if self._next == len(self._jobs):
            return
        index, job = self._next, self._jobs[self._next]
        self._next += 1
        replica = min(self.replicas, key=lambda each: each.load)
        replica.load += job.input_tokens
        params = SamplingParams(
            max_tokens=job.output_tokens, seed=0, ignore_eos=True, temperature=0.0
        )
        request_id = str(index)
        self._open[request_id] = replica
        self.measures.arrived(index, job.input_tokens, job.kind, self.heap.now)
        submit = Submit(request_id, job.prompt(), params)
        replica.grid.cores.run(self.cluster.network.frontend_s, lambda: replica.take(submit))

    def outputs(self, replica: _Replica, outputs: Sequence[Output]) -> None:
        now, note = self.heap.now, self.measures.output
        for output in outputs:
            index = int(output.request_id)
            note(index, output, now)
            if output.finish is not None:
                del self._open[output.request_id]
                replica.load -= self._jobs[index].input_tokens
                if self.options.concurrency is not None:
                    self.heap.after(0.0, self._submit_next)
