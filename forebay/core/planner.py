"""The planner: the one place that decides, for one replica. ``effects = planner.step(now, events)``.

No clock, random, thread, file or socket: the same code runs under the real event loop and under the simulator.

One step:   take events -> retire plans -> watch the grid -> flush -> admit -> build at most one plan -> effects

    STARTING --GridReady--> READY --lost rank, silence, late plan--> RESTARTING --GridReady--> READY
        |                                                                 |
        '--hopeless, or lost again and again--> FAILED <-- the same ------'

A step that built a plan may be able to build another; call again until ``effects.plan`` is None.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forebay.core import building, invariants
from forebay.core.admission import admit
from forebay.core.lifecycle import Cause, Phase, RequestState, move
from forebay.core.messages import (
    MAX_REQUEST_ID_CHARS,
    Abort,
    CancelFlush,
    FetchProgress,
    FinishReason,
    Flush,
    FlushDone,
    GridState,
    Heartbeat,
    Output,
    Plan,
    PlanDone,
    ProtocolError,
    Snapshot,
    StagedTaken,
    Store,
    StoreDone,
    Submit,
    TierUse,
    TransferDone,
)
from forebay.core.page_cache import PageCache
from forebay.core.replica import InFlight, PlannerConfig, Replica
from forebay.core.request import Request
from forebay.core.spans import SpanKind, TimedSpan
from forebay.core.statistics import Counters, tier_use
from forebay.core.transfers.lookup import Hint, Query, QueryDone
from forebay.core.transfers.routes import FetchOrder
from forebay.core.transfers.store import StoreEmptied, StoreWell
from forebay.core.transfers.tickets import release_ready
from forebay.core.tree import Tier
from forebay.pages.hashing import root_hash

MAX_FAULTS_ALONE = 2
MAX_LOSSES = 4
TAINTED = (
    "the model's numbers came to NaN or infinity on this request; nothing of it is kept; "
    "start with --dtype float32 and --kv-dtype auto, which have the widest range"
)


@dataclass(frozen=True, slots=True)
class GridReady:
    """All ranks of ``epoch`` stand, with ``device_pages`` and ``host_pages`` pages each.

    ``s_per_token``: a prefill token's time, all stages together.
    """

    epoch: int
    device_pages: int
    s_per_token: float
    host_pages: int = 0


@dataclass(frozen=True, slots=True)
class GridLost:
    """A rank of ``epoch`` died, said that it cannot go on, or broke the protocol.

    ``hopeless``: it said that no other try would help (a bad file, too little memory); believed before the first `GridReady`.
    ``faulted``: a rank failed or crashed at its work, so what it worked on is under suspicion.
    """

    epoch: int
    reason: str
    hopeless: bool = False
    faulted: bool = False


Event = (
    Submit
    | Abort
    | Flush
    | CancelFlush
    | PlanDone
    | TransferDone
    | FetchProgress
    | StagedTaken
    | StoreDone
    | QueryDone
    | Heartbeat
    | StoreWell
    | StoreEmptied
    | GridReady
    | GridLost
)


@dataclass(slots=True)
class Effects:
    """What the caller must do, in this order: restart the grid if asked, send the plan and the orders to every rank (each on its own
    channel; staged orders go to the ranks of their stage), ask the store the queries, give it the hints, then tell the frontend.

    ``restart``: end all ranks, start them as epoch ``planner.epoch``, and report `GridReady` or `GridLost`. ``spans``: what has just
    ended, for whoever keeps time.
    """

    restart: str | None = None
    plan: Plan | None = None
    orders: list[FetchOrder | Store] = field(default_factory=list)
    queries: list[Query] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    flushed: list[FlushDone] = field(default_factory=list)
    spans: list[TimedSpan] = field(default_factory=list)
    state_changed: bool = False


@dataclass(slots=True)
class PendingFlush:
    flush: Flush
    deadline: float
    freed: int = 0

    @property
    def tiers(self) -> list[Tier]:
        names = {"device": Tier.DEVICE, "host": Tier.HOST}
        return [names[name] for name in self.flush.tiers if name in names]


class Planner:
    """One replica's decisions. Not thread-safe."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self.replica = Replica(config)
        self.state = GridState.STARTING
        self.detail = ""
        self.epoch = 1
        self.counters = Counters()
        self._flushes: deque[PendingFlush] = deque()
        self._restarts_without_progress = 0
        self.was_ready = False
        self._heard: list[float] = []
        self._effects = Effects()
        self._steps = 0

    # ------------------------------------------------------------------------------------------ the step

    def step(self, now: float, events: Sequence[Event] = ()) -> Effects:
        """Take ``events`` in order and decide. ``now``: monotonic seconds. Events of other epochs are dropped (rule R1)."""
        effects = self._effects = Effects()
        self.replica.gives_way_until = None  # nobody waits for that where nobody is admitted
        for event in events:
            self._take(now, event)
        if self.state is GridState.READY:
            self._watch(now)
        self._flush(now)
        if self.state is GridState.READY:
            if not self._flushes:
                self._tend_store(now)
                admit(self.replica, now)
            effects.plan = building.build_plan(self.replica, self.epoch, now)
            self._collect_orders()
        effects.spans = self.replica.take_spans()
        self._check()
        return effects

    def name_model(self, fingerprint: bytes) -> None:
        """What its pages are named by, once that is known; no request comes before."""
        assert not self.replica.requests
        self.config = replace(self.config, fingerprint=fingerprint)

    @property
    def namespace(self) -> bytes:
        """What all pages of this model, KV format and page size share, whatever salts their keys."""
        return self._root(b"")

    def _check(self) -> None:
        """A planner that finds its own books wrong ends rather than go on with them."""
        self._steps += 1
        every = self.config.check_every
        if every and not self._steps % every:
            invariants.check(self.replica)
        else:
            invariants.check_cheaply(self.replica)

    def resume(self, now: float) -> None:
        """This process stood still for a while: what ranks said meanwhile may not have been read yet, so silence proves nothing."""
        self._heard = [now] * len(self._heard)

    @property
    def is_saving(self) -> bool:
        """Pages are on their way to the store."""
        return self.config.has_store and bool(
            self.replica.backups.in_flight or self.replica.stores.is_busy
        )

    def next_deadline(self) -> float | None:
        """When a step is due even if no event comes."""
        flush = min((pending.deadline for pending in self._flushes), default=None)
        ticket = self.replica.tickets.next_deadline()
        return min(
            (due for due in (flush, ticket, self.replica.gives_way_until) if due is not None),
            default=None,
        )

    def _take(self, now: float, event: Event) -> None:
        match event:
            case Submit():
                self._submit(now, event)
            case Abort():
                request = self.replica.requests.get(event.request_id)
                if request is not None:
                    self._finish(request, FinishReason.ABORT)
            case PlanDone():
                if event.epoch == self.epoch and self.state is GridState.READY:
                    self._heard[event.rank] = now
                    self._plan_done(now, event)
            case TransferDone() | FetchProgress() | StagedTaken() | StoreDone():
                if event.epoch == self.epoch and self.state is GridState.READY:
                    self._heard[event.rank] = now
                    self._transferred(now, event)
            case QueryDone():
                if self.state is GridState.READY:
                    self._answered(now, event)
            case Heartbeat():
                if event.epoch == self.epoch and self.state is GridState.READY:
                    self._heard[event.rank] = now
            case StoreWell() | StoreEmptied():
                if self.replica.cache is not None:
                    self._store_changed(self.replica.cache, event)
            case Flush():
                self._flushes.append(PendingFlush(event, now + event.timeout_s))
            case CancelFlush():
                self._flushes = deque(
                    pending for pending in self._flushes if pending.flush.call != event.call
                )
            case GridReady():
                if event.epoch == self.epoch and self.state in (
                    GridState.STARTING,
                    GridState.RESTARTING,
                ):
                    self._grid_ready(now, event)
            case GridLost():
                if event.epoch == self.epoch and self.state is not GridState.FAILED:
                    self._lose_grid(event.reason, event.hopeless, event.faulted)

    # ------------------------------------------------------------------------------------------ requests

    def _submit(self, now: float, submit: Submit) -> None:
        replica, config = self.replica, self.config
        problem = _malformed(submit, replica)
        if problem:
            self._reject(submit, FinishReason.ERROR, problem)
            return
        request = Request(
            submit, self._root(submit.salt), config.page_size, replica.next_arrival(), now
        )
        too_long = self._too_long(request)
        if self.state is GridState.FAILED:
            self._reject(submit, FinishReason.ERROR, f"the grid has failed: {self.detail}")
        elif too_long:
            self._reject(submit, FinishReason.REJECTED_TOO_LONG, too_long)
        elif len(replica.requests) >= config.max_running + config.max_waiting:
            self._reject(
                submit,
                FinishReason.REJECTED_FULL,
                f"{len(replica.requests)} requests are running or waiting already",
            )
        else:
            replica.requests[request.request_id] = request
            replica.waiting.add(request)
            replica.unasked.append(request)
            self.counters.prompt_tokens += request.prompt_tokens

    def _root(self, salt: bytes) -> bytes:
        config = self.config
        return root_hash(config.fingerprint, config.kv_dtype, config.page_size, salt=salt)

    def _too_long(self, request: Request) -> str:
        assert request.params.max_tokens is not None
        total = request.prompt_tokens + request.params.max_tokens
        if total > self.config.max_context:
            return f"prompt and max_tokens are {total} tokens together; the context is {self.config.max_context}"
        cache = self.replica.cache
        if (
            cache is not None
            and (pages := self.replica.pages_at_most(request)) > cache.device.capacity
        ):
            return (
                f"prompt and max_tokens need {pages} pages of {self.config.page_size} tokens; "
                f"device memory has {cache.device.capacity} (see --device-memory)"
            )
        return ""

    def _reject(self, submit: Submit, reason: FinishReason, message: str) -> None:
        self._effects.outputs.append(Output(submit.request_id, finish=reason, message=message))

    def _finish(self, request: Request, reason: FinishReason, message: str = "") -> None:
        """End a request wherever it is; tokens of plans in flight are dropped when they come."""
        self._effects.outputs.append(Output(request.request_id, finish=reason, message=message))
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.replica.tickets.drop(request, self.replica.cache)
        if request.state is RequestState.WAITING:
            self.replica.waiting.remove(request)
        else:
            self.replica.stop_running(request)
        move(request, Cause.END)
        del self.replica.requests[request.request_id]

    # ------------------------------------------------------------------------------------------ plans

    def _plan_done(self, now: float, done: PlanDone) -> None:
        in_flight = self.replica.in_flight
        expected = self._heard_plan(done.rank) + 1
        if done.number != expected or not in_flight or done.number > in_flight[-1].number:
            self._lose_grid(f"rank {done.rank} acknowledged plan {done.number}, not {expected}")
            return
        record = in_flight[done.number - in_flight[0].number]
        record.waits_for.remove(done.rank)
        if done.rank == 0:
            record.first_stage_s = done.forward_s
        self.replica.spans.append(
            TimedSpan(SpanKind.ACK, record.built_at, now, record.number, part=done.rank)
        )
        if done.tainted and not self._drop_tainted(record, done):
            return
        if done.rank == self.config.sampling_rank and not self._accept_samples(now, record, done):
            return
        while in_flight and not in_flight[0].waits_for:
            self._retire(now, in_flight.popleft())

    def _drop_tainted(self, record: InFlight, done: PlanDone) -> bool:
        """Requests whose numbers are none end; what the plan wrote for them is found by nobody any
        more, and whoever has built on it meanwhile begins anew. False if there is no such piece."""
        replica = self.replica
        assert replica.cache is not None
        if not all(0 <= piece < len(record.requests) for piece in done.tainted):
            self._lose_grid(f"rank {done.rank} names pieces that plan {done.number} has not")
            return False
        tree = replica.cache.tree
        for request in [record.requests[piece] for piece in done.tainted]:
            nodes = [tree.get(hash) for hash in request.extend_hashes()]
            tree.bury([node for node in nodes if node and node.plan >= record.number])
            if request.request_id in replica.requests:
                self.counters.tainted_requests += 1
                self._finish(request, FinishReason.TAINTED, TAINTED)
        for request in tuple(replica.running):
            if any(node.tainted for node in request.nodes):
                replica.retract(request)
        return True

    # ------------------------------------------------------------------------------------------ transfers

    def _transferred(
        self, now: float, done: TransferDone | FetchProgress | StagedTaken | StoreDone
    ) -> None:
        replica = self.replica
        assert replica.cache is not None
        try:
            match done:
                case TransferDone():
                    for node in replica.backups.done(replica.cache, done):
                        if self.config.has_store:
                            replica.stores.want(replica.cache, node)
                case FetchProgress():
                    replica.tickets.progressed(done, replica.cache, now)
                case StagedTaken():
                    replica.tickets.taken(done, now)
                case StoreDone():
                    replica.stores.done(replica.cache, done)
        except ProtocolError as error:
            self._lose_grid(str(error))

    def _store_changed(self, cache: PageCache, event: StoreWell | StoreEmptied) -> None:
        match event:
            case StoreWell():
                self.replica.stores.want_again(cache)
            case StoreEmptied():
                self.replica.stores.emptied(cache)

    def _answered(self, now: float, done: QueryDone) -> None:
        replica = self.replica
        assert replica.cache is not None
        compute_s = replica.pace.predict(float(self.config.page_size))
        replica.tickets.answered(done, replica.cache, now, compute_s, replica.stores.is_busy)

    def _tend_store(self, now: float) -> None:
        """Late tickets are cut short, misses may be asked for again, and requests that wait for the first time ask the store."""
        replica = self.replica
        assert replica.cache is not None
        unasked, replica.unasked = replica.unasked, []
        if not self.config.has_store:
            return
        replica.tickets.tick(replica.requests, replica.cache, now, bool(replica.in_flight))
        for request in unasked:
            if request.state is RequestState.WAITING and request.phase is Phase.NOT_ASKED:
                replica.tickets.ask(request, replica.cache, now)

    def _collect_orders(self) -> None:
        replica = self.replica
        assert replica.cache is not None
        effects = self._effects
        effects.queries, effects.hints, orders = replica.tickets.take_orders()
        effects.orders += orders
        store = replica.stores.start(replica.cache, self.config.ranks, self.epoch)
        if store is not None:
            effects.orders.append(store)
        replica.cache.end_transfers()

    def _heard_plan(self, rank: int) -> int:
        """The newest plan that ``rank`` has acknowledged."""
        for record in self.replica.in_flight:
            if rank in record.waits_for:
                return record.number - 1
        return self.replica.built

    def _accept_samples(self, now: float, record: InFlight, done: PlanDone) -> bool:
        """Tokens of requests that ended meanwhile are dropped. False if the samples are not what the plan asked for."""
        if [sample.slot for sample in done.samples] != record.slots:
            self._lose_grid(
                f"rank {done.rank} sampled other slots than plan {done.number} asked for"
            )
            return False
        if [scores.slot for scores in done.scores] != [slot for slot, _ in record.scoring]:
            self._lose_grid(
                f"rank {done.rank} scored other slots than plan {done.number} asked for"
            )
            return False
        for scores, (_, request_id) in zip(done.scores, record.scoring, strict=True):
            scored = self.replica.requests.get(request_id)
            if scored is None or scored.last_plan < record.number:
                continue  # it has ended, or begins anew
            self._effects.outputs.append(
                Output(request_id, scores=scores.logprobs, scored_from=scores.start)
            )
        outputs, decodes, max_context = (
            self._effects.outputs,
            self.replica.decodes,
            self.config.max_context,
        )
        running, stop, earlier = RequestState.RUNNING, FinishReason.STOP, len(outputs)
        for sample, request in zip(done.samples, record.sampling, strict=True):
            if request.state is not running or request.last_plan != record.number:
                continue
            if sample.failure:
                self._finish(request, FinishReason.GRAMMAR, sample.failure)
                continue
            token, usage = sample.token, request.unsaid
            reason = request.accept(token, max_context)
            if usage is not None:
                request.unsaid = None
                self.replica.spans.append(request.prefill_span(now, record.number))
            stop_token = token if reason is stop and token not in request.eos else None
            logprobs = () if sample.logprobs is None else (sample.logprobs,)
            outputs.append(
                Output(request.request_id, (token,), logprobs, usage, reason, stop_token)
            )
            if reason is None:
                decodes.append(request)
            else:
                self._forget(request)
        if len(outputs) > earlier:
            self.counters.output_tokens += len(outputs) - earlier
            self._restarts_without_progress = 0
        return True

    def _retire(self, now: float, record: InFlight) -> None:
        assert self.replica.cache is not None
        self.replica.cache.retire(record.number)
        self.replica.stores.retired(self.replica.cache)
        started = max(record.built_at, self.replica.last_retired_at)
        self.replica.pace.observe(record.work, now - started)
        self.replica.first_stage.observe(record.work, record.first_stage_s)
        self.replica.last_retired_at = now
        self.replica.spans.append(
            TimedSpan(SpanKind.PLAN, record.built_at, now, record.number, record.tokens)
        )
        self.counters.plan_retired(now - record.built_at)

    # ------------------------------------------------------------------------------------------ the grid

    def _grid_ready(self, now: float, ready: GridReady) -> None:
        replica = self.replica
        replica.start_epoch(
            ready.epoch, ready.device_pages, ready.host_pages, ready.s_per_token, now
        )
        self._heard = [now] * self.config.ranks
        self.was_ready = True
        self._set_state(GridState.READY, "")
        for request in replica.waiting:
            too_long = self._too_long(request)
            if too_long:
                self._finish(request, FinishReason.REJECTED_TOO_LONG, too_long)

    def _watch(self, now: float) -> None:
        """Rule R3: a rank that is silent, or a plan far later than predicted, means a new grid."""
        config, in_flight = self.config, self.replica.in_flight
        longest_s = now - min(self._heard)
        if longest_s > config.silence_s:
            self._lose_grid(
                f"rank {self._heard.index(min(self._heard))} has been silent for {longest_s:.1f} s"
            )
            return
        if in_flight:
            waited = now - max(in_flight[0].built_at, self.replica.last_retired_at)
            limit = config.late_base_s + config.late_factor * self.replica.pace.predict(
                in_flight[0].work
            )
            if waited > limit:
                ranks = sorted(in_flight[0].waits_for)
                self._lose_grid(
                    f"plan {in_flight[0].number} waits for ranks {ranks} since {waited:.1f} s (limit {limit:.1f} s)"
                )

    def _lose_grid(self, reason: str, hopeless: bool = False, faulted: bool = False) -> None:
        """A new epoch: device pages forgotten, requests kept with the tokens they have emitted (rule R3)."""
        if hopeless and not self.was_ready:
            self._fail(reason)
            return
        if (
            self.state is not GridState.READY or self.replica.requests
        ):  # a grid that stood idle had nothing to bring forward
            self._restarts_without_progress += 1
        given_up = self._blame(faulted)
        if given_up and faulted:
            self._restarts_without_progress = 0
        if self._restarts_without_progress > self.config.max_restarts:
            self._fail(
                f"{self.config.max_restarts} restarts in a row brought no token; last: {reason}"
            )
            return
        for request in given_up:
            self._finish(
                request,
                FinishReason.ERROR,
                f"the grid was lost {request.losses} times on this request: {reason}",
            )
        self.replica.lose_grid()
        self.epoch += 1
        self.counters.worker_restarts += 1
        self._effects.restart = reason
        self._set_state(GridState.RESTARTING if self.was_ready else GridState.STARTING, reason)

    def _blame(self, faulted: bool) -> list[Request]:
        """Count the loss for all that ranks were working on. What to give up, instead of the grid: what brought no token in so many.

        A fault makes them suspects: they run alone until a token of theirs comes, and two faults alone are enough.
        """
        accused = self.replica.at_work()
        for request in accused:
            request.losses += 1
            request.suspect |= faulted
            request.faults_alone += faulted and len(accused) == 1
        return [
            request
            for request in accused
            if request.losses >= MAX_LOSSES or request.faults_alone >= MAX_FAULTS_ALONE
        ]

    def _fail(self, reason: str) -> None:
        for request in tuple(self.replica.requests.values()):
            self._finish(request, FinishReason.ERROR, f"the grid has failed: {reason}")
        self.replica.lose_grid()
        self._set_state(GridState.FAILED, reason)
        self._answer_flushes(("the grid has failed",))

    def _set_state(self, state: GridState, detail: str) -> None:
        self.state, self.detail = state, detail
        self._effects.state_changed = True

    # ------------------------------------------------------------------------------------------ flush and report

    def _flush(self, now: float) -> None:
        """While a flush is pending nothing is admitted, so what runs drains, and saves reach the store before host pages go.

        Answered when no page is left, or at its time.
        """
        if not self._flushes:
            return
        cache = self.replica.cache
        if cache is None:
            self._answer_flushes(())
            return
        for request in self.replica.waiting:
            release_ready(request, cache)
        kept: deque[PendingFlush] = deque()
        for pending in self._flushes:
            if (
                Tier.HOST in pending.tiers
                and self.replica.stores.is_busy
                and now < pending.deadline
            ):
                kept.append(pending)
                continue
            pending.freed += cache.flush(pending.tiers)
            held = cache.held(pending.tiers)
            if held and now < pending.deadline and not self.replica.is_idle:
                kept.append(pending)
            else:
                busy = (
                    (f"{len(self.replica.running)} running requests; {held} pages in use",)
                    if held
                    else ()
                )
                self._effects.flushed.append(FlushDone(pending.flush.call, pending.freed, busy))
        self._flushes = kept

    def _answer_flushes(self, busy: tuple[str, ...]) -> None:
        for pending in self._flushes:
            self._effects.flushed.append(FlushDone(pending.flush.call, pending.freed, busy))
        self._flushes.clear()

    def snapshot(self) -> Snapshot:
        replica, counters = self.replica, self.counters
        return Snapshot(
            state=self.state,
            epoch=self.epoch,
            running=len(replica.running),
            waiting=len(replica.waiting),
            device=TierUse() if replica.cache is None else tier_use(replica.cache.device),
            host=TierUse() if replica.cache is None else tier_use(replica.cache.host),
            plans_retired=counters.plans_retired,
            retractions=replica.retractions,
            worker_restarts=counters.worker_restarts,
            prompt_tokens=counters.prompt_tokens,
            cached_device_tokens=replica.cached_device_tokens,
            cached_host_tokens=replica.cached_host_tokens,
            cached_store_tokens=replica.cached_store_tokens,
            output_tokens=counters.output_tokens,
            plan_s_buckets=tuple(counters.plan_s_buckets),
            plan_s_sum=counters.plan_s_sum,
            detail=self.detail,
            tickets=dict(replica.tickets.outcomes),
            unused_tokens={
                why: pages * self.config.page_size for why, pages in replica.ledger.unused.items()
            },
            stored_pages=replica.stores.stored_pages,
            store_failures=replica.stores.failed_pages,
            tainted_requests=counters.tainted_requests,
        )


def _malformed(submit: Submit, replica: Replica) -> str:
    """Why a Submit is no request at all: the frontend checks these, so it is a fault of its own."""
    if not submit.request_id or len(submit.request_id) > MAX_REQUEST_ID_CHARS:
        return f"a request id has 1 to {MAX_REQUEST_ID_CHARS} characters"
    if submit.request_id in replica.requests:
        return f"request id {submit.request_id!r} is in use"
    if not submit.prompt or len(submit.prompt) % 4:
        return "a prompt is at least one packed token"
    if submit.params.max_tokens is None or submit.params.seed is None:
        return "max_tokens and seed must be resolved before a request is submitted"
    return ""
