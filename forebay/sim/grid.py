"""A grid of fake ranks: real messages in and out, pages of stamps instead of K/V, virtual time instead of work.

    plan ──> inbox of every rank (in order)          a rank runs plan n once it has run n-1 and, past the first stage,
    stage 0 ──activation──> stage 1 ──> ...          the stage before has handed over plan n's hidden states
    rank ──PlanDone, TransferDone──> planner (in order per rank and channel)

What holds of a rank's bytes is in `rank.py`; this file is about when things happen, and to whom.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forebay.core.messages import (
    Backup,
    Cancel,
    FetchProgress,
    Heartbeat,
    Plan,
    PlanDone,
    StagedReturn,
    StagedTaken,
    StagedTicket,
    Store,
    StoreDone,
    Ticket,
    TransferDone,
)
from forebay.sim.fake_store import FakeStore, Outcome
from forebay.sim.faults import Poison
from forebay.sim.heap import Action, Channel, EventHeap
from forebay.sim.rank import FakeRank, Truth

Acknowledgement = PlanDone | TransferDone | FetchProgress | StagedTaken | StoreDone | Heartbeat
Order = Ticket | Cancel | Store | StagedTicket | StagedReturn
BEAT_S = 1.0
HANG_S = 10.0  # the store's own time-out for one read or write


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: a plan's forward time on a rank lies between ``forward_low`` and ``forward_high``; a message's delay likewise, and
    that of the copy of a page; a read from the store takes up to ``fetch_high``. ``backup_failures``: share of backups that fail
    somewhere."""

    forward_low: float
    forward_high: float
    delay_low: float
    delay_high: float
    backup_failures: float = 0.0
    fetch_high: float = 0.0


@dataclass(frozen=True, slots=True)
class Reports:
    """Whom a grid tells what: ``tell`` brings a message to the planner, in order per rank and channel; ``fail`` says that a rank
    died of poison."""

    tell: Callable[[Acknowledgement], None]
    fail: Callable[[Poison], None]


class FakeGrid:
    """All ranks of one epoch. ``poison``: requests that end any rank that runs them; ``poisonous_pages``: the same of fetched pages."""

    def __init__(
        self,
        heap: EventHeap,
        randomness: random.Random,
        timing: Timing,
        shape: tuple[int, int],
        pages: tuple[int, int, int],
        epoch: int,
        truth: Truth,
        store: FakeStore,
        reports: Reports,
    ) -> None:
        """``shape``: (pp, tp). ``pages``: (device pages, host pages, tokens of one)."""
        self.epoch = epoch
        self._pp, self._tp = shape
        self._heap, self._random, self._timing, self._store = heap, randomness, timing, store
        self._tell, self._fail = reports.tell, reports.fail
        count = self._pp * self._tp
        self.ranks = [FakeRank(rank, pages[2], pages[0], pages[1], truth) for rank in range(count)]
        self._plans = self._channels()
        self._orders = self._channels()
        self._acks = self._channels()
        self._copy_acks = self._channels()
        self._copy_engines = self._channels()
        self._store_engines = self._channels()
        self._activations = 0
        self.refusals = [0] * count  # tickets that the rank will refuse for want of memory
        self.failing_copies = [0] * count  # backups that will fail on the rank
        self.poison: Mapping[str, Poison] = {}
        self.poisonous_pages: Mapping[bytes, Poison] = {}
        self.dead = False
        heap.after(BEAT_S, self._beat, weak=True)

    @property
    def messages(self) -> int:
        """Delivered or under way: plans, orders, activations, acknowledgements. Heartbeats are not counted."""
        channels = (*self._plans, *self._orders, *self._acks, *self._copy_acks)
        return self._activations + sum(channel.count for channel in channels)

    def send(self, plan: Plan) -> None:
        for rank, channel in zip(self.ranks, self._plans, strict=True):
            channel.send(self._delay(), self._to(rank, lambda rank=rank: self._receive(rank, plan)))  # type: ignore[misc]

    def order(self, order: Order) -> None:
        """On the ticket channel: taken by the rank's I/O side, whatever its compute loop does."""
        for rank, channel in zip(self.ranks, self._orders, strict=True):
            if order.ranks and rank.rank not in order.ranks:
                continue
            channel.send(
                self._delay(),
                self._to(rank, lambda rank=rank: self._take_order(rank, order)),  # type: ignore[misc]
            )

    # ------------------------------------------------------------------------------------------ what happens to ranks

    def stop(self, rank: int) -> None:
        """SIGSTOP: nothing happens to the rank until it is resumed; what it has sent still arrives."""
        self.ranks[rank].stopped = True

    def resume(self, rank: int) -> None:
        """SIGCONT: all that it has missed happens at once, in order."""
        each = self.ranks[rank]
        each.stopped = False
        held, each.held = each.held, []
        for action in held:
            self._to(each, action)()

    def kill_rank(self, rank: int) -> None:
        self.ranks[rank].dead = True

    def kill(self) -> None:
        """All ranks end; acknowledgements on their way still arrive."""
        self.dead = True

    # ------------------------------------------------------------------------------------------ time

    def _channels(self) -> list[Channel]:
        return [Channel(self._heap) for _ in range(self._pp * self._tp)]

    def _delay(self) -> float:
        return self._random.uniform(self._timing.delay_low, self._timing.delay_high)

    def _to(self, rank: FakeRank, action: Action) -> Action:
        """``action`` as it happens to a rank that may be stopped or dead by then."""

        def guarded() -> None:
            if self.dead or rank.dead:
                return
            if rank.stopped:
                rank.held.append(action)
            else:
                action()

        return guarded

    def _after(self, rank: FakeRank, seconds: float, action: Action) -> None:
        self._heap.after(seconds, self._to(rank, action))

    def _beat(self) -> None:
        if self.dead:
            return
        alive = [rank for rank in self.ranks if not (rank.dead or rank.stopped or rank.silent)]
        beats = [Heartbeat(self.epoch, rank.rank, rank.applied) for rank in alive]

        def arrive() -> None:
            for beat in beats:
                self._tell(beat)

        self._heap.after(self._delay(), arrive, weak=True)
        self._heap.after(BEAT_S, self._beat, weak=True)

    # ------------------------------------------------------------------------------------------ plans

    def _receive(self, rank: FakeRank, plan: Plan) -> None:
        """Loads may run at once, while earlier plans still compute."""
        rank.inbox.append(plan)
        if plan.loads:
            rank.loading.add(plan.number)
            for copy in plan.loads:
                self._after(rank, self._delay(), lambda copy=copy: rank.load(copy))  # type: ignore[misc]
            self._after(rank, self._timing.delay_high, lambda: self._loaded(rank, plan.number))
        self._try_run(rank)

    def _loaded(self, rank: FakeRank, number: int) -> None:
        rank.loading.discard(number)
        self._try_run(rank)

    def _try_run(self, rank: FakeRank) -> None:
        if rank.busy or not rank.inbox or rank.inbox[0].number in rank.loading:
            return
        if rank.rank >= self._tp and rank.inbox[0].number not in rank.handed:
            return
        rank.busy = True
        plan = rank.inbox.pop(0)
        seconds = (
            self._random.uniform(self._timing.forward_low, self._timing.forward_high)
            * rank.slowness
        )
        self._after(rank, seconds, lambda: self._finish(rank, plan, seconds))

    def _finish(self, rank: FakeRank, plan: Plan, forward_s: float) -> None:
        rank.busy = False
        if self.poison and self._is_poisoned(rank, plan):
            return
        samples = rank.apply(plan)
        rank.handed.discard(plan.number)
        following = rank.rank + self._tp
        if following < len(self.ranks):
            self._activations += 1
            receiver = self.ranks[following]
            self._after(receiver, self._delay(), lambda: self._hand_over(receiver, plan.number))
        is_sampler = rank.rank == (self._pp - 1) * self._tp
        done = PlanDone(
            self.epoch,
            rank.rank,
            plan.number,
            samples if is_sampler else (),
            forward_s,
            tainted=rank.tainted,
        )
        # A rank samples while its backup runs: what it says of taint may come after that is done.
        sampling_s = 4 * self._timing.delay_high if rank.tainted else 0.0
        self._acks[rank.rank].send(self._delay() + sampling_s, lambda: self._tell(done))
        if plan.backup is not None:
            self._back_up(rank, plan.backup)
        self._look(rank)
        self._try_run(rank)

    def _is_poisoned(self, rank: FakeRank, plan: Plan) -> bool:
        for request_id, piece in zip(rank.names(plan), plan.pieces, strict=True):
            poison = self.poison.get(request_id)
            if poison is not None and (piece.sample or not poison.late):
                self._die(rank, poison)
                return True
        return False

    def _die(self, rank: FakeRank, poison: Poison) -> None:
        rank.dead = True
        self._fail(poison)

    def _hand_over(self, rank: FakeRank, number: int) -> None:
        rank.handed.add(number)
        self._try_run(rank)

    # ------------------------------------------------------------------------------------------ transfers

    def _back_up(self, rank: FakeRank, backup: Backup) -> None:
        """One page after another on the rank's copy engine, then the acknowledgement; some pages may fail, with all behind them."""
        saved = len(backup.copies)
        if self.failing_copies[rank.rank] or self._random.random() < self._timing.backup_failures:
            self.failing_copies[rank.rank] = max(self.failing_copies[rank.rank] - 1, 0)
            saved = self._random.randrange(saved)
        engine = self._copy_engines[rank.rank]
        for copy in backup.copies[:saved]:
            engine.send(self._delay(), self._to(rank, lambda copy=copy: rank.save(copy)))  # type: ignore[misc]
        done = TransferDone(self.epoch, rank.rank, backup.transfer, saved)
        engine.send(self._delay(), self._to(rank, lambda: self._say(rank, done)))

    def _take_order(self, rank: FakeRank, order: Order) -> None:
        match order:
            case Cancel():
                rank.cancelled.add(order.transfer)
                self._look(rank)
            case StagedTicket():
                rank.mailbox.append(order)
                self._look(rank)
            case StagedReturn():
                rank.returned.add(order.transfer)
                self._look(rank)
            case Ticket():
                if self.refusals[rank.rank]:
                    self.refusals[rank.rank] -= 1
                    self._say(rank, FetchProgress(self.epoch, rank.rank, order.transfer, 0, True))
                else:
                    self._after(rank, self._delay(), lambda: self._fetch(rank, order, 0))
            case Store():
                self._put(rank, order)

    def _put(self, rank: FakeRank, order: Store) -> None:
        engine = self._store_engines[rank.rank]
        stored = bytearray()
        for page in order.pages:
            outcome = self._store.outcome(self._heap.now)
            stored.append(outcome is Outcome.GOOD)
            if outcome is Outcome.GOOD:
                engine.send(
                    self._delay(),
                    self._to(rank, lambda page=page: rank.put(self._store, page)),  # type: ignore[misc]
                )
            elif outcome is Outcome.HANG:
                engine.send(HANG_S, lambda: None)
        done = StoreDone(self.epoch, rank.rank, order.transfer, bytes(stored))
        engine.send(self._delay(), self._to(rank, lambda: self._say(rank, done)))

    def _look(self, rank: FakeRank) -> None:
        """Between its forwards a rank takes what has come by the staged route, and answers what it may."""
        if rank.busy:
            return
        taken, rank.mailbox = rank.mailbox, []
        for ticket in taken:
            self._say(rank, StagedTaken(self.epoch, rank.rank, ticket.transfer))
            rank.found[ticket.transfer] = rank.match(self._store, ticket.pages)
            self._fetch(rank, ticket, 0)
        is_last = rank.rank // self._tp == self._pp - 1
        for transfer, pages in tuple(rank.read.items()):
            if is_last or transfer in rank.returned or transfer in rank.cancelled:
                del rank.read[transfer]
                self._say(
                    rank,
                    FetchProgress(
                        self.epoch, rank.rank, transfer, pages, True, rank.found.pop(transfer)
                    ),
                )

    def _fetch(self, rank: FakeRank, ticket: Ticket | StagedTicket, done: int) -> None:
        """One page after another; a Cancel begins no new read."""
        if done == len(ticket.pages) or ticket.transfer in rank.cancelled:
            self._end_fetch(rank, ticket, done)
            return
        outcome = self._store.outcome(self._heap.now)
        seconds = (
            HANG_S if outcome is Outcome.HANG else self._random.uniform(0, self._timing.fetch_high)
        )
        self._after(rank, seconds, lambda: self._read(rank, ticket, done, outcome))

    def _read(
        self, rank: FakeRank, ticket: Ticket | StagedTicket, done: int, outcome: Outcome
    ) -> None:
        """A read that was under way writes its page, whatever has been cancelled meanwhile; a miss or a failure ends the ticket."""
        poison = self.poisonous_pages.get(ticket.pages[done].hash)
        if poison is not None:
            self._die(rank, poison)
            return
        if not rank.fetch(self._store, ticket.pages[done], outcome):
            self._end_fetch(rank, ticket, done)
            return
        if done % 2 and isinstance(ticket, Ticket):  # acknowledged in batches of two
            self._say(rank, FetchProgress(self.epoch, rank.rank, ticket.transfer, done + 1, False))
        self._fetch(rank, ticket, done + 1)

    def _end_fetch(self, rank: FakeRank, ticket: Ticket | StagedTicket, done: int) -> None:
        if isinstance(ticket, StagedTicket):
            rank.read[ticket.transfer] = done
            self._look(rank)
        else:
            self._say(rank, FetchProgress(self.epoch, rank.rank, ticket.transfer, done, True))

    def _say(self, rank: FakeRank, message: Acknowledgement) -> None:
        self._copy_acks[rank.rank].send(self._delay(), lambda: self._tell(message))
