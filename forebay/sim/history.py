"""One history: a seed draws a small replica, its traffic and its faults; the real planner runs it to the end.

    heap of things to happen --> client, grid, store, faults --> inbox --> planner.step --> effects --> grid, store, client
                                                                   '------ checkers look at all that passes ------'

The faults heal: after the last one every request must end (progress). Checked whenever a step has changed anything: `core.invariants`
and what is believed stored; at every read: page contents; at every plan: the fence and the digests; at the end: tokens exactly once,
pages back to baseline.
"""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from forebay.core import invariants
from forebay.core.messages import (
    Abort,
    Flush,
    GridState,
    Heartbeat,
    Plan,
    PlanDone,
    StagedTicket,
    Store,
    Submit,
    Ticket,
    pack_tokens,
)
from forebay.core.planner import Effects, Event, GridLost, GridReady, Planner
from forebay.core.sampling import SamplingParams
from forebay.core.transfers.lookup import Query, QueryDone
from forebay.core.tree import TIERS
from forebay.sim import other_models
from forebay.sim.checkers import ClientChecker, FenceChecker, check_stored
from forebay.sim.coverage import CONCERNING, Cell
from forebay.sim.fake_store import FakeStore
from forebay.sim.faults import Poison, draw_faults, point_of
from forebay.sim.grid import Acknowledgement, FakeGrid, Reports
from forebay.sim.heap import EventHeap
from forebay.sim.injector import Injector
from forebay.sim.model import EOS, VOCABULARY, expected_tokens, stamps
from forebay.sim.options import Options, draw, planner_config
from forebay.sim.rank import Truth

TICK_S = 0.5
WAVE_GAP_S = 20.0
FORGETTING = 10_000
MAX_STEPS = 100_000
# Longer than any time-out of planner, store and faults: a request that stands still for so long waits for nothing.
STANDSTILL_S = 200.0
STALE_MEMORY = 8
STEMS = 4
FULL_CHECK_STEPS = 32
OTHERS_SHARE = 0.2  # of histories: other models' servers use the same store
# Of a history's requests, so many have a position at which numbers come to NaN.
TAINT_SHARES = (0.0, 0.0, 0.0, 0.1, 0.3)


@dataclass(slots=True)
class Report:
    """What happened, for coverage: a campaign in which some of these stay zero has tested nothing of that kind.

    ``messages``: delivered on any channel of the control path, heartbeats not counted. ``faults``: that have struck.
    """

    steps: int = 0
    plans: int = 0
    messages: int = 0
    faults: int = 0
    retractions: int = 0
    restarts: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    fetched_tokens: int = 0
    tickets: int = 0
    staged: int = 0
    stores: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    loads: int = 0
    backups: int = 0
    finishes: dict[str, int] = field(default_factory=dict)
    remaps: int = 0
    flushes: int = 0
    met: Counter[Cell] = field(default_factory=Counter)


def run_history(seed: int, options: Options | None = None) -> Report:
    """Run one history to its end. Raises ``AssertionError`` if anything it checks does not hold."""
    return History(seed, options).run()


class History:
    """``inbox``: what the planner's next step takes. ``grid``: of the newest epoch."""

    def __init__(self, seed: int, options: Options | None = None) -> None:
        self.random = random.Random(seed)
        self.options = options if options is not None else draw(self.random)
        self.heap = EventHeap()
        self.planner = Planner(planner_config(self.options))
        self.report = Report()
        self.client = ClientChecker(self.options.max_context)
        self.store = FakeStore(self.random, self.options.store_failures)
        self.inbox: list[Event] = []
        self.grid: FakeGrid | None = None
        self.pages = self.options.pages
        self.newest: Acknowledgement | None = None
        self.poison: dict[str, Poison] = {}
        self.poisonous_pages: dict[bytes, Poison] = {}
        self.recent: dict[type, list[Acknowledgement]] = {}  # the last words of each kind
        self.failing_starts = 0  # of the next grids
        self.may_restart = False  # something has happened that may cost a grid
        self.stands_until = 0.0  # the planner's process is stopped
        self.injector = Injector(self)
        # A stream of its own: other seeds stay the histories that they were.
        self._taints = random.Random(~seed)
        self._taint_share = self._taints.choice(TAINT_SHARES)
        self._has_other_models = self.options.has_store and self._taints.random() < OTHERS_SHARE
        self._truth = Truth()
        self._fence = self._new_fence()
        self._stems = [
            [self.random.randrange(1, VOCABULARY) for _ in range(self.options.max_context)]
            for _ in range(STEMS)
        ]
        self._told: defaultdict[bytes, list[list[int]]] = defaultdict(
            list
        )  # conversations so far, by salt
        self._flushes_asked = 0
        self._poisonings: set[int] = set()  # epochs that a request has ended
        self._grid_messages = 0
        self._tick_due = -1.0
        self._moved_at = 0.0
        self._seen: tuple[object, ...] = ()

    def run(self) -> Report:
        horizon = self._schedule_traffic()
        for fault in draw_faults(self.random, self.options.preset, horizon):
            self.heap.at(fault.at, lambda fault=fault: self.injector.arm(fault))  # type: ignore[misc]
        self._start_grid(self.planner.epoch)
        while len(self.heap):
            assert self.report.steps < MAX_STEPS, "the history does not end"
            self.heap.run_next()
            self._turn()
        self._check_end()
        return self.report

    # ------------------------------------------------------------------------------------------ traffic

    def _schedule_traffic(self) -> float:
        """The time at which the last request arrives."""
        options, randomness = self.options, self.random
        at = 0.0
        size = -(-options.requests // (len(options.waves) + 1))
        for index in range(options.requests):
            at += randomness.uniform(0, 2 * options.arrival_s)
            wave = index // size
            if wave and not index % size:
                at += WAVE_GAP_S
                flush = Flush(FORGETTING + wave, options.waves[wave - 1], 0.5)
                self.heap.at(at - 1.0, lambda flush=flush: self._ask_flush(flush))  # type: ignore[misc]
            request_id = f"r{index}"
            self.heap.at(at, lambda request_id=request_id: self.submit(request_id))  # type: ignore[misc]
            if randomness.random() < options.abort_share:
                later = at + randomness.uniform(0, 20 * options.timing.forward_high)
                self.heap.at(later, lambda request_id=request_id: self.abort(request_id))  # type: ignore[misc]
        for index in range(options.flushes):
            tiers = randomness.choice([("device",), ("host",), ("device", "host")])
            flush = Flush(index, tiers, randomness.choice([0.0, 1.0, 100.0]))
            self.heap.at(
                randomness.uniform(0, at + 0.1),
                lambda flush=flush: self._ask_flush(flush),  # type: ignore[misc]
            )
        return at + 10 * options.timing.forward_high

    def submit(self, request_id: str, max_tokens: int | None = None) -> None:
        randomness, options = self.random, self.options
        salt = randomness.choice([b"", b"", b"", b"", b"s"])
        prompt = self._prompt(salt)
        room = max(options.max_context - len(prompt), 1)
        params = SamplingParams(
            max_tokens=randomness.randint(1, room) if max_tokens is None else min(max_tokens, room),
            seed=randomness.choice([0, 0, 1]),
            ignore_eos=max_tokens is not None or randomness.random() < 0.7,
            stop_token_ids=(VOCABULARY - 1,) if randomness.random() < 0.1 else (),
            repetition_penalty=randomness.choice([1.0, 1.5]),
        )
        self._arrive(
            Submit(
                request_id,
                pack_tokens(prompt),
                params,
                (EOS,),
                salt,
                randomness.random() < 0.1,
                randomness.choice([0, 0, 1]),
            )
        )

    def _prompt(self, salt: bytes) -> list[int]:
        """Prompts share stems or go on with an earlier conversation, and often end on a page border, where it is interesting."""
        randomness, page, limit = self.random, self.options.page_size, self.options.max_context - 1
        own = [
            randomness.randrange(1, VOCABULARY)
            for _ in range(randomness.choice([0, 0, 1, page, 5]))
        ]
        if self._told[salt] and randomness.random() < 0.3:
            return (randomness.choice(self._told[salt]) + own)[:limit]
        shared = randomness.choice(
            [0, page, 2 * page, 4 * page, 8 * page, randomness.randrange(limit)]
        )
        return (randomness.choice(self._stems)[:shared] + own)[:limit] or [1]

    def _arrive(self, submit: Submit) -> None:
        tokens = [*memoryview(submit.prompt).cast("I")]
        emitted, reason = expected_tokens(submit, self.options.max_context)
        self._told[submit.salt].append(tokens + emitted)
        assert submit.params.seed is not None
        self._truth.add(
            submit.request_id, stamps(submit.salt, tokens + emitted), submit.params.seed
        )
        self.client.submitted(submit, emitted, reason)
        if self._has_other_models:
            self._store_others(submit)
        self._may_taint(submit.request_id, len(tokens) + len(emitted) - 1)
        self.inbox.append(submit)

    def _store_others(self, submit: Submit) -> None:
        """Servers of other models have stored their pages of this prompt."""
        page_size, ranks = self.options.page_size, self.options.pp * self.options.tp
        for hashes in other_models.page_hashes(submit.prompt, page_size, submit.salt):
            for hash in hashes:
                for rank in range(ranks):
                    self.store.put(hash, rank, [other_models.FOREIGN] * page_size)

    def _may_taint(self, request_id: str, positions: int) -> None:
        if self._taints.random() < self._taint_share:
            rank = self._taints.randrange(self.options.pp) * self.options.tp
            self._truth.taint(request_id, self._taints.randrange(positions), rank)
            self.client.tainted(request_id)

    def abort(self, request_id: str) -> None:
        """The client goes away. Requests that have ended, or never came, are aborted too."""
        self.client.aborted(request_id)
        self.inbox.append(Abort(request_id))

    def _ask_flush(self, flush: Flush) -> None:
        self._flushes_asked += 1
        self.inbox.append(flush)

    @property
    def is_flushing(self) -> bool:
        return self._flushes_asked > self.report.flushes

    # ------------------------------------------------------------------------------------------ the event loop

    def _turn(self) -> None:
        """The real loop turns when there is something to read, or at its tick."""
        now = self.heap.now
        if now < self.stands_until:
            return
        if not self.inbox and now < self._tick_due:
            return
        events, self.inbox = self.inbox, []
        self._cover(events)
        self._take_step(events)
        self.injector.tend()
        self._check_progress(events)
        self._schedule_tick()

    def _take_step(self, events: list[Event]) -> None:
        effects = self.planner.step(self.heap.now, events)
        self._carry_out(effects)
        while effects.plan is not None:
            effects = self.planner.step(self.heap.now)
            self._carry_out(effects)

    def _carry_out(self, effects: Effects) -> None:
        self.report.steps += 1
        self._check_books()
        if effects.restart is not None:
            self.report.restarts += 1
            assert self.may_restart, (
                f"a grid is given up though nothing has happened to it: {effects.restart}"
            )
            self._start_grid(self.planner.epoch)
        if effects.plan is not None:
            self._send(effects.plan)
        for order in effects.orders:
            assert self.grid is not None
            self.report.tickets += isinstance(order, Ticket)
            self.report.staged += isinstance(order, StagedTicket)
            self.report.stores += isinstance(order, Store)
            if order.epoch == self.grid.epoch:
                self.grid.order(order)
        for query in effects.queries:
            self._ask(query)
        for output in effects.outputs:
            self.client.output(output)
        if effects.restart is not None and not effects.outputs:
            self.client.restarted(self.planner.config.max_restarts)
        self.report.messages += len(effects.outputs) + len(effects.queries)
        self.report.flushes += len(effects.flushed)

    def _send(self, plan: Plan) -> None:
        assert self.grid is not None
        self.report.plans += 1
        self.report.remaps += len(plan.remaps)
        self.report.loads += len(plan.loads)
        self.report.backups += len(plan.backup.copies) if plan.backup else 0
        self._fence.plan_sent(plan)
        self.grid.send(plan)

    def _ask(self, query: Query) -> None:
        """The store answers for the moment at which it looks, and the answer takes its time. One that is down never answers."""
        if self.heap.now < self.store.down_until:
            return
        ranks = self.options.pp * self.options.tp
        done = QueryDone(query.number, self.store.match_prefix(query.hashes, ranks))
        silence = max(self.store.silent_until - self.heap.now, 0.0)
        self.heap.after(
            silence + self.random.uniform(0, self.options.query_s), lambda: self.inbox.append(done)
        )

    def _schedule_tick(self) -> None:
        """The real loop turns at least every so often; here only while that can change anything."""
        planner = self.planner
        if self.inbox:
            self.heap.after(0.0, lambda: None)
        waits = (
            planner.replica.requests
            or planner.replica.in_flight
            or not planner.replica.tickets.is_idle
            or self.is_flushing
        )
        if waits and planner.state is not GridState.FAILED and self._tick_due <= self.heap.now:
            due = planner.next_deadline()
            self._tick_due = self.heap.now + TICK_S
            if due is not None and self.heap.now < due < self._tick_due:
                self._tick_due = due
            self.heap.at(self._tick_due, lambda: None)

    # ------------------------------------------------------------------------------------------ the grid

    def _start_grid(self, epoch: int) -> None:
        self._end_grid()
        options = self.options
        self._fence = self._new_fence()
        self.grid = grid = FakeGrid(
            self.heap,
            self.random,
            options.timing,
            (options.pp, options.tp),
            (self.pages, options.host_pages, options.page_size),
            epoch,
            self._truth,
            self.store,
            Reports(self._hear, lambda poison: self._poisoned(grid, poison)),
        )
        self.grid.poison, self.grid.poisonous_pages = self.poison, self.poisonous_pages
        ready = GridReady(epoch, self.pages, options.timing.forward_high, options.host_pages)
        if self.failing_starts:
            self.failing_starts -= 1
            self.lose(grid, "a rank could not start")
        else:
            self.heap.after(self.random.uniform(0.01, 1.0), lambda: self.inbox.append(ready))

    def _end_grid(self) -> None:
        if self.grid is not None:
            self.grid.kill()
            self._grid_messages += self.grid.messages

    def lose(self, grid: FakeGrid, reason: str, *, faulted: bool = False) -> None:
        """What watches the ranks' processes tells the planner of a death, soon. What comes until then is among the requests it met."""
        lost = GridLost(grid.epoch, reason, faulted=faulted)

        def tell() -> None:
            self.client.grid_lost(faulted=faulted)
            self.inbox.append(lost)

        self.heap.after(self.random.uniform(0, 0.2), tell)

    def _poisoned(self, grid: FakeGrid, poison: Poison) -> None:
        if poison.faulted:
            self._poisonings.add(grid.epoch)
        self.lose(grid, "a rank died at its work", faulted=poison.faulted)

    def _new_fence(self) -> FenceChecker:
        return FenceChecker(self.options.pp * self.options.tp, self.options.page_size)

    def _hear(self, done: Acknowledgement) -> None:
        if isinstance(done, PlanDone) and done.epoch == self.planner.epoch:
            self._fence.acknowledged(done)
        self.inbox.append(done)
        if not isinstance(done, Heartbeat):
            same = self.recent.setdefault(type(done), [])
            same.append(done)
            del same[:-STALE_MEMORY]
            self.newest = done

    # ------------------------------------------------------------------------------------------ coverage and checks

    def _cover(self, events: list[Event]) -> None:
        met, state = self.report.met, str(self.planner.state)
        for event in events:
            met[state, type(event).__name__] += 1
            if isinstance(event, CONCERNING):
                replica = self.planner.replica
                concerned = replica.requests.values()
                if isinstance(event, Abort):
                    concerned = [
                        request for request in concerned if request.request_id == event.request_id
                    ]  # type: ignore[assignment]
                for point in {point_of(request): None for request in concerned}:
                    met[str(point), type(event).__name__] += 1

    def _check_books(self) -> None:
        """In full when a step may have moved a page or a request, and every so often in any case."""
        replica = self.planner.replica
        cache = replica.cache
        seen = (
            replica.built, replica.retractions, len(replica.requests), len(replica.running), replica.stores.stored_pages,
            cache and (cache.retired, cache.device.counts, cache.host.counts),
        )  # fmt: skip
        if seen == self._seen and self.report.steps % FULL_CHECK_STEPS:
            return
        self._seen = seen
        invariants.check(replica)
        if cache is not None:
            check_stored(cache.tree, self.store.ever, self.options.pp * self.options.tp)

    def _check_progress(self, events: list[Event]) -> None:
        """Nothing waits without something in flight that will wake it."""
        if (
            any(not isinstance(event, Heartbeat) for event in events)
            or not self.planner.replica.requests
        ):
            self._moved_at = self.heap.now
        waiting = self.client.open()
        assert self.heap.now - self._moved_at < STANDSTILL_S, (
            f"requests {waiting} wait, and nothing will wake them"
        )

    def _check_end(self) -> None:
        self._end_grid()
        self.report.messages += self._grid_messages
        self.client.check(
            failed=self.planner.state is GridState.FAILED, shrunk=self.pages < self.options.pages
        )
        failed_epochs = self.report.restarts + (self.planner.state is GridState.FAILED)
        assert self.planner.state is not GridState.FAILED or failed_epochs > len(
            self._poisonings
        ), "one request took the whole server with it"
        replica = self.planner.replica
        assert not replica.requests and not replica.running and not replica.in_flight, (
            "something is left of ended requests"
        )
        if self.planner.state is GridState.READY:
            assert replica.cache is not None
            replica.cache.flush(TIERS)
            held = replica.cache.held(TIERS)
            assert not held, f"{held} pages are lost"
            assert replica.tickets.is_idle, "a ticket never ended"
            invariants.check(replica)
        assert self.report.flushes == self._flushes_asked, "a flush was not answered once"
        self._fill_report()

    def _fill_report(self) -> None:
        replica, report = self.planner.replica, self.report
        report.retractions = replica.retractions
        report.cached_tokens = replica.cached_device_tokens
        report.loaded_tokens = replica.cached_host_tokens
        report.fetched_tokens = replica.cached_store_tokens
        report.outcomes = dict(replica.tickets.outcomes)
        report.unused = dict(replica.ledger.unused)
        report.messages += len(self.client.finish)
        for reason in self.client.finish.values():
            report.finishes[reason] = report.finishes.get(reason, 0) + 1
