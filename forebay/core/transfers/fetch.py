"""FETCH: pages of a prefix on their way from a source to every rank's host memory.

    start --order--> under way --every rank's final word--> ended: safe pages join the tree, the
                        |                                   others are free again
                        '--enough: Cancel; what is safe by now joins the tree at once

``safe`` is the MIN over ranks of what each has in its own pages, from the front without a hole.
Settled pages join the tree as host pages and stay pinned for each user until it is admitted. Pages
beyond ``safe`` belong to the transfer until every rank has said its final word (rule R11). Nothing
here knows the source: the route says who is told and what is known before. If the anchor, the page
that the fetch hangs on, has gone, what has come is let go. `FetchLedger` counts what became of
each page.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from forebay.core.ledger import FetchLedger
from forebay.core.lifecycle import Cause, move
from forebay.core.messages import Cancel, FetchProgress, ProtocolError, StagedTaken
from forebay.core.page_cache import PageCache
from forebay.core.request import Request
from forebay.core.transfers.policy import TICKETS_AT_ONCE, FetchPolicy, FetchRules
from forebay.core.transfers.routes import FetchOrder, Route
from forebay.core.transfers.transfer import Leading, Transfer, TransferBook
from forebay.core.tree import NONE, Tier


@dataclass(slots=True, kw_only=True, eq=False)
class Fetch(Transfer[Leading]):
    """``anchor``: the page before the first, None at the root. ``asker``: whose fetch it is.

    ``found``: leading pages that the source has. ``deadline``: infinite until the first byte is
    asked for (``begun``). ``settled``: leading pages that are in the tree. ``counted``: the ledger
    knows what became of all pages; ``why``: what becomes of those that do not come.
    """

    epoch: int
    hashes: list[bytes]
    pages: list[int]
    anchor: bytes | None
    route: Route
    asker: int
    issued_at: float
    users: list[Request] = field(default_factory=list)
    found: int
    deadline: float = math.inf
    begun: bool = False
    cancelled: bool = False
    settled: int = 0
    counted: bool = False
    why: str = "failed"

    @property
    def safe(self) -> int:
        return self.fold.pages


class Fetches:
    """All fetches of one replica. ``outcomes``: how they ended, counted."""

    def __init__(self, ledger: FetchLedger, rules: FetchRules, outcomes: Counter[str]) -> None:
        self._ledger = ledger
        self._rules = rules
        self._outcomes = outcomes
        self._book: TransferBook[Fetch] = TransferBook("ticket")
        self._fetching: dict[bytes, Fetch] = {}  # by page hash; not those that are cancelled
        self._orders: list[FetchOrder] = []

    def __len__(self) -> int:
        return len(self._book)

    @property
    def held_pages(self) -> list[int]:
        """Host pages that fetches own."""
        return [page for fetch in self._book for page in fetch.pages[fetch.settled :]]

    @property
    def pages_under_way(self) -> int:
        """Pages of which the ledger does not know yet what they will come to."""
        open_ones = [fetch for fetch in self._book if not fetch.counted]
        return sum([len(fetch.pages) - fetch.settled for fetch in open_ones])

    @property
    def deadlines(self) -> list[float]:
        return [fetch.deadline for fetch in self._book if not fetch.cancelled]

    def take_orders(self) -> list[FetchOrder]:
        orders, self._orders = self._orders, []
        return orders

    def join(self, request: Request, hash: bytes) -> bool:
        """``request`` waits for the fetch that brings the page ``hash``, if there is one."""
        fetch = self._fetching.get(hash)
        if fetch is None:
            return False
        fetch.users.append(request)
        self._outcomes["joined"] += 1
        return True

    def start(self, fetch: Fetch, request: Request, now: float) -> None:
        """Tell the ranks that the route begins with; ``request`` waits for what comes."""
        self._ledger.wanted += len(fetch.pages)
        self._order(fetch.route.begin())
        fetch.users.append(request)
        self._book.open(fetch)
        self._fetching |= dict.fromkeys(fetch.hashes, fetch)
        self._outcomes["issued"] += 1
        self.start_clocks(now)

    # -------------------------------------------------------------------------- words of ranks

    def progressed(self, ack: FetchProgress) -> Fetch | None:
        """Fold one rank's word; the fetch if that ended it. Raises ``ProtocolError``."""
        fetch = self._book.acknowledged(ack.rank, ack.transfer, ack.pages, ack.pages, ack.final)
        if ack.found is not None:
            fetch.found = min(fetch.found, max(ack.found, ack.pages))
        if ack.final and not fetch.cancelled:
            self._order(fetch.route.answered(ack.rank, fetch.left))
        return None if fetch.left else fetch

    def taken(self, ack: StagedTaken, now: float) -> None:
        """A rank has come to a fetch of the staged route. Raises ``ProtocolError``."""
        fetch = self._book.get(ack.transfer)
        if fetch is None or not fetch.route.expects(ack.rank):
            raise ProtocolError(
                f"rank {ack.rank} took staged ticket {ack.transfer}, which it was not given"
            )
        self._begin(fetch, now)
        if not fetch.cancelled:
            self._order(fetch.route.taken(ack.rank))

    def end(self, fetch: Fetch, cache: PageCache, now: float) -> int:
        """Every rank has said its final word.

        Returns how many pages came and hang on nothing, since the anchor has gone.
        """
        self._book.close(fetch)
        lost = 0
        if not (fetch.cancelled and fetch.route.asks_ahead):
            lost = self._settle(fetch, cache)
        if not fetch.cancelled:
            self._rules.measure(fetch.safe, now - fetch.issued_at)
            self._outcomes[_outcome(fetch)] += 1
        self._count_pages(fetch, lost)
        self._forget_hashes(fetch)
        for page in fetch.pages[fetch.settled :]:
            cache.free_host(page)
        return lost

    # -------------------------------------------------------------------------- time

    def start_clocks(self, now: float) -> None:
        """A rank asks for the first byte when it reads fewer than `TICKETS_AT_ONCE` before it.

        On a route that does not ask ahead it is when the first rank takes it (`taken`).
        """
        if self._rules.policy is not FetchPolicy.TIMEOUT:
            return
        reading: Counter[int] = Counter()
        for fetch in self._book:
            if fetch.route.asks_ahead and any(
                [reading[rank] < TICKETS_AT_ONCE for rank in fetch.left]
            ):
                self._begin(fetch, now)
            reading.update(fetch.left)

    def _begin(self, fetch: Fetch, now: float) -> None:
        if not fetch.begun:
            fetch.begun = True
            fetch.deadline = now + self._rules.patience_s(len(fetch.pages))

    # -------------------------------------------------------------------------- ends before the end

    def cut_late(self, cache: PageCache, now: float) -> None:
        for fetch in self._book:
            if not fetch.cancelled and now >= fetch.deadline:
                self._cut_short(fetch, cache, "timeout")

    def leave(self, request: Request, cache: PageCache) -> None:
        """It waits no longer: what is safe by now may be used.

        The last user to leave cuts the fetch short.
        """
        for fetch in self._of(request):
            if fetch.users == [request]:
                self._cut_short(fetch, cache, "best_effort")
            else:
                self._settle(fetch, cache)
                fetch.users.remove(request)
                move(request, Cause.FETCHED)

    def drop(self, request: Request) -> None:
        """The request ends; a fetch that nobody else uses is given up."""
        for fetch in self._of(request):
            fetch.users.remove(request)
            if not fetch.users:
                fetch.why = "aborted"
                if fetch.route.asks_ahead:
                    self._count_pages(fetch)
                self._cancel(fetch)
                self._outcomes["aborted"] += 1

    def clear(self) -> None:
        """The grid is lost: host pages are forgotten, and no rank of it will be heard."""
        for fetch in self._book:
            fetch.why = "grid_lost"
            self._count_pages(fetch)
        self._book.clear()
        self._fetching.clear()
        self._orders.clear()

    def _of(self, request: Request) -> list[Fetch]:
        return [fetch for fetch in self._book if request in fetch.users]

    def _cut_short(self, fetch: Fetch, cache: PageCache, why: str) -> None:
        """The policy says enough: what is safe may be used now, if the route knows what is.

        The rest stays the transfer's until all final words.
        """
        fetch.why = why
        self._outcomes[why] += 1
        if not fetch.route.asks_ahead:
            self._cancel(fetch)
            return
        self._count_pages(fetch, self._settle(fetch, cache))
        self._cancel(fetch)
        users, fetch.users = fetch.users, []
        for user in users:
            move(user, Cause.FETCHED)

    def _cancel(self, fetch: Fetch) -> None:
        if not fetch.cancelled:
            fetch.cancelled = True
            self._forget_hashes(fetch)
            fetch.left &= fetch.route.told
            self._order(Cancel(fetch.epoch, fetch.number))

    # -------------------------------------------------------------------------- pages

    def _settle(self, fetch: Fetch, cache: PageCache) -> int:
        """Safe pages join the tree, pinned for every user.

        Those that the tree has meanwhile are dropped as covered. Returns how many cannot join,
        since the page that they hang on has gone.
        """
        safe = fetch.safe
        parent = None if fetch.anchor is None else cache.tree.get(fetch.anchor)
        if fetch.settled:
            parent = cache.tree.get(fetch.hashes[fetch.settled - 1])
        if parent is None and (fetch.anchor is not None or fetch.settled):
            return safe - fetch.settled
        while fetch.settled < safe:
            hash, page = fetch.hashes[fetch.settled], fetch.pages[fetch.settled]
            node = cache.place_fetched(hash, parent, page)
            for user in fetch.users:
                if node.pages[Tier.HOST] != NONE:
                    cache.tree.pin(node, Tier.HOST)
                    user.ready.append(node)
            parent = node
            fetch.settled += 1
        return 0

    def _count_pages(self, fetch: Fetch, lost: int = 0) -> None:
        """Pages that are not in the tree come to nothing, once.

        ``lost`` of them since they hang on nothing; the rest did not come.
        """
        if fetch.counted:
            return
        fetch.counted = True
        asks_ahead = fetch.route.asks_ahead
        found = len(fetch.pages) if asks_ahead else max(fetch.found, fetch.safe)
        self._ledger.wanted -= len(fetch.pages) - found
        self._ledger.leave("anchor_lost", lost)
        self._ledger.leave(fetch.why, found - fetch.settled - lost)

    def _forget_hashes(self, fetch: Fetch) -> None:
        for hash in fetch.hashes:
            if self._fetching.get(hash) is fetch:
                del self._fetching[hash]

    def _order(self, order: FetchOrder | None) -> None:
        if order is not None:
            self._orders.append(order)


def _outcome(fetch: Fetch) -> str:
    """How one ended that nobody cut short; where nobody asks ahead it may have been a miss."""
    if not fetch.route.asks_ahead and not fetch.safe:
        return "miss"
    return "complete" if fetch.safe == len(fetch.pages) else "short"
