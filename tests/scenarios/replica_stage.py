"""A scenario's replica: the real planner, with ranks and a store that do what the script says and nothing else.

replica pp=2 pages=16 host=8 ...   begins; `PlannerConfig`'s fields by their names, and page counts
submit ID TOKENS [max=N] ...       abort ID
done PLAN [rank=R] [token=T]       acknowledge a plan, of all ranks or one; samples are T (9)
saved TRANSFER [rank=R] [pages=N]  a BACKUP      fetched TRANSFER rank=R pages=N [final]
stored TRANSFER [rank=R] [bits=1011]             found QUERY pages=N
run                                everything in flight goes well, until nothing more happens
lost [faulted] | ready [pages=N]   the grid      beat [rank=R] | wait SECONDS | flush TIERS [timeout=S] | show
"""

from collections import Counter
from collections.abc import Callable

from forebay.core import invariants
from forebay.core.messages import (
    Abort,
    Cancel,
    FetchProgress,
    Flush,
    Heartbeat,
    Output,
    Plan,
    PlanDone,
    Sample,
    Store,
    StoreDone,
    Submit,
    Ticket,
    TransferDone,
    pack_tokens,
    unpack_tokens,
)
from forebay.core.planner import Effects, Event, GridLost, GridReady, Planner
from forebay.core.replica import PlannerConfig
from forebay.core.residency import CACHE, STAGING
from forebay.core.sampling import SamplingParams
from forebay.core.transfers.backup import WritePolicy
from forebay.core.transfers.lookup import QueryDone
from forebay.core.transfers.policy import FetchPolicy
from tests.scenarios.script import ScriptError, listed, options, tokens_of

DEFAULTS: dict[str, object] = {
    "pp": 1, "page_size": 4, "chunk_size": 8, "max_context": 64, "max_running": 8, "max_waiting": 8, "load_back_threshold": 0,
    "fetch_threshold": 8, "fetch_policy": FetchPolicy.WAIT, "write_policy": WritePolicy.WRITE_THROUGH,
}  # fmt: skip
KINDS: dict[str, Callable[[str], object]] = {
    "fetch_policy": FetchPolicy,
    "write_policy": WritePolicy,
    "has_store": lambda text: text == "yes",
    "staged": lambda text: text == "yes",
}
TOKEN = 9


class ReplicaStage:
    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._now = 0.0
        self._pages = (0, 0)
        self._plans: dict[int, Plan] = {}
        self._running: list[Plan] = []
        self._backups: dict[int, int] = {}  # transfer -> pages
        self._stores: dict[int, Store] = {}
        self._store_acks: Counter[int] = Counter()
        self._flushes = 0
        self._retracted: set[str] = set()  # those that wait again

    def play(self, words: list[str]) -> list[str]:
        plain, named = options(words[1:])
        if words[0] == "replica":
            return self._begin(named)
        command = getattr(self, f"_do_{words[0]}", None)
        if command is None:
            raise ScriptError(f"there is no command {words[0]!r}")
        lines: list[str] = command(plain, named)
        return lines

    @property
    def planner(self) -> Planner:
        if self._planner is None:
            raise ScriptError("a scenario begins with replica")
        return self._planner

    def _begin(self, named: dict[str, str]) -> list[str]:
        self._pages = (int(named.pop("pages", "32")), int(named.pop("host", "0")))
        residency = STAGING if named.pop("staging", "no") == "yes" else CACHE
        given = {name: KINDS.get(name, int)(value) for name, value in named.items()}
        given["residency"] = residency
        self._planner = Planner(PlannerConfig(**(DEFAULTS | given)))  # type: ignore[arg-type]
        return self._step(GridReady(1, self._pages[0], 0.001, self._pages[1]))

    # ------------------------------------------------------------------------------------------ commands

    def _do_submit(self, plain: list[str], named: dict[str, str]) -> list[str]:
        request_id, tokens = plain[0], plain[1]
        params = SamplingParams(max_tokens=int(named.get("max", "2")), seed=0)
        prompt = pack_tokens(tokens_of(tokens))
        salt = named.get("salt", "").encode()
        return self._step(
            Submit(
                request_id,
                prompt,
                params,
                (0,),
                salt,
                "no_store" in plain,
                int(named.get("priority", "0")),
            )
        )

    def _do_abort(self, plain: list[str], named: dict[str, str]) -> list[str]:
        return self._step(Abort(plain[0]))

    def _do_done(self, plain: list[str], named: dict[str, str]) -> list[str]:
        plan = self._plans[int(plain[0])]
        return self._each_rank(
            named, lambda rank: self._plan_done(plan, rank, int(named.get("token", TOKEN)))
        )

    def _do_saved(self, plain: list[str], named: dict[str, str]) -> list[str]:
        transfer = int(plain[0])
        pages = int(named.get("pages", self._backups.get(transfer, 0)))
        return self._each_rank(
            named, lambda rank: TransferDone(self.planner.epoch, rank, transfer, pages)
        )

    def _do_fetched(self, plain: list[str], named: dict[str, str]) -> list[str]:
        transfer, pages, final = int(plain[0]), int(named["pages"]), "final" in plain
        return self._each_rank(
            named, lambda rank: FetchProgress(self.planner.epoch, rank, transfer, pages, final)
        )

    def _do_stored(self, plain: list[str], named: dict[str, str]) -> list[str]:
        transfer = int(plain[0])
        bits = named.get("bits", "1" * len(self._stores[transfer].pages))
        self._store_acks[transfer] += 1 if "rank" in named else self.planner.config.ranks
        if self._store_acks[transfer] == self.planner.config.ranks:
            del self._stores[transfer]
        return self._each_rank(
            named, lambda rank: StoreDone(self.planner.epoch, rank, transfer, bytes(map(int, bits)))
        )

    def _do_found(self, plain: list[str], named: dict[str, str]) -> list[str]:
        return self._step(QueryDone(int(plain[0]), int(named["pages"])))

    def _do_lost(self, plain: list[str], named: dict[str, str]) -> list[str]:
        return self._step(GridLost(self.planner.epoch, "a rank died", faulted="faulted" in plain))

    def _do_ready(self, plain: list[str], named: dict[str, str]) -> list[str]:
        pages = int(named.get("pages", self._pages[0]))
        return self._step(
            GridReady(self.planner.epoch, pages, 0.001, int(named.get("host", self._pages[1])))
        )

    def _do_beat(self, plain: list[str], named: dict[str, str]) -> list[str]:
        return self._each_rank(named, lambda rank: Heartbeat(self.planner.epoch, rank, 0))

    def _do_wait(self, plain: list[str], named: dict[str, str]) -> list[str]:
        self._now += float(plain[0])
        return self._step()

    def _do_flush(self, plain: list[str], named: dict[str, str]) -> list[str]:
        self._flushes += 1
        return self._step(
            Flush(self._flushes, tuple(plain[0].split(",")), float(named.get("timeout", "0")))
        )

    def _do_run(self, plain: list[str], named: dict[str, str]) -> list[str]:
        """All that is in flight goes well, plans first."""
        lines: list[str] = []
        while self._running or self._backups or self._stores:
            if self._running:
                lines += self._do_done([str(self._running[0].number)], named)
            elif self._backups:
                lines += self._do_saved([str(next(iter(self._backups)))], {})
            else:
                lines += self._do_stored([str(next(iter(self._stores)))], {})
        return lines

    def _do_show(self, plain: list[str], named: dict[str, str]) -> list[str]:
        replica = self.planner.replica
        cache = replica.cache
        lines = [f"grid {self.planner.state}, epoch {self.planner.epoch}"]
        if cache is not None:
            lines.append(
                f"free: device {cache.device.free} of {cache.device.capacity}, host {cache.host.free} of {cache.host.capacity}; "
                f"cached prefix pages: {len(cache.tree)}"
            )
        lines += [f"{request.request_id} is running" for request in replica.running]
        lines += [
            f"{request.request_id} is waiting: {request.phase.value}" for request in replica.waiting
        ]
        lines += [
            f"tickets {why}: {count}" for why, count in sorted(replica.tickets.outcomes.items())
        ]
        lines += [
            f"pages unused, {why}: {count}"
            for why, count in sorted(replica.ledger.unused.items())
            if count
        ]
        return lines

    # ------------------------------------------------------------------------------------------ the planner

    def _each_rank(self, named: dict[str, str], event: Callable[[int], Event]) -> list[str]:
        ranks = [int(named["rank"])] if "rank" in named else range(self.planner.config.ranks)
        return self._step(*(event(rank) for rank in ranks))

    def _plan_done(self, plan: Plan, rank: int, token: int) -> PlanDone:
        samples = ()
        if rank == self.planner.config.sampling_rank:
            samples = tuple(Sample(piece.slot, token) for piece in plan.pieces if piece.sample)
        return PlanDone(self.planner.epoch, rank, plan.number, samples)

    def _step(self, *events: Event) -> list[str]:
        """One turn of the event loop, the rules checked after each step."""
        lines: list[str] = []
        effects = self.planner.step(self._now, events)
        while True:
            invariants.check(self.planner.replica)
            lines += self._told(effects)
            if effects.plan is None:
                break
            effects = self.planner.step(self._now)
        self._forget_what_ended()
        return lines

    def _forget_what_ended(self) -> None:
        replica = self.planner.replica
        flying = {record.number for record in replica.in_flight}
        self._running = [plan for plan in self._running if plan.number in flying]
        self._backups = {
            number: pages
            for number, pages in self._backups.items()
            if number in replica.backups.in_flight
        }

    # ------------------------------------------------------------------------------------------ what came of it

    def _told(self, effects: Effects) -> list[str]:
        lines = []
        if effects.restart is not None:
            self._stores.clear()
            lines.append(f"restart as epoch {self.planner.epoch}: {effects.restart}")
        if effects.plan is not None:
            lines += self._told_plan(effects.plan)
        for order in effects.orders:
            match order:
                case Ticket():
                    lines.append(
                        f"ticket {order.transfer} to every rank: into host pages {listed(key.host for key in order.pages)}"
                    )
                case Store():
                    self._stores[order.transfer] = order
                    lines.append(
                        f"store {order.transfer}: host pages {listed(key.host for key in order.pages)}"
                    )
                case Cancel():
                    lines.append(f"cancel {order.transfer}")
        lines += [f"query {query.number}: {len(query.hashes)} pages" for query in effects.queries]
        lines += [_told_output(output) for output in effects.outputs]
        lines += self._told_retracted()
        for done in effects.flushed:
            lines.append(
                f"flushed {done.freed_pages} pages"
                + "".join(f"; busy: {busy}" for busy in done.busy)
            )
        return lines

    def _told_retracted(self) -> list[str]:
        now = [request.request_id for request in self.planner.replica.waiting if request.emitted]
        fresh = [request_id for request_id in now if request_id not in self._retracted]
        self._retracted = set(now)
        return [f"{request_id} is retracted" for request_id in fresh]

    def _told_plan(self, plan: Plan) -> list[str]:
        self._plans[plan.number] = plan
        self._running.append(plan)
        lines = [f"plan {plan.number}"]
        names = {request.slot: request.request_id for request in self.planner.replica.running}
        for remap in plan.remaps:
            lines.append(f"  {names[remap.slot]}: its page {remap.index} becomes {remap.page}")
        for piece in plan.pieces:
            stop = piece.start + len(unpack_tokens(piece.tokens))
            more = f", table gains {listed(piece.pages)}" if piece.pages else ""
            lines.append(
                f"  {names[piece.slot]}: positions {piece.start} to {stop - 1}{more}{', samples' * piece.sample}"
            )
        if plan.loads:
            lines.append(
                "  load "
                + ", ".join(f"host {copy.host} to device {copy.device}" for copy in plan.loads)
            )
        if plan.backup is not None:
            self._backups[plan.backup.transfer] = len(plan.backup.copies)
            copies = ", ".join(
                f"device {copy.device} to host {copy.host}" for copy in plan.backup.copies
            )
            lines.append(f"  then backup {plan.backup.transfer}: {copies}")
        return lines


def _told_output(output: Output) -> str:
    parts = []
    if output.tokens:
        parts.append(f"token {listed(output.tokens)}")
    if output.usage is not None:
        usage = output.usage
        parts.append(
            f"cached: device {usage.cached_device}, host {usage.cached_host}, store {usage.cached_store}"
        )
    if output.finish is not None:
        parts.append(f"ends: {output.finish}" + (f" ({output.message})" if output.message else ""))
    return f"{output.request_id}: " + "; ".join(parts)
