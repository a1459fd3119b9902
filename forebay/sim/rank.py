"""One fake rank: pages of stamps instead of K/V, and its own mirror of slots and page tables.

It applies plans in order and checks the digest from its mirror (rule R2). Every read of a position compares what the page holds with
what the token prefix demands, so a wrong, stale or unfinished page is caught at that read.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.core.digest import ZERO, PlanDigest
from forebay.core.messages import Copy, PageKey, Piece, Plan, Sample, StagedTicket, TokenLogprobs
from forebay.sim import model
from forebay.sim.fake_store import GARBAGE, FakeStore, Outcome
from forebay.sim.heap import Action

TAINT = -2  # a position whose numbers came to NaN: in a page it is no number that means anything


class ContentError(AssertionError):
    """A forward pass has read a page that does not hold what it should."""


class Truth:
    """What every request's tokens really are, kept by the history and not by the system under test."""

    def __init__(self) -> None:
        self._stamps: dict[str, list[int]] = {}
        self._seeds: dict[str, int] = {}
        self._taints: dict[str, tuple[int, int]] = {}

    def taint(self, request_id: str, position: int, rank: int) -> None:
        """From ``rank`` on the request's numbers at ``position`` come to NaN."""
        self._taints[request_id] = (position, rank)

    def taint_in(self, request_id: str, start: int, stop: int, rank: int) -> int | None:
        """The first position from ``start`` to ``stop`` that comes to NaN on ``rank``, if any."""
        position, first = self._taints.get(request_id, (-1, 0))
        return position if start <= position < stop and rank >= first else None

    def add(self, request_id: str, stamps: list[int], seed: int) -> None:
        """``stamps`` of prompt and all tokens that the request can ever emit."""
        self._stamps[request_id] = stamps
        self._seeds[request_id] = seed

    def stamps(self, request_id: str) -> list[int]:
        return self._stamps[request_id]

    def token_after(self, request_id: str, position: int) -> int:
        if position >= len(self._stamps[request_id]):
            raise ContentError(f"{request_id} goes on after its end, at position {position}")
        return model.next_token(self._stamps[request_id][position], self._seeds[request_id])


@dataclass
class _Slot:
    request_id: str
    stamps: list[int]
    table: list[int] = field(default_factory=list)
    length: int = 0


class FakeRank:
    """``stopped``: a process under SIGSTOP; what would happen to it waits in ``held``. ``dead``: nothing happens to it any more.
    ``silent``: it works and sends no heartbeats. ``slowness``: a factor on its forward passes.
    ``tainted``: pieces of the last plan whose numbers came to NaN here; as ranks do, it keeps other
    numbers in their place, which nobody can tell from sound ones."""

    def __init__(
        self, rank: int, page_size: int, pages: int, host_pages: int, truth: Truth
    ) -> None:
        self.rank = rank
        self.inbox: list[Plan] = []
        self.handed: set[int] = set()  # plans whose activations have arrived
        self.busy = False
        self.stopped = False
        self.dead = False
        self.silent = False
        self.slowness = 1.0
        self.held: list[Action] = []
        self.applied = -1  # the newest plan, -1: none yet
        self.loading: set[int] = set()  # plans whose loads are not done
        self.cancelled: set[int] = set()
        self.mailbox: list[StagedTicket] = []  # looked at between forwards
        self.returned: set[int] = set()  # staged fetches that all stages behind have answered
        self.read: dict[int, int] = {}  # staged fetches whose reads are done: pages
        self.found: dict[
            int, int
        ] = {}  # by staged fetch: leading pages that were there when it began
        self._page_size = page_size
        self._pages: list[list[int | None]] = [[None] * page_size for _ in range(pages)]
        self._host: list[list[int | None]] = [[None] * page_size for _ in range(host_pages)]
        self._slots: dict[int, _Slot] = {}
        self._digest = ZERO
        self._truth = truth
        self.tainted: tuple[int, ...] = ()

    def names(self, plan: Plan) -> list[str]:
        """Requests that the plan works on; it is the next to be applied."""
        opened = {opening.slot: opening.request_id for opening in plan.openings}
        return [
            opened.get(piece.slot) or self._slots[piece.slot].request_id for piece in plan.pieces
        ]

    def apply(self, plan: Plan) -> tuple[Sample, ...]:
        """Run one plan; the samples that the last stage would draw."""
        assert self.applied in (-1, plan.number - 1), (
            f"rank {self.rank}: plan {plan.number} after {self.applied}"
        )
        self.applied = plan.number
        for opening in plan.openings:
            self._slots[opening.slot] = _Slot(
                opening.request_id, self._truth.stamps(opening.request_id)
            )
        for remap in plan.remaps:
            self._slots[remap.slot].table[remap.index] = remap.page
        for piece in plan.pieces:
            slot = self._slots[piece.slot]
            slot.table.extend(piece.pages)
            slot.length = piece.start + len(piece.tokens) // 4
        self._check_digest(plan)
        for piece in plan.pieces:
            self._write(piece)
        samples, tainted = [], []
        for index, piece in enumerate(plan.pieces):
            slot = self._slots[piece.slot]
            first = None if self._read(plan, piece) else piece.start
            own = self._truth.taint_in(slot.request_id, piece.start, slot.length, self.rank)
            if own is not None:
                tainted.append(index)
                first = own if first is None else first
            if first is not None:
                self._spoil(piece, first)
            if piece.sample:
                token = self._truth.token_after(slot.request_id, slot.length - 1)
                wrong = (token + 1) % model.VOCABULARY
                drawn = token if first is None else wrong
                samples.append(Sample(piece.slot, drawn, TokenLogprobs(-1.0)))
        self.tainted = tuple(tainted)
        return tuple(samples)

    # ------------------------------------------------------------------------------------------ copies

    def load(self, copy: Copy) -> None:
        self._pages[copy.device] = list(self._host[copy.host])

    def save(self, copy: Copy) -> None:
        self._host[copy.host] = list(self._pages[copy.device])

    def put(self, store: FakeStore, page: PageKey) -> None:
        if TAINT in self._host[page.host]:
            raise ContentError(f"rank {self.rank} stores host page {page.host}, which is tainted")
        store.put(page.hash, self.rank, self._host[page.host])

    def match(self, store: FakeStore, pages: Sequence[PageKey]) -> int:
        """Leading ``pages`` of which this rank's part is there."""
        there = itertools.takewhile(lambda page: store.get(page.hash, self.rank) is not None, pages)
        return len(tuple(there))

    def fetch(self, store: FakeStore, page: PageKey, outcome: Outcome) -> bool:
        """One read into a host page; False if what is there now must not be used."""
        key, held = page.hash, store.get(page.hash, self.rank)
        if held is None or outcome in (Outcome.ERROR, Outcome.HANG, Outcome.MISS):
            return False
        if outcome is Outcome.OTHER:
            key, held = store.get_other(page.hash, self.rank) or (key, held)
        if outcome is Outcome.CORRUPT:
            self._host[page.host] = [GARBAGE] * self._page_size
        elif outcome is Outcome.SHORT:
            half = self._page_size // 2
            self._host[page.host] = held[:half] + [GARBAGE] * (self._page_size - half)
        else:
            self._host[page.host] = list(held)
        return outcome not in (Outcome.CORRUPT, Outcome.SHORT) and self._is_asked_for(key, page)

    @staticmethod
    def _is_asked_for(key: bytes, page: PageKey) -> bool:
        """What is stored names its key, as sound bytes may be another page's."""
        return key == page.hash

    # ------------------------------------------------------------------------------------------ the forward pass

    def _write(self, piece: Piece) -> None:
        slot, size = self._slots[piece.slot], self._page_size
        position = max(piece.start, piece.write_from)
        while position < slot.length:
            index, first = divmod(position, size)
            end = min(slot.length, (index + 1) * size)
            self._pages[slot.table[index]][first : first + end - position] = slot.stamps[
                position:end
            ]
            position = end

    def _spoil(self, piece: Piece, first: int) -> None:
        """What the piece has written from position ``first`` on means nothing."""
        slot, size = self._slots[piece.slot], self._page_size
        for position in range(max(first, piece.write_from), slot.length):
            self._pages[slot.table[position // size]][position % size] = TAINT

    def _read(self, plan: Plan, piece: Piece) -> bool:
        """False if it has read what is tainted, and so is what comes of it."""
        is_sound = True
        slot, size, pages = self._slots[piece.slot], self._page_size, self._pages
        stamps, table, length = slot.stamps, slot.table, slot.length
        for index in range(length // size):
            if pages[table[index]] != stamps[index * size : (index + 1) * size]:
                self._check_tainted(plan, slot, index, size)
                is_sound = False
        rest = length % size
        if rest and pages[table[length // size]][:rest] != stamps[length - rest : length]:
            self._check_tainted(plan, slot, length // size, rest)
            is_sound = False
        return is_sound

    def _check_tainted(self, plan: Plan, slot: _Slot, index: int, count: int) -> None:
        """Of a page that is not as it should be: anything else than taint in it is an error."""
        page, first = self._pages[slot.table[index]], index * self._page_size
        for held, right in zip(page[:count], slot.stamps[first : first + count], strict=True):
            if held not in (right, TAINT):
                self._complain(plan, slot, index)

    def _complain(self, plan: Plan, slot: _Slot, index: int) -> None:
        raise ContentError(
            f"plan {plan.number}, rank {self.rank}: page {slot.table[index]} does not hold positions from {index * self._page_size} "
            f"of {slot.request_id}"
        )

    def _check_digest(self, plan: Plan) -> None:
        digest = PlanDigest(self._digest, plan.number)
        for remap in plan.remaps:
            digest.remap(remap.slot, remap.index, self._slots[remap.slot].table[remap.index])
        for piece in plan.pieces:
            table = self._slots[piece.slot].table
            appended = table[len(table) - len(piece.pages) :]
            digest.piece(
                piece.slot,
                piece.start,
                piece.tokens,
                appended,
                len(table),
                piece.write_from,
                piece.sample,
            )
        self._digest = digest.value
        assert self._digest == plan.digest, (
            f"rank {self.rank}: digests first differ at plan {plan.number}"
        )
