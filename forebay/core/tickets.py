"""FETCH by ticket: a stored prefix comes to every rank's host pages while its request still waits.

    ask --QUERY--> [answer in time?] --hit worth it, host pages to be had--> FETCHING --all final--------.
     |                  |                                                     |                          v
     |                  '--miss, late, too short, slower than computing-------|----> admit at once     READY
     '--the next page is being fetched for another: join its ticket           '--policy says enough: Cancel; safe pages--'

A request that is asking or fetching is passed over by admission; it never holds up others. ``safe`` is the MIN over ranks of what each
has in its own pages, from the front without a hole. Settled pages join the tree as host pages and stay pinned for the request until it
is admitted. Pages beyond ``safe`` belong to the transfer until every rank has said its final word (rule R11). If the page that a
ticket hangs on has gone by then, its pages are let go and its request asks once more (`FetchLedger` counts what became of each page).

On the staged route (`core.staged`), the baseline, nobody asks ahead: host pages are taken for all that is missing, each stage asks for
itself, and what a fetch that is cut short has brought, and what the store had, is known only with the final words.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from forebay.core.ledger import FetchLedger
from forebay.core.messages import Cancel, FetchProgress, PageKey, ProtocolError, StagedTaken, Ticket
from forebay.core.page_cache import PageCache
from forebay.core.request import Phase, Request, RequestState
from forebay.core.spans import SpanKind, TimedSpan
from forebay.core.staged import StagedOrder, Walk
from forebay.core.tree import NONE, Tier

QUERY_S = 0.1
TICKETS_AT_ONCE = 2  # that a rank reads at the same time: a long one must not hold up a short one (field report P14)
FORGET_S = 1.0  # an answer that is later than that is not waited for
HOLD_SHARE = 0.8
MAX_RETRIES = 8
RETRY_STEPS = 8
REFUSALS_PER_TRY = 32
SMOOTHING = 0.2


class FetchPolicy(StrEnum):
    """How long a request waits for its ticket: to the end, not at all once it could run, or for a time that grows with the hit."""

    WAIT = "wait"
    BEST_EFFORT = "best-effort"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Query:
    """Effect: ask the store how many leading ``hashes`` it has all parts of, within `QUERY_S`, and answer with `QueryDone`.

    ``group``: the hash of the prefix's first page, under which they were stored.
    """

    number: int
    hashes: tuple[bytes, ...]
    group: bytes = b""


@dataclass(frozen=True, slots=True)
class QueryDone:
    number: int
    pages: int


@dataclass(frozen=True, slots=True)
class Hint:
    """Effect: these pages of ``group`` will be read from the store, but not at once: it may bring them nearer. Nobody waits for it."""

    hashes: tuple[bytes, ...]
    group: bytes


class _Query(NamedTuple):
    request: Request
    due: float
    hashes: tuple[bytes, ...]


class _Refusal(NamedTuple):
    """Pages that were not fetched although they are stored; their request may ask again at ``step``."""

    why: str
    hashes: Sequence[bytes]
    step: int


class _Unheard(NamedTuple):
    """A query whose request waits no more; its answer, until ``forget_at``, says how many ``pages`` of those asked for were stored."""

    why: str
    pages: int
    forget_at: float


@dataclass(slots=True)
class _Flight:
    """A ticket under way. ``anchor``: the page before its first, None at the root. ``walk``: on the staged route alone.

    ``found``: leading pages that the store has. ``deadline``: infinite until the first byte is asked for (``begun``). ``counted``: the
    ledger knows what became of all pages; ``why``: what becomes of those that do not come.
    """

    hashes: list[bytes]
    pages: list[int]
    anchor: bytes | None
    users: list[Request]
    progress: list[int]
    running: set[int]  # ranks that have not said their final word
    issued_at: float
    walk: Walk | None
    asker: int  # the number of the request that it was issued for
    found: int
    deadline: float = math.inf
    begun: bool = False
    cancelled: bool = False
    settled: int = 0
    counted: bool = False
    why: str = "failed"

    @property
    def safe(self) -> int:
        return min(self.progress)


@dataclass(slots=True)
class Orders:
    """What one step has to tell ranks and store."""

    queries: list[Query] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    tickets: list[Ticket | Cancel | StagedOrder] = field(default_factory=list)


class TicketDesk:
    """All queries and tickets of one replica."""

    def __init__(
        self,
        page_size: int,
        shape: tuple[int, int],
        policy: FetchPolicy,
        threshold_tokens: int,
        ledger: FetchLedger,
        staged: bool = False,
    ) -> None:
        """``shape``: (pp, tp). ``ledger``: where pages that were asked for are counted. ``staged``: fetch stage by stage."""
        self._page_size = page_size
        self._shape = shape
        self._ranks = shape[0] * shape[1]
        self._staged = staged
        self._policy = policy
        self._threshold = threshold_tokens
        self._ledger = ledger
        self._queries: dict[int, _Query] = {}
        self._unheard: dict[int, _Unheard] = {}
        self._flights: dict[int, _Flight] = {}
        self._fetching: dict[bytes, int] = {}
        self._retries: dict[str, _Refusal] = {}  # by request id
        self._number = 0
        self._step = 0
        self._s_per_page = 0.0  # 0: not measured yet
        self._refusals = 0
        self.epoch = 0
        self.grid_is_busy = (
            False  # a plan is in flight: who looks between forwards does not look now
        )
        self.orders = Orders()
        self.spans: list[TimedSpan] = []  # since the last step
        self.outcomes: Counter[str] = Counter()

    @property
    def held_pages(self) -> list[int]:
        """Host pages that tickets own, for the invariants."""
        return [
            page for flight in self._flights.values() for page in flight.pages[flight.settled :]
        ]

    @property
    def pages_under_way(self) -> int:
        """Pages counted as wanted of which nobody knows yet what they will come to, for the invariants."""
        fetching = sum(
            [
                len(flight.pages) - flight.settled
                for flight in self._flights.values()
                if not flight.counted
            ]
        )
        return fetching + sum([len(refusal.hashes) for refusal in self._retries.values()])

    @property
    def is_idle(self) -> bool:
        return not self._queries and not self._flights

    @property
    def will_retry(self) -> bool:
        """Some request asks again in a few steps."""
        return bool(self._retries)

    def take_orders(self) -> Orders:
        orders, self.orders = self.orders, Orders()
        return orders

    def next_deadline(self) -> float | None:
        times = [
            due if request.phase is Phase.ASKING else due + FORGET_S
            for request, due, _ in self._queries.values()
        ]
        times += [flight.deadline for flight in self._flights.values() if not flight.cancelled]
        return min(times, default=None)

    # ------------------------------------------------------------------------------------------ asking

    def ask(self, request: Request, cache: PageCache, now: float) -> bool:
        """Look for what the tree has not; called once when the request starts to wait, and again for bounded retries.

        False if there is nothing to ask for, or no asking any more.
        """
        missing = self._missing(request, cache)
        if not self._worth(missing):
            request.phase = Phase.SETTLED
            return False
        flight = self._flights.get(self._fetching.get(missing[0], -1))
        if flight is not None and not flight.cancelled:
            flight.users.append(request)
            request.phase = Phase.FETCHING
            self.outcomes["joined"] += 1
            return True
        if request.fetched:  # one ticket per request: never asked twice
            request.phase = Phase.SETTLED
            return False
        if self._staged:
            request.phase = Phase.SETTLED  # unless it gets host pages
            self._issue(request, missing, cache, now)
            return True
        self._number += 1
        self._queries[self._number] = _Query(request, now + QUERY_S, tuple(missing))
        self.orders.queries.append(Query(self._number, tuple(missing), request.hashes[0]))
        request.phase = Phase.ASKING
        return True

    def answered(
        self, done: QueryDone, cache: PageCache, now: float, compute_s: float, pending: bool
    ) -> None:
        """The store's answer, folded over all ranks by the store itself. ``pending``: what it misses may just be on its way there.

        ``compute_s``: what computing a page would take.
        """
        unheard = self._unheard.pop(done.number, None)
        if unheard is not None:
            self._ledger.refuse(unheard.why, min(done.pages, unheard.pages))
        query = self._queries.pop(done.number, None)
        if query is None:
            return
        request, due, asked = query
        stored = asked[: done.pages]
        if request.state is not RequestState.WAITING:
            self._ledger.refuse("query_late", len(stored))
            return
        self.spans.append(
            TimedSpan(
                SpanKind.QUERY, due - QUERY_S, now, done.number, done.pages, request=request.number
            )
        )
        request.phase = Phase.SETTLED
        missing = self._missing(request, cache)
        if stored and missing and missing[0] != stored[0] and stored[0] in missing:
            self._lost_anchor(request, len(stored), cache, now)
            return
        missing = [hash for hash in stored if cache.tree.get(hash) is None]
        if not self._worth(missing):
            self.outcomes["miss"] += 1
            self._refuse(request, "below_threshold", missing, again=pending)
        elif not self._pays(len(missing), compute_s):
            self.outcomes["slower_than_compute"] += 1
            self._refuse(request, "slower_than_compute", missing, again=False)
        else:
            self._issue(request, missing, cache, now)

    def _lost_anchor(self, request: Request, pages: int, cache: PageCache, now: float) -> None:
        """The tree is shorter than when ``request`` asked, so the ``pages`` that were found hang on nothing: it asks once more."""
        if request.asked_again:
            self._ledger.refuse("anchor_lost", pages)
            return
        request.asked_again = True
        self.ask(request, cache, now)

    def _missing(self, request: Request, cache: PageCache) -> list[bytes]:
        hashes = request.extend_hashes()
        return hashes[len(cache.tree.match(hashes)) :]

    def _worth(self, pages: Sequence[object]) -> bool:
        return bool(pages) and len(pages) * self._page_size >= self._threshold

    def _pays(self, pages: int, compute_s: float) -> bool:
        """Unmeasured = fetch; estimates decay as 1 refusal in 32 is tried all the same."""
        if not self._s_per_page or self._s_per_page <= compute_s:
            return True
        self._refusals += 1
        return self._refusals % REFUSALS_PER_TRY == 0

    def _issue(self, request: Request, missing: list[bytes], cache: PageCache, now: float) -> None:
        """Take host pages for exactly the agreed hit, fewer if there are not as many, and send the ticket."""
        room = int(HOLD_SHARE * cache.host.capacity) - len(self.held_pages)
        pages: list[int] = []
        while len(pages) < min(len(missing), room):
            page = cache.allocate_host()
            if page is None:
                break
            pages.append(page)
        if not self._worth(pages):
            for page in pages:
                cache.free_host(page)
            self.outcomes["no_host_pages"] += 1
            self.orders.hints.append(Hint(tuple(missing), request.hashes[0]))
            self._refuse(request, "no_host_pages", missing, again=True)
            return
        self._ledger.refuse("no_host_pages", len(missing) - len(pages))
        self._ledger.wanted += len(pages)
        hashes = missing[: len(pages)]
        first = request.hashes.index(hashes[0])
        self._number += 1
        group = request.hashes[0]
        keys = tuple(PageKey(page, hash, group) for page, hash in zip(pages, hashes, strict=True))
        if len(self._flights) >= TICKETS_AT_ONCE or (self._staged and self.grid_is_busy):
            self.orders.hints.append(Hint(tuple(hashes), group))
        walk = Walk(self.epoch, self._number, keys, *self._shape) if self._staged else None
        self.orders.tickets.append(
            Ticket(self.epoch, self._number, keys) if walk is None else walk.advance()
        )
        flight = _Flight(
            hashes=hashes,
            pages=pages,
            anchor=request.hashes[first - 1] if first else None,
            users=[request],
            progress=[0] * self._ranks,
            running=set(range(self._ranks)),
            issued_at=now,
            walk=walk,
            asker=request.number,
            found=len(pages),
        )
        self._flights[self._number] = flight
        self._fetching |= dict.fromkeys(hashes, self._number)
        request.phase = Phase.FETCHING
        request.fetched = True
        self.outcomes["issued"] += 1
        self._start_clocks(now)

    def _start_clocks(self, now: float) -> None:
        """A rank asks for the first byte of a ticket when it reads fewer than `TICKETS_AT_ONCE` that came before it.

        By the staged route it is when the first rank takes it (`taken`).
        """
        if self._staged or self._policy is not FetchPolicy.TIMEOUT:
            return
        reading = [0] * self._ranks
        for flight in self._flights.values():
            if any([reading[rank] < TICKETS_AT_ONCE for rank in flight.running]):
                self._begin(flight, now)
            for rank in flight.running:
                reading[rank] += 1

    def _begin(self, flight: _Flight, now: float) -> None:
        if not flight.begun:
            flight.begun = True
            flight.deadline = now + self._patience(len(flight.pages))

    def _patience(self, pages: int) -> float:
        if self._policy is FetchPolicy.TIMEOUT:
            return min(2.0 + 0.1 * pages * self._page_size / 1024, 30.0)
        return float("inf")

    def _refuse(self, request: Request, why: str, hashes: Sequence[bytes], again: bool) -> None:
        """Stored pages that are not fetched now; what they come to is known once the request asks ``again`` or waits no more."""
        if again and request.retries < MAX_RETRIES:
            request.retries += 1
            self._ledger.wanted += len(hashes)
            self._retries[request.request_id] = _Refusal(why, hashes, self._step + RETRY_STEPS)
        else:
            self._ledger.refuse(why, len(hashes))

    def _retry(self, request: Request, refusal: _Refusal, cache: PageCache, now: float) -> None:
        """What was refused is wanted anew, unless there is no asking any more."""
        self._ledger.wanted -= len(refusal.hashes)
        if not self.ask(request, cache, now):
            self._ledger.refuse(
                refusal.why, len([hash for hash in refusal.hashes if cache.tree.get(hash) is None])
            )

    # ------------------------------------------------------------------------------------------ each step

    def tick(self, requests: dict[str, Request], cache: PageCache, now: float) -> None:
        """Late queries are misses, late tickets are cut short, and requests whose turn it is ask again."""
        self._step += 1
        for number, (request, due, asked) in tuple(self._queries.items()):
            if now >= due and request.phase is Phase.ASKING:
                request.phase = (
                    Phase.SETTLED
                )  # a late hit may still issue a ticket while the request waits
                self.outcomes["query_late"] += 1
            if now >= due + FORGET_S:
                del self._queries[number]
                self._ledger.refuse("query_late", len(asked))
        for number, unheard in tuple(self._unheard.items()):
            if now >= unheard.forget_at:
                del self._unheard[number]
                self._ledger.refuse(unheard.why, unheard.pages)
        for number, flight in tuple(self._flights.items()):
            if not flight.cancelled and now >= flight.deadline:
                self._cut_short(number, flight, cache, "timeout")
        for request_id, refusal in tuple(self._retries.items()):
            waiting = requests.get(request_id)
            if waiting is None or waiting.state is not RequestState.WAITING:
                self._give_up_retry(request_id)
            elif self._step >= refusal.step and waiting.phase is Phase.SETTLED:
                del self._retries[request_id]
                self._retry(waiting, refusal, cache, now)

    def waits(self, request: Request) -> bool:
        """Whether it asks or fetches, so that admission passes it over."""
        return request.phase in (Phase.ASKING, Phase.FETCHING)

    def waits_at_best(self, request: Request) -> bool:
        """Whether it fetches only as long as it could not run anyway; `leave` ends that."""
        return self._policy is FetchPolicy.BEST_EFFORT and request.phase is Phase.FETCHING

    def leave(self, request: Request, cache: PageCache) -> None:
        """Wait no longer: what is safe by now may be used."""
        for number, flight in tuple(self._flights.items()):
            if request in flight.users:
                self._leave(number, flight, request, cache)

    def progressed(self, ack: FetchProgress, cache: PageCache, now: float) -> None:
        """Fold one rank's acknowledgement. Raises ``ProtocolError``."""
        flight = self._flights.get(ack.transfer)
        if (
            flight is None
            or ack.rank not in flight.running
            or not flight.progress[ack.rank] <= ack.pages <= len(flight.pages)
        ):
            raise ProtocolError(
                f"rank {ack.rank} acknowledged {ack.pages} pages of ticket {ack.transfer}, which it was not asked for"
            )
        flight.progress[ack.rank] = ack.pages
        if ack.found is not None:
            flight.found = min(flight.found, max(ack.found, ack.pages))
        if ack.final:
            flight.running.discard(ack.rank)
            if flight.walk is not None and not flight.cancelled:
                self._order(flight.walk.answered(ack.rank, flight.running))
        if not flight.running:
            self._close(ack.transfer, flight, cache, now)
        if ack.final:
            self._start_clocks(now)

    def taken(self, ack: StagedTaken, now: float) -> None:
        """A rank has come to a staged ticket. Raises ``ProtocolError``."""
        flight = self._flights.get(ack.transfer)
        if flight is None or flight.walk is None or not flight.walk.expects(ack.rank):
            raise ProtocolError(
                f"rank {ack.rank} took staged ticket {ack.transfer}, which it was not given"
            )
        self._begin(flight, now)
        if not flight.cancelled:
            self._order(flight.walk.taken(ack.rank))

    def _order(self, order: StagedOrder | None) -> None:
        if order is not None:
            self.orders.tickets.append(order)

    def drop(self, request: Request, cache: PageCache | None) -> None:
        """The request ends, wherever it is: it waits for nothing any more, and what was kept for it is let go."""
        self._give_up_retry(request.request_id)
        for number, query in tuple(self._queries.items()):
            if query.request is request:
                self._stop_hearing(
                    number, "query_late" if request.phase is Phase.SETTLED else "aborted"
                )
        if cache is None:
            return
        for number, flight in tuple(self._flights.items()):
            if request in flight.users:
                flight.users.remove(request)
                if not flight.users:
                    flight.why = "aborted"
                    if flight.walk is None:
                        self._count_pages(flight)
                    self._cancel(number, flight)
                    self.outcomes["aborted"] += 1
        release_ready(request, cache)

    def clear(self) -> None:
        """The grid is lost: host pages are forgotten, and nothing of the old epoch will be heard but what the store answers."""
        for number in tuple(self._queries):
            self._stop_hearing(number, "grid_lost")
        for flight in self._flights.values():
            flight.why = "grid_lost"
            self._count_pages(flight)
        for request_id in tuple(self._retries):
            self._give_up_retry(request_id)
        self._ledger.lose("grid_lost", self._ledger.brought)
        self._flights.clear()
        self._fetching.clear()
        self.orders = Orders()

    def _stop_hearing(self, number: int, why: str) -> None:
        """Nobody waits for the answer to this query, but for how many pages it is about."""
        query = self._queries.pop(number)
        self._unheard[number] = _Unheard(why, len(query.hashes), query.due + FORGET_S)

    def _give_up_retry(self, request_id: str) -> None:
        refusal = self._retries.pop(request_id, None)
        if refusal is not None:
            self._ledger.leave(refusal.why, len(refusal.hashes))

    # ------------------------------------------------------------------------------------------ endings

    def _close(self, number: int, flight: _Flight, cache: PageCache, now: float) -> None:
        """All ranks have said their final word."""
        del self._flights[number]
        lost = 0
        if flight.walk is not None or not flight.cancelled:
            lost = self._settle(flight, flight.safe, cache)
        if not flight.cancelled:
            self._measure(flight, now)
            self._count(flight)
        self._count_pages(flight, lost)
        self.spans.append(
            TimedSpan(
                SpanKind.TICKET, flight.issued_at, now, number, flight.safe, request=flight.asker
            )
        )
        self._forget_hashes(number, flight)
        for page in flight.pages[flight.settled :]:
            cache.free_host(page)
        self._wake(flight, cache, now, ask_again=bool(lost) and not flight.cancelled)

    def _count_pages(self, flight: _Flight, lost: int = 0) -> None:
        """Pages that are not in the tree come to nothing, once: ``lost`` of them since they hang on nothing, the rest did not come."""
        if flight.counted:
            return
        flight.counted = True
        found = len(flight.pages) if flight.walk is None else max(flight.found, flight.safe)
        self._ledger.wanted -= len(flight.pages) - found
        self._ledger.leave("anchor_lost", lost)
        self._ledger.leave(flight.why, found - flight.settled - lost)

    def _count(self, flight: _Flight) -> None:
        """How a ticket ended that nobody cut short. On the staged route it may have been a miss all along."""
        if flight.walk is not None and not flight.safe:
            self.outcomes["miss"] += 1
            return
        self.outcomes["complete" if flight.safe == len(flight.pages) else "short"] += 1

    def _cut_short(self, number: int, flight: _Flight, cache: PageCache, why: str) -> None:
        """The policy says enough: what is safe now may be used now; the rest stays the transfer's until all final words."""
        flight.why = why
        self.outcomes[why] += 1
        if flight.walk is not None:
            self._cancel(number, flight)
            return
        self._count_pages(flight, self._settle(flight, flight.safe, cache))
        self._cancel(number, flight)
        users, flight.users = flight.users, []
        for user in users:
            user.phase = Phase.SETTLED

    def _leave(self, number: int, flight: _Flight, request: Request, cache: PageCache) -> None:
        """One user will not wait any longer; the last one to leave cuts the ticket short."""
        if flight.users == [request]:
            self._cut_short(number, flight, cache, "best_effort")
        else:
            self._settle(flight, flight.safe, cache)
            flight.users.remove(request)
            request.phase = Phase.SETTLED

    def _cancel(self, number: int, flight: _Flight) -> None:
        if not flight.cancelled:
            flight.cancelled = True
            self._forget_hashes(number, flight)
            if flight.walk is not None:
                flight.running.intersection_update(flight.walk.told)
            self.orders.tickets.append(Cancel(self.epoch, number))

    def _settle(self, flight: _Flight, safe: int, cache: PageCache) -> int:
        """Pages up to ``safe`` join the tree, pinned for every user; those that the tree has meanwhile are dropped as covered.

        Returns how many cannot, since the page that they hang on has gone.
        """
        parent = None if flight.anchor is None else cache.tree.get(flight.anchor)
        if flight.settled:
            parent = cache.tree.get(flight.hashes[flight.settled - 1])
        if parent is None and (flight.anchor is not None or flight.settled):
            return safe - flight.settled
        while flight.settled < safe:
            hash, page = flight.hashes[flight.settled], flight.pages[flight.settled]
            node = cache.place_fetched(hash, parent, page)
            for user in flight.users:
                if node.pages[Tier.HOST] != NONE:
                    cache.tree.pin(node, Tier.HOST)
                    user.ready.append(node)
            parent = node
            flight.settled += 1
        return 0

    def _wake(self, flight: _Flight, cache: PageCache, now: float, ask_again: bool) -> None:
        """Users may be admitted; one that had joined asks for what is beyond the ticket, its own only ticket.

        ``ask_again``: the tree is shorter than the ticket's anchor, so whose ticket it was asks once more, from where it ends now.
        """
        users, flight.users = flight.users, []
        for user in users:
            user.phase = Phase.SETTLED
            if ask_again and user.number == flight.asker and not user.asked_again:
                user.asked_again = True
                user.fetched = False
            if not user.fetched:
                self.ask(user, cache, now)

    def _measure(self, flight: _Flight, now: float) -> None:
        if flight.safe:
            seconds = (now - flight.issued_at) / flight.safe
            self._s_per_page += (seconds - self._s_per_page) * (
                SMOOTHING if self._s_per_page else 1.0
            )

    def _forget_hashes(self, number: int, flight: _Flight) -> None:
        for hash in flight.hashes:
            if self._fetching.get(hash) == number:
                del self._fetching[hash]


def release_ready(request: Request, cache: PageCache) -> None:
    """What a ticket has brought for this request is pinned no longer: it is admitted, or will never be."""
    cache.tree.unpin(request.ready, Tier.HOST)
    request.ready.clear()
