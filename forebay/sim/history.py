"""One history: a seed draws a small replica, its traffic and its faults; the real planner runs it to the end.

The faults heal: after the last one every request must end (progress). Checked after every planner step: `core.invariants`; at every
read: page contents; at every plan: the fence and the digests; at the end: tokens exactly once, pages back to baseline.
"""

import random
from dataclasses import dataclass, field

import msgspec

from forebay.core import invariants
from forebay.core.messages import Abort, Flush, GridState, PlanDone, StagedTicket, Store, Submit, Ticket, pack_tokens
from forebay.core.planner import Effects, Event, GridLost, GridReady, Planner
from forebay.core.replica import PlannerConfig
from forebay.core.sampling import SamplingParams
from forebay.core.tickets import FetchPolicy, Query, QueryDone
from forebay.core.transfers import WritePolicy
from forebay.core.tree import TIERS
from forebay.sim.checkers import ClientChecker, FenceChecker
from forebay.sim.grid import Acknowledgement, FakeGrid, FakeStore, Timing, Truth
from forebay.sim.heap import EventHeap
from forebay.sim.model import EOS, VOCABULARY, expected_tokens, stamps

TICK_S = 0.5
# The second wave of traffic meets what the first has stored, after device and host have forgotten it.
WAVE_GAP_S = 20.0
FORGETTING = 10_000
MAX_STEPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one history is made of; `draw` takes all of it from the seed."""

    pp: int
    tp: int
    page_size: int
    pages: int
    host_pages: int
    write_policy: WritePolicy
    load_back_threshold: int
    has_store: bool
    fetch_policy: FetchPolicy
    fetch_threshold: int
    staged: bool
    staging: bool
    store_losses: int
    query_s: float
    chunk_size: int
    max_running: int
    max_waiting: int
    max_context: int
    prefix_first: bool
    requests: int
    arrival_s: float
    timing: Timing
    abort_share: float
    losses: int
    pauses: int
    flushes: int
    second_wave: bool


@dataclass(slots=True)
class Report:
    """What happened, for coverage: a campaign in which some of these stay zero has tested nothing of that kind."""

    steps: int = 0
    plans: int = 0
    messages: int = 0
    retractions: int = 0
    restarts: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    fetched_tokens: int = 0
    tickets: int = 0
    staged: int = 0
    stores: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    loads: int = 0
    backups: int = 0
    finishes: dict[str, int] = field(default_factory=dict)
    remaps: int = 0
    flushes: int = 0


def draw(randomness: random.Random) -> Options:
    """Swarm testing (Groce et al., ISSTA 2012): each history has its own mix, and "none" is always possible."""
    choice = randomness.choice
    page_size = choice([1, 2, 4, 8])
    slow_forward = choice([0.001, 0.01, 0.1])
    slow_message = choice([0.0001, 0.005, 0.05])
    return Options(
        pp=choice([1, 2, 3, 4]),
        tp=choice([1, 1, 2]),
        page_size=page_size,
        pages=choice([6, 12, 24, 48]),
        host_pages=choice([0, 8, 32, 64]),
        write_policy=choice(list(WritePolicy)),
        load_back_threshold=choice([0, page_size]),
        has_store=choice([False, True, True]),
        fetch_policy=choice(list(FetchPolicy)),
        fetch_threshold=choice([0, page_size, 3 * page_size]),
        staged=choice([False, False, True]),
        staging=choice([False, False, True]),
        store_losses=choice([0, 0, 2]),
        query_s=choice([0.001, 0.01, 0.5]),
        chunk_size=choice([1, 4, 8, 16, 32]),
        max_running=choice([1, 2, 4, 8]),
        max_waiting=choice([2, 100]),
        max_context=choice([16, 40, 64]),
        prefix_first=choice([False, True]),
        requests=randomness.randint(1, 32),
        arrival_s=choice([0.0, 0.01, 0.1, 1.0]),
        timing=Timing(
            slow_forward / 4,
            slow_forward,
            slow_message / 10,
            slow_message,
            backup_failures=choice([0.0, 0.0, 0.3]),
            store_failures=choice([0.0, 0.0, 0.1]),
            fetch_high=choice([0.001, 0.1, 2.0]),
        ),
        abort_share=choice([0.0, 0.0, 0.2, 0.6]),
        losses=choice([0, 0, 0, 1, 2]),
        pauses=choice([0, 0, 0, 1]),
        flushes=choice([0, 0, 1, 2]),
        second_wave=choice([False, True, True]),
    )


def run_history(seed: int, options: Options | None = None) -> Report:
    """Run one history to its end. Raises ``AssertionError`` if anything it checks does not hold."""
    return History(seed, options).run()


class History:
    def __init__(self, seed: int, options: Options | None = None) -> None:
        self._random = random.Random(seed)
        self.options = options if options is not None else draw(self._random)
        self.heap = EventHeap()
        self.planner = Planner(_config(self.options))
        self.report = Report()
        self.client = ClientChecker(self.options.max_context)
        self._truth = Truth()
        self._store = FakeStore(self._random)
        self._inbox: list[Event] = []
        self._grid: FakeGrid | None = None
        self._fence = self._new_fence()
        self._tick_due = -1.0
        self._pages = self.options.pages

    def run(self) -> Report:
        self._schedule_traffic()
        self._schedule_faults()
        self._start_grid(self.planner.epoch)
        while len(self.heap):
            assert self.report.steps < MAX_STEPS, "the history does not end"
            self.heap.run_next()
            self._step()
        self._check_end()
        return self.report

    # ------------------------------------------------------------------------------------------ traffic and faults

    def _schedule_traffic(self) -> None:
        options, randomness = self.options, self._random
        stems = [[randomness.randrange(1, VOCABULARY) for _ in range(options.max_context)] for _ in range(2)]
        at = 0.0
        for index in range(options.requests):
            at += randomness.uniform(0, 2 * options.arrival_s)
            if index and index == options.requests // 2 and options.second_wave:
                at += WAVE_GAP_S
                both = Flush(FORGETTING, ("device", "host"), 0.5)
                self.heap.at(at - 1.0, lambda both=both: self._inbox.append(both))  # type: ignore[misc]
            submit = self._submit(f"r{index}", stems)
            self.heap.at(at, lambda submit=submit: self._arrive(submit))  # type: ignore[misc]
            if randomness.random() < options.abort_share:
                later = at + randomness.uniform(0, 20 * options.timing.forward_high)
                self.heap.at(later, lambda request_id=submit.request_id: self._abort(request_id))  # type: ignore[misc]
        for index in range(options.flushes):
            tiers = randomness.choice([("device",), ("host",), ("device", "host")])
            flush = Flush(index, tiers, randomness.choice([0.0, 1.0, 100.0]))
            self.heap.at(randomness.uniform(0, at + 0.1), lambda flush=flush: self._inbox.append(flush))  # type: ignore[misc]

    def _submit(self, request_id: str, stems: list[list[int]]) -> Submit:
        """Prompts share stems, and often end on a page border: that is where the interesting cases are."""
        randomness, options = self._random, self.options
        stem = randomness.choice(stems)
        page = options.page_size
        shared = randomness.choice([0, page, 2 * page, 4 * page, randomness.randrange(options.max_context)])
        own = [randomness.randrange(1, VOCABULARY) for _ in range(randomness.choice([0, 0, 1, page, 5]))]
        prompt = (stem[:shared] + own)[: options.max_context - 1] or [1]
        params = SamplingParams(
            max_tokens=randomness.randint(1, max(options.max_context - len(prompt), 1)),
            seed=randomness.choice([0, 0, 1]),
            ignore_eos=randomness.random() < 0.7,
            stop_token_ids=(VOCABULARY - 1,) if randomness.random() < 0.1 else (),
            repetition_penalty=randomness.choice([1.0, 1.5]),
        )
        salt = randomness.choice([b"", b"", b"", b"s"])
        return Submit(request_id, pack_tokens(prompt), params, (EOS,), salt, randomness.random() < 0.1, randomness.choice([0, 0, 1]))

    def _arrive(self, submit: Submit) -> None:
        tokens = [*memoryview(submit.prompt).cast("I")]
        emitted, _ = expected_tokens(submit, self.options.max_context)
        assert submit.params.seed is not None
        self._truth.add(submit.request_id, stamps(submit.salt, tokens + emitted), submit.params.seed)
        self.client.submitted(submit)
        self._inbox.append(submit)

    def _abort(self, request_id: str) -> None:
        self.client.aborted(request_id)
        self._inbox.append(Abort(request_id))

    def _schedule_faults(self) -> None:
        options, randomness = self.options, self._random
        horizon = options.requests * (options.arrival_s + 5 * options.timing.forward_high)
        for _ in range(options.losses):
            self.heap.at(randomness.uniform(0, horizon), self._lose_rank)
        for _ in range(options.store_losses):
            self.heap.at(randomness.uniform(0, horizon), lambda: self._store.evict(0.5))
        for _ in range(options.pauses):
            self.heap.at(randomness.uniform(0, horizon), self._pause_rank)

    def _lose_rank(self) -> None:
        grid = self._grid
        if grid is None or grid.dead:
            return
        grid.kill()
        lost = GridLost(grid.epoch, "a rank was lost", faulted=self._random.random() < 0.3)
        self.heap.after(self._random.uniform(0, 0.2), lambda: self._inbox.append(lost))

    def _pause_rank(self) -> None:
        """The planner must notice by itself: only a plan in flight shows it."""
        if self._grid is not None:
            self._grid.pause(self._random.randrange(len(self._grid.ranks)))

    # ------------------------------------------------------------------------------------------ the event loop

    def _step(self) -> None:
        events, self._inbox = self._inbox, []
        effects = self.planner.step(self.heap.now, events)
        self._carry_out(effects)
        while effects.plan is not None:
            effects = self.planner.step(self.heap.now)
            self._carry_out(effects)
        self._schedule_tick()

    def _carry_out(self, effects: Effects) -> None:
        self.report.steps += 1
        invariants.check(self.planner.replica)
        if effects.restart is not None:
            self.report.restarts += 1
            self._start_grid(self.planner.epoch)
        if effects.plan is not None:
            assert self._grid is not None
            self.report.plans += 1
            self.report.remaps += len(effects.plan.remaps)
            self.report.loads += len(effects.plan.loads)
            self.report.backups += len(effects.plan.backup.copies) if effects.plan.backup else 0
            self._fence.plan_sent(effects.plan)
            self._grid.send(effects.plan)
        for order in effects.orders:
            assert self._grid is not None
            self.report.tickets += isinstance(order, Ticket)
            self.report.staged += isinstance(order, StagedTicket)
            self.report.stores += isinstance(order, Store)
            self._grid.order(order)
        for query in effects.queries:
            self._ask(query)
        for output in effects.outputs:
            self.client.output(output)
        self.report.flushes += len(effects.flushed)

    def _ask(self, query: Query) -> None:
        """The store answers for the moment at which it looks, and the answer takes its time."""
        ranks = self.options.pp * self.options.tp
        done = QueryDone(query.number, self._store.match_prefix(query.hashes, ranks))
        self.heap.after(self._random.uniform(0, self.options.query_s), lambda: self._inbox.append(done))

    def _schedule_tick(self) -> None:
        """The real loop turns at least every so often; here only while that can change anything."""
        planner = self.planner
        waits = planner.replica.in_flight or planner.next_deadline() is not None or planner.replica.tickets.will_retry
        if waits and self._tick_due <= self.heap.now:
            self._tick_due = self.heap.now + TICK_S
            self.heap.at(self._tick_due, lambda: None)

    def _start_grid(self, epoch: int) -> None:
        if self._grid is not None:
            self._grid.kill()
        options = self.options
        self._fence = self._new_fence()
        self._grid = FakeGrid(
            self.heap,
            self._random,
            options.timing,
            (options.pp, options.tp),
            (self._pages, options.host_pages, options.page_size),
            epoch,
            self._truth,
            self._store,
            self._hear,
        )
        ready = GridReady(epoch, self._pages, options.timing.forward_high, options.host_pages)
        self.heap.after(self._random.uniform(0.01, 1.0), lambda: self._inbox.append(ready))

    def _new_fence(self) -> FenceChecker:
        return FenceChecker(self.options.pp * self.options.tp, self.options.page_size)

    def _hear(self, done: Acknowledgement) -> None:
        self.report.messages += 1
        if isinstance(done, PlanDone) and done.epoch == self.planner.epoch:
            self._fence.acknowledged(done)
        self._inbox.append(done)
        if self._random.random() < 0.02:  # a stale duplicate of an earlier epoch, as after a reconnect
            self._inbox.append(msgspec.structs.replace(done, epoch=done.epoch - 1))

    # ------------------------------------------------------------------------------------------ the end

    def _check_end(self) -> None:
        self.client.check()
        replica = self.planner.replica
        assert not replica.requests and not replica.running and not replica.in_flight, "something is left of ended requests"
        if self.planner.state is GridState.READY:
            assert replica.cache is not None
            replica.cache.flush(TIERS)
            held = replica.cache.held(TIERS)
            assert not held, f"{held} pages are lost"
        self.report.retractions = replica.retractions
        self.report.cached_tokens = replica.cached_device_tokens
        self.report.loaded_tokens = replica.cached_host_tokens
        self.report.fetched_tokens = replica.cached_store_tokens
        self.report.outcomes = dict(replica.tickets.outcomes)
        assert replica.tickets.is_idle or self.planner.state is not GridState.READY, "a ticket never ended"
        flushes = self.options.flushes + (self.options.second_wave and self.options.requests > 1)
        assert self.report.flushes == flushes, "a flush was not answered once"
        for reason in self.client.finish.values():
            self.report.finishes[reason] = self.report.finishes.get(reason, 0) + 1


def _config(options: Options) -> PlannerConfig:
    return PlannerConfig(
        pp=options.pp,
        tp=options.tp,
        page_size=options.page_size,
        chunk_size=options.chunk_size,
        max_context=options.max_context,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        prefix_first=options.prefix_first,
        write_policy=options.write_policy,
        load_back_threshold=options.load_back_threshold,
        has_store=options.has_store,
        fetch_policy=options.fetch_policy,
        fetch_threshold=options.fetch_threshold,
        staged=options.staged and not options.pauses,  # without heartbeats nothing tells of a rank that never looks
        staging=options.staging,
        silence_s=float("inf"),  # ranks here send no heartbeats; a paused one shows by its late plan
    )
