"""A grid of fake ranks: real messages in and out, pages of stamps instead of K/V, virtual time instead of work.

    plan ──> inbox of every rank (in order)          a rank runs plan n once it has run n-1 and, past the first stage,
    stage 0 ──activation──> stage 1 ──> ...          the stage before has handed over plan n's hidden states
    rank ──PlanDone, TransferDone──> planner (in order per rank and channel)

A rank applies plans to its own mirror and checks the digest from it (rule R2). Every read of a position compares what the page holds
with what the token prefix demands, so a wrong, stale or unfinished page is caught at that read.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.core.digest import ZERO, PlanDigest
from forebay.core.messages import (
    Backup,
    Cancel,
    Copy,
    FetchProgress,
    PageKey,
    Piece,
    Plan,
    PlanDone,
    Sample,
    StagedReturn,
    StagedTaken,
    StagedTicket,
    Store,
    StoreDone,
    Ticket,
    TokenLogprobs,
    TransferDone,
    unpack_tokens,
)
from forebay.sim import model
from forebay.sim.heap import Channel, EventHeap

Acknowledgement = PlanDone | TransferDone | FetchProgress | StagedTaken | StoreDone
Order = Ticket | Cancel | Store | StagedTicket | StagedReturn


class ContentError(AssertionError):
    """A forward pass has read a page that does not hold what it should."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: a plan's forward time on a rank lies between ``forward_low`` and ``forward_high``; a message's delay likewise, and
    that of the copy of a page. ``backup_failures``: share of backups that fail somewhere; ``store_failures``: share of single reads
    and writes of the store that fail."""

    forward_low: float
    forward_high: float
    delay_low: float
    delay_high: float
    backup_failures: float = 0.0
    store_failures: float = 0.0
    fetch_high: float = 0.0


@dataclass
class _Slot:
    request_id: str
    table: list[int] = field(default_factory=list)
    length: int = 0


class Truth:
    """What every request's tokens really are, kept by the history and not by the system under test."""

    def __init__(self) -> None:
        self._stamps: dict[str, list[int]] = {}
        self._seeds: dict[str, int] = {}

    def add(self, request_id: str, stamps: list[int], seed: int) -> None:
        """``stamps`` of prompt and all tokens that the request can ever emit."""
        self._stamps[request_id] = stamps
        self._seeds[request_id] = seed

    def stamp(self, request_id: str, position: int) -> int:
        return self._stamps[request_id][position]

    def token_after(self, request_id: str, position: int) -> int:
        return model.next_token(self._stamps[request_id][position], self._seeds[request_id])


class FakeStore:
    """What every rank has stored, by page hash and rank; it outlives grids. Objects may vanish at any time."""

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness
        self.objects: dict[tuple[bytes, int], list[int | None]] = {}

    def match_prefix(self, hashes: Sequence[bytes], ranks: int) -> int:
        """Leading pages of which every rank's part is there."""
        count = 0
        while count < len(hashes) and all((hashes[count], rank) in self.objects for rank in range(ranks)):
            count += 1
        return count

    def evict(self, share: float) -> None:
        for key in list(self.objects):
            if self._random.random() < share:
                del self.objects[key]


class FakeRank:
    """One rank's pages and mirror."""

    def __init__(self, rank: int, page_size: int, pages: int, host_pages: int, truth: Truth) -> None:
        self.rank = rank
        self.inbox: list[Plan] = []
        self.handed: set[int] = set()  # plans whose activations have arrived
        self.busy = False
        self.paused = False
        self._page_size = page_size
        self._pages: list[list[int | None]] = [[None] * page_size for _ in range(pages)]
        self._host: list[list[int | None]] = [[None] * page_size for _ in range(host_pages)]
        self.loading: set[int] = set()  # plans whose loads are not done
        self.cancelled: set[int] = set()
        self.mailbox: list[StagedTicket] = []  # looked at between forwards
        self.returned: set[int] = set()  # staged fetches that all stages behind have answered
        self.read: dict[int, int] = {}  # staged fetches whose reads are done: pages
        self._slots: dict[int, _Slot] = {}
        self._digest = ZERO
        self._truth = truth

    def apply(self, plan: Plan) -> tuple[Sample, ...]:
        """Run one plan; the samples that the last stage would draw."""
        for opening in plan.openings:
            self._slots[opening.slot] = _Slot(opening.request_id)
        for remap in plan.remaps:
            self._slots[remap.slot].table[remap.index] = remap.page
        for piece in plan.pieces:
            slot = self._slots[piece.slot]
            slot.table.extend(piece.pages)
            slot.length = piece.start
        self._check_digest(plan)
        for piece in plan.pieces:
            self._write(piece)
        samples = []
        for piece in plan.pieces:
            self._read(plan, piece)
            if piece.sample:
                slot = self._slots[piece.slot]
                token = self._truth.token_after(slot.request_id, slot.length - 1)
                samples.append(Sample(piece.slot, token, TokenLogprobs(-1.0)))
        return tuple(samples)

    def load(self, copy: Copy) -> None:
        self._pages[copy.device] = list(self._host[copy.host])

    def save(self, copy: Copy) -> None:
        self._host[copy.host] = list(self._pages[copy.device])

    def put(self, store: FakeStore, page: PageKey) -> None:
        store.objects[page.hash, self.rank] = list(self._host[page.host])

    def fetch(self, store: FakeStore, page: PageKey) -> bool:
        held = store.objects.get((page.hash, self.rank))
        if held is not None:
            self._host[page.host] = list(held)
        return held is not None

    def _write(self, piece: Piece) -> None:
        slot = self._slots[piece.slot]
        slot.length = piece.start + len(unpack_tokens(piece.tokens))
        for position in range(max(piece.start, piece.write_from), slot.length):
            page = slot.table[position // self._page_size]
            self._pages[page][position % self._page_size] = self._truth.stamp(slot.request_id, position)

    def _read(self, plan: Plan, piece: Piece) -> None:
        slot = self._slots[piece.slot]
        for position in range(slot.length):
            page = slot.table[position // self._page_size]
            held = self._pages[page][position % self._page_size]
            if held != self._truth.stamp(slot.request_id, position):
                raise ContentError(
                    f"plan {plan.number}, rank {self.rank}: page {page} does not hold position {position} of {slot.request_id}"
                )

    def _check_digest(self, plan: Plan) -> None:
        digest = PlanDigest(self._digest, plan.number)
        for remap in plan.remaps:
            digest.remap(remap.slot, remap.index, self._slots[remap.slot].table[remap.index])
        for piece in plan.pieces:
            table = self._slots[piece.slot].table
            appended = table[len(table) - len(piece.pages) :]
            digest.piece(piece.slot, piece.start, piece.tokens, appended, len(table), piece.write_from, piece.sample)
        self._digest = digest.value
        assert self._digest == plan.digest, f"rank {self.rank}: digests first differ at plan {plan.number}"


class FakeGrid:
    """All ranks of one epoch. ``tell``: delivers a message to the planner, in order per rank."""

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
        tell: Callable[[Acknowledgement], None],
    ) -> None:
        """``shape``: (pp, tp). ``pages``: (device pages, host pages, tokens of one)."""
        self.epoch = epoch
        self._pp, self._tp = shape
        self._heap, self._random, self._timing, self._tell, self._store = heap, randomness, timing, tell, store
        count = self._pp * self._tp
        self.ranks = [FakeRank(rank, pages[2], pages[0], pages[1], truth) for rank in range(count)]
        self._plans = [Channel(heap) for _ in range(count)]
        self._acks = [Channel(heap) for _ in range(count)]
        self._copy_acks = [Channel(heap) for _ in range(count)]
        self._copy_engines = [Channel(heap) for _ in range(count)]
        self._orders = [Channel(heap) for _ in range(count)]
        self._store_engines = [Channel(heap) for _ in range(count)]
        self.dead = False

    def send(self, plan: Plan) -> None:
        for rank, channel in zip(self.ranks, self._plans, strict=True):
            channel.send(self._delay(), lambda rank=rank: self._receive(rank, plan))  # type: ignore[misc]

    def order(self, order: Order) -> None:
        """On the ticket channel: taken by the rank's I/O side, whatever its compute loop does."""
        for rank, channel in zip(self.ranks, self._orders, strict=True):
            if isinstance(order, StagedTicket | StagedReturn) and rank.rank // self._tp != order.stage:
                continue
            channel.send(self._delay(), lambda rank=rank: self._take_order(rank, order))  # type: ignore[misc]

    def pause(self, rank: int) -> None:
        """The rank finishes what it runs and then never does anything again."""
        self.ranks[rank].paused = True

    def kill(self) -> None:
        """Nothing runs any more; acknowledgements on their way still arrive."""
        self.dead = True

    def _delay(self) -> float:
        return self._random.uniform(self._timing.delay_low, self._timing.delay_high)

    def _receive(self, rank: FakeRank, plan: Plan) -> None:
        """Loads may run at once, while earlier plans still compute."""
        rank.inbox.append(plan)
        if plan.loads:
            rank.loading.add(plan.number)
            for copy in plan.loads:
                self._heap.after(self._delay(), lambda copy=copy: rank.load(copy))  # type: ignore[misc]
            self._heap.after(self._timing.delay_high, lambda: self._loaded(rank, plan.number))
        self._try_run(rank)

    def _loaded(self, rank: FakeRank, number: int) -> None:
        rank.loading.discard(number)
        self._try_run(rank)

    def _back_up(self, rank: FakeRank, backup: Backup) -> None:
        """One page after another on the rank's copy engine, then the acknowledgement; some pages may fail, with all behind them."""
        saved = len(backup.copies)
        if self._random.random() < self._timing.backup_failures:
            saved = self._random.randrange(saved)
        engine = self._copy_engines[rank.rank]
        for copy in backup.copies[:saved]:
            engine.send(self._delay(), lambda copy=copy: rank.save(copy))  # type: ignore[misc]
        done = TransferDone(self.epoch, rank.rank, backup.transfer, saved)
        engine.send(self._delay(), lambda: self._copied(rank, done))

    def _take_order(self, rank: FakeRank, order: Order) -> None:
        if self.dead or rank.paused:
            return
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
                self._heap.after(self._delay(), lambda: self._fetch(rank, order, 0))
            case Store():
                stored = bytearray()
                for page in order.pages:
                    stored.append(self._random.random() >= self._timing.store_failures)
                    if stored[-1]:
                        put = lambda page=page: rank.put(self._store, page)  # noqa: E731
                        self._store_engines[rank.rank].send(self._delay(), put)
                done = StoreDone(self.epoch, rank.rank, order.transfer, bytes(stored))
                self._store_engines[rank.rank].send(self._delay(), lambda: self._say(rank, done))

    def _look(self, rank: FakeRank) -> None:
        """Between its forwards a rank takes what has come by the staged route, and answers what it may."""
        if self.dead or rank.busy or rank.paused:
            return
        taken, rank.mailbox = rank.mailbox, []
        for ticket in taken:
            self._say(rank, StagedTaken(self.epoch, rank.rank, ticket.transfer))
            self._fetch(rank, ticket, 0)
        is_last = rank.rank // self._tp == self._pp - 1
        for transfer, pages in tuple(rank.read.items()):
            if is_last or transfer in rank.returned or transfer in rank.cancelled:
                del rank.read[transfer]
                self._say(rank, FetchProgress(self.epoch, rank.rank, transfer, pages, True))

    def _end_fetch(self, rank: FakeRank, ticket: Ticket | StagedTicket, done: int) -> None:
        if isinstance(ticket, StagedTicket):
            rank.read[ticket.transfer] = done
            self._look(rank)
        else:
            self._say(rank, FetchProgress(self.epoch, rank.rank, ticket.transfer, done, True))

    def _fetch(self, rank: FakeRank, ticket: Ticket | StagedTicket, done: int) -> None:
        """One page after another; a Cancel begins no new read."""
        if self.dead or rank.paused:
            return
        if done == len(ticket.pages) or ticket.transfer in rank.cancelled:
            self._end_fetch(rank, ticket, done)
            return
        seconds = self._random.uniform(0, self._timing.fetch_high)
        self._heap.after(seconds, lambda: self._read(rank, ticket, done))

    def _read(self, rank: FakeRank, ticket: Ticket | StagedTicket, done: int) -> None:
        """A read that was under way writes its page, whatever has been cancelled meanwhile; a miss or a failure ends the ticket."""
        if self.dead or rank.paused:
            return
        fails = self._random.random() < self._timing.store_failures
        if fails or not rank.fetch(self._store, ticket.pages[done]):
            self._end_fetch(rank, ticket, done)
            return
        if done % 2 and isinstance(ticket, Ticket):  # acknowledged in batches of two
            self._say(rank, FetchProgress(self.epoch, rank.rank, ticket.transfer, done + 1, False))
        self._fetch(rank, ticket, done + 1)

    def _say(self, rank: FakeRank, message: Acknowledgement) -> None:
        if not self.dead and not rank.paused:
            self._copy_acks[rank.rank].send(self._delay(), lambda: self._tell(message))

    def _copied(self, rank: FakeRank, done: TransferDone) -> None:
        self._say(rank, done)

    def _try_run(self, rank: FakeRank) -> None:
        if self.dead or rank.busy or rank.paused or not rank.inbox or rank.inbox[0].number in rank.loading:
            return
        if rank.rank >= self._tp and rank.inbox[0].number not in rank.handed:
            return
        rank.busy = True
        plan = rank.inbox.pop(0)
        seconds = self._random.uniform(self._timing.forward_low, self._timing.forward_high)
        self._heap.after(seconds, lambda: self._finish(rank, plan))

    def _finish(self, rank: FakeRank, plan: Plan) -> None:
        if self.dead:
            return
        rank.busy = False
        samples = rank.apply(plan)
        rank.handed.discard(plan.number)
        following = rank.rank + self._tp
        if following < len(self.ranks):
            self._heap.after(self._delay(), lambda: self._hand_over(self.ranks[following], plan.number))
        is_sampler = rank.rank == (self._pp - 1) * self._tp
        done = PlanDone(self.epoch, rank.rank, plan.number, samples if is_sampler else (), 0.0)
        self._acks[rank.rank].send(self._delay(), lambda: self._tell(done))
        if plan.backup is not None:
            self._back_up(rank, plan.backup)
        self._look(rank)
        self._try_run(rank)

    def _hand_over(self, rank: FakeRank, number: int) -> None:
        rank.handed.add(number)
        self._try_run(rank)
