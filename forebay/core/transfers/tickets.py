"""Stored prefixes of waiting requests: what the store has is fetched while its request waits.

    ask --QUERY--> [answer in time?] --worth it, host pages to be had--> FETCHING --all final-----.
     |                  |                                                   |                     v
     |                  '--miss, late, too short, slower than computing-----|--> admit at once  READY
     '--the next page is being fetched for another: join its fetch          '--policy says enough--'

A request that is asking or fetching is passed over by admission; it never holds up others. If the
page that its ticket hangs on has gone by the end, the request asks once more. On a route that does
not ask ahead (`StagedRoute`) host pages are taken for all that is missing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from forebay.core.ledger import FetchLedger
from forebay.core.lifecycle import Cause, Phase, move
from forebay.core.messages import FetchProgress, PageKey, StagedTaken
from forebay.core.page_cache import PageCache
from forebay.core.request import Request
from forebay.core.spans import SpanKind, TimedSpan
from forebay.core.transfers.fetch import Fetch, Fetches
from forebay.core.transfers.lookup import Hint, Lookup, Query, QueryDone
from forebay.core.transfers.policy import FetchPolicy, FetchRules
from forebay.core.transfers.routes import FetchOrder, FetchTarget, Route
from forebay.core.transfers.transfer import Leading
from forebay.core.tree import Tier


class Tickets:
    """All queries and tickets of one replica."""

    def __init__(
        self, rules: FetchRules, shape: tuple[int, int], route: type[Route], ledger: FetchLedger
    ) -> None:
        """``shape``: (pp, tp). ``route``: of every fetch. ``ledger``: what became of pages."""
        self.outcomes: Counter[str] = Counter()
        self.spans: list[TimedSpan] = []  # since the last step
        self._rules = rules
        self._shape = shape
        self._route = route
        self._ledger = ledger
        self._lookup = Lookup(ledger)
        self._fetches = Fetches(ledger, rules, self.outcomes)
        self._hints: list[Hint] = []
        self._number = 0  # queries and tickets are numbered together
        self._epoch = 0
        self._grid_is_busy = False  # at the last tick a plan was in flight

    @property
    def held_pages(self) -> list[int]:
        """Host pages that tickets own, for the invariants."""
        return self._fetches.held_pages

    @property
    def pages_under_way(self) -> int:
        """Pages counted as wanted of which nobody knows yet what they will come to."""
        return self._fetches.pages_under_way + self._lookup.pages_under_way

    @property
    def is_idle(self) -> bool:
        return not self._lookup and not self._fetches

    @property
    def will_retry(self) -> bool:
        """Some request asks again in a few steps."""
        return self._lookup.will_retry

    def take_orders(self) -> tuple[list[Query], list[Hint], list[FetchOrder]]:
        """What one step has to tell store and ranks."""
        hints, self._hints = self._hints, []
        return self._lookup.take_queries(), hints, self._fetches.take_orders()

    def next_deadline(self) -> float | None:
        return min(self._lookup.deadlines + self._fetches.deadlines, default=None)

    def start_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    # -------------------------------------------------------------------------- asking

    def ask(self, request: Request, cache: PageCache, now: float) -> bool:
        """Look for what the tree has not; once when the request starts to wait, and for retries.

        False if there is nothing to ask for, or no asking any more.
        """
        missing = self._missing(request, cache)
        if self._rules.is_worth(missing):
            if self._fetches.join(request, missing[0]):
                move(request, Cause.FETCH)
                return True
            if not request.fetched:  # one ticket per request: never asked twice
                if self._route.asks_ahead:
                    self._lookup.ask(self._next_number(), request, tuple(missing), now)
                else:
                    move(request, Cause.NOTHING)  # unless it gets host pages
                    self._issue(request, missing, cache, now)
                return True
        move(request, Cause.NOTHING)
        return False

    def answered(
        self, done: QueryDone, cache: PageCache, now: float, compute_s: float, pending: bool
    ) -> None:
        """The store's answer, folded over all ranks by the store itself.

        ``compute_s``: what computing a page would take. ``pending``: what the store misses may
        just be on its way there.
        """
        answer = self._lookup.answered(done)
        if answer is None:
            return
        request, stored = answer.request, answer.stored
        self.spans.append(
            TimedSpan(
                SpanKind.QUERY,
                answer.asked_at,
                now,
                done.number,
                done.pages,
                request=request.number,
            )
        )
        missing = self._missing(request, cache)
        if stored and missing and missing[0] != stored[0] and stored[0] in missing:
            self._lost_anchor(request, len(stored), cache, now)
            return
        missing = [hash for hash in stored if cache.tree.get(hash) is None]
        if not self._rules.is_worth(missing):
            self.outcomes["miss"] += 1
            self._lookup.refuse(request, "below_threshold", missing, again=pending)
        elif not self._rules.pays(compute_s):
            self.outcomes["slower_than_compute"] += 1
            self._lookup.refuse(request, "slower_than_compute", missing, again=False)
        else:
            self._issue(request, missing, cache, now)

    def _lost_anchor(self, request: Request, pages: int, cache: PageCache, now: float) -> None:
        """The tree is shorter than when ``request`` asked: it asks once more.

        The ``pages`` that were found hang on nothing.
        """
        if request.asked_again:
            self._ledger.refuse("anchor_lost", pages)
            return
        request.asked_again = True
        self.ask(request, cache, now)

    def _missing(self, request: Request, cache: PageCache) -> list[bytes]:
        if request.scores:
            return []
        hashes = request.extend_hashes()
        return hashes[len(cache.tree.match(hashes)) :]

    def _issue(self, request: Request, missing: list[bytes], cache: PageCache, now: float) -> None:
        """Take host pages for exactly the agreed hit, fewer if there are not as many, and fetch."""
        pages = self._take_pages(len(missing), cache)
        group = request.hashes[0]
        if not self._rules.is_worth(pages):
            for page in pages:
                cache.free_host(page)
            self.outcomes["no_host_pages"] += 1
            self._hints.append(Hint(tuple(missing), group))
            self._lookup.refuse(request, "no_host_pages", missing, again=True)
            return
        self._ledger.refuse("no_host_pages", len(missing) - len(pages))
        hashes = missing[: len(pages)]
        if self._route.starts_late(len(self._fetches), self._grid_is_busy):
            self._hints.append(Hint(tuple(hashes), group))
        move(request, Cause.FETCH)
        request.fetched = True
        self._fetches.start(self._fetch(request, hashes, pages, now), request, now)

    def _take_pages(self, wanted: int, cache: PageCache) -> list[int]:
        room = self._rules.room(cache.host.capacity, len(self.held_pages))
        pages: list[int] = []
        while len(pages) < min(wanted, room):
            page = cache.allocate_host()
            if page is None:
                break
            pages.append(page)
        return pages

    def _fetch(self, request: Request, hashes: list[bytes], pages: list[int], now: float) -> Fetch:
        number, (pp, tp) = self._next_number(), self._shape
        first, group = request.hashes.index(hashes[0]), request.hashes[0]
        keys = tuple(PageKey(page, hash, group) for page, hash in zip(pages, hashes, strict=True))
        return Fetch(
            number=number,
            left=set(range(pp * tp)),
            fold=Leading(len(pages), pp * tp),
            epoch=self._epoch,
            hashes=hashes,
            pages=pages,
            anchor=request.hashes[first - 1] if first else None,
            route=self._route(FetchTarget(self._epoch, number, keys, pp, tp)),
            asker=request.number,
            issued_at=now,
            found=len(pages),
        )

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _retry(
        self,
        request: Request,
        why: str,
        hashes: Sequence[bytes],
        cache: PageCache,
        now: float,
    ) -> None:
        """What was refused is wanted anew, unless there is no asking any more."""
        if not self.ask(request, cache, now):
            left = [hash for hash in hashes if cache.tree.get(hash) is None]
            self._ledger.refuse(why, len(left))

    # -------------------------------------------------------------------------- each step

    def tick(
        self, requests: Mapping[str, Request], cache: PageCache, now: float, grid_is_busy: bool
    ) -> None:
        """Late queries are misses, late tickets are cut short, and some requests ask again."""
        self._grid_is_busy = grid_is_busy
        late = self._lookup.expire(now)
        if late:
            self.outcomes["query_late"] += late
        self._fetches.cut_late(cache, now)
        for request, refusal in self._lookup.due(requests):
            self._retry(request, refusal.why, refusal.hashes, cache, now)

    def waits(self, request: Request) -> bool:
        """Whether it asks or fetches, so that admission passes it over."""
        return request.phase in (Phase.ASKING, Phase.FETCHING)

    def waits_at_best(self, request: Request) -> bool:
        """Whether it fetches only as long as it could not run anyway; `leave` ends that."""
        best_effort = self._rules.policy is FetchPolicy.BEST_EFFORT
        return best_effort and request.phase is Phase.FETCHING

    def leave(self, request: Request, cache: PageCache) -> None:
        """Wait no longer: what is safe by now may be used."""
        self._fetches.leave(request, cache)

    def progressed(self, ack: FetchProgress, cache: PageCache, now: float) -> None:
        """Fold one rank's acknowledgement. Raises ``ProtocolError``."""
        ended = self._fetches.progressed(ack)
        if ended is not None:
            lost = self._fetches.end(ended, cache, now)
            self.spans.append(
                TimedSpan(
                    SpanKind.TICKET,
                    ended.issued_at,
                    now,
                    ended.number,
                    ended.safe,
                    request=ended.asker,
                )
            )
            self._wake(ended, cache, now, ask_again=bool(lost) and not ended.cancelled)
        if ack.final:
            self._fetches.start_clocks(now)

    def taken(self, ack: StagedTaken, now: float) -> None:
        """A rank has come to a staged ticket. Raises ``ProtocolError``."""
        self._fetches.taken(ack, now)

    def _wake(self, fetch: Fetch, cache: PageCache, now: float, ask_again: bool) -> None:
        """Users may be admitted; one that had joined asks for what is beyond, its own only ticket.

        ``ask_again``: the tree is shorter than the ticket's anchor, so whose ticket it was asks
        once more, from where the tree ends now.
        """
        users, fetch.users = fetch.users, []
        for user in users:
            move(user, Cause.FETCHED)
            if ask_again and user.number == fetch.asker and not user.asked_again:
                user.asked_again = True
                user.fetched = False
            if not user.fetched:
                self.ask(user, cache, now)

    # -------------------------------------------------------------------------- ends

    def drop(self, request: Request, cache: PageCache | None) -> None:
        """The request ends, wherever it is; what was kept for it is let go."""
        self._lookup.drop(request)
        if cache is not None:
            self._fetches.drop(request)
            release_ready(request, cache)

    def clear(self) -> None:
        """The grid is lost; nothing of its epoch will be heard but what the store answers."""
        self._lookup.clear()
        self._fetches.clear()
        self._hints.clear()
        self._ledger.lose("grid_lost", self._ledger.brought)


def release_ready(request: Request, cache: PageCache) -> None:
    """What was fetched for it is pinned no longer: it is admitted, or will never be."""
    cache.tree.unpin(request.ready, Tier.HOST)
    request.ready.clear()
