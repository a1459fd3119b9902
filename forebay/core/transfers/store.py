"""STORE: saved host pages on their way to the store.

    want(node) --> unproven --its plan retires--> wanted queue --a batch is free--> in flight
                                                      ^                                |
    stored <----- StoreDone from all ranks -----------+----- tried once more ----------'
    refused ----- the store is asked again (StoreWell), or the page is used again ---> want

A page is proven once the plan that computed it has retired: until then any rank may still say that
its numbers are none, and such a page is never stored. It counts as stored when *every* rank has
stored its part; what failed anywhere is not stored (and is retried a bounded number of times). The
host page is pinned until all ranks have acknowledged; with staging host pages, and while it is
unproven, from the moment that it is wanted. ``Node.stored`` is a hint that saves storing twice; a
flush of the store (StoreEmptied) takes it back.
"""

from collections import deque
from dataclasses import dataclass

from forebay.core.messages import PageKey, Store, StoreDone
from forebay.core.page_cache import PageCache
from forebay.core.residency import Residency
from forebay.core.transfers.transfer import Each, Transfer, TransferBook
from forebay.core.tree import HOST, NONE, Node

MAX_STORE_PAGES = 128
MAX_BATCHES = 2
MAX_TRIES = 2
MAX_WANTED = 8192  # a store that does not keep up loses what comes on top
MAX_REFUSED = 8192  # as much is tried again when a store has been away; the oldest are forgotten


@dataclass(frozen=True, slots=True)
class StoreWell:
    """Event: after a while in which it was not, the store is asked again by everyone."""


@dataclass(frozen=True, slots=True)
class StoreEmptied:
    """Event: pages that were in the store are so no longer."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Batch(Transfer[Each]):
    nodes: list[Node]


class StoreQueue:
    """What is to be stored, and what is being stored."""

    def __init__(self, residency: Residency) -> None:
        self._pins_early = not residency.outlives_transfers  # from the moment that it is wanted
        self._wanted: deque[Node] = deque()
        self._unproven: list[Node] = []
        self._book: TransferBook[_Batch] = TransferBook("store")
        self._refused: deque[Node] = deque(maxlen=MAX_REFUSED)
        self._transfers = 0
        self.stored_pages = 0
        self.failed_pages = 0

    @property
    def in_flight(self) -> list[Node]:
        """Nodes of the batches under way."""
        return [node for batch in self._book for node in batch.nodes]

    @property
    def is_busy(self) -> bool:
        """Something is on its way to the store: what a query misses now may be there soon."""
        return bool(self._wanted or self._unproven or self._book)

    @property
    def pinned(self) -> list[Node]:
        """Nodes whose host pages are pinned before their batch is built, for the invariants."""
        return [*self._unproven, *(self._wanted if self._pins_early else ())]

    def want(self, cache: PageCache, node: Node) -> None:
        """``node`` has a host page."""
        if len(self._wanted) >= MAX_WANTED:
            self.failed_pages += 1
        elif not node.stored and not node.storing and not node.tainted:
            node.storing = True
            node.tries = 0
            if node.plan > cache.retired:
                cache.tree.pin(node, HOST)
                self._unproven.append(node)
            else:
                self._queue(cache, node)

    def retired(self, cache: PageCache) -> None:
        """A plan has retired: what it computed is proven, or tainted."""
        if not self._unproven:
            return
        proven = [node for node in self._unproven if node.plan <= cache.retired]
        self._unproven = [node for node in self._unproven if node.plan > cache.retired]
        for node in proven:
            node.storing = not node.tainted
            if node.storing:
                self._queue(cache, node)
        cache.tree.unpin(proven, HOST)

    def want_again(self, cache: PageCache) -> None:
        """The store is well: what it did not take is tried once more, as far as it is still in host memory."""
        refused, self._refused = self._refused, deque(maxlen=MAX_REFUSED)
        for node in refused:
            if not node.stale and node.pages[HOST] != NONE:
                self.want(cache, node)

    def emptied(self, cache: PageCache) -> None:
        """Nothing is known to be stored; what was being stored meanwhile may have gone too, so it is tried again."""
        for node in cache.tree:
            node.stored = False
        for batch in self._book:
            batch.fold.lose()

    def _queue(self, cache: PageCache, node: Node) -> None:
        if self._pins_early:
            cache.tree.pin(node, HOST)
        self._wanted.append(node)

    def start(self, cache: PageCache, ranks: int, epoch: int) -> Store | None:
        """The next batch, its host pages pinned; None if there is nothing or enough under way."""
        nodes: list[Node] = []
        while len(self._book) < MAX_BATCHES and self._wanted and len(nodes) < MAX_STORE_PAGES:
            node = self._wanted.popleft()
            if node.stale or node.pages[HOST] == NONE:
                node.storing = False
                continue
            if not self._pins_early:
                cache.tree.pin(node, HOST)
            nodes.append(node)
        if not nodes:
            return None
        self._transfers += 1
        self._book.open(
            _Batch(
                number=self._transfers,
                left=set(range(ranks)),
                fold=Each(len(nodes)),
                nodes=nodes,
            )
        )
        return Store(
            epoch,
            self._transfers,
            tuple(PageKey(node.pages[HOST], node.hash, node.group) for node in nodes),
        )

    def done(self, cache: PageCache, ack: StoreDone) -> None:
        """Fold one rank's acknowledgement. Raises ``ProtocolError``."""
        batch = self._book.acknowledged(ack.rank, ack.transfer, ack.stored, len(ack.stored))
        if batch.left:
            return
        self._book.close(batch)
        for node, stored in zip(batch.nodes, batch.fold.pages, strict=True):
            self._settle(cache, node, bool(stored))
        cache.tree.unpin(batch.nodes, HOST)

    def _settle(self, cache: PageCache, node: Node, stored: bool) -> None:
        node.tries += 1
        node.stored = stored
        if stored:
            self.stored_pages += 1
            node.storing = False
        elif node.tries < MAX_TRIES and not node.stale:
            self._queue(cache, node)
        else:
            self.failed_pages += 1
            node.storing = False
            self._refused.append(node)

    def clear(self) -> None:
        self._wanted.clear()
        self._unproven.clear()
        self._book.clear()
        self._refused.clear()
