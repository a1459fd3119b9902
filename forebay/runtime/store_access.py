"""How planner and ranks of one grid reach the same store.

A private (``embedded``) store is one process that the planner starts and ends; ranks are told its address and secret. Every other URL
is opened by each process for itself.
"""

import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from forebay.core.tickets import QUERY_S, Query, QueryDone
from forebay.runtime.layouts import Layout, Manifest, match_prefix
from forebay.store.backend import PageStore
from forebay.store.backends.embedded import EmbeddedStore
from forebay.store.backends.open import open_store

QUERY_THREADS = 2
ADD_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What a rank needs to open the store: ``secret`` is None where there is none."""

    url: str
    secret: str | None


class StoreDesk:
    """The planner's end: asks the store for it, off its loop. ``wake``: called on a query thread when an answer is there."""

    def __init__(self, url: str, own: Layout, namespace: bytes) -> None:
        """``own``: this grid's layout; ``namespace`` as in `Manifest`.

        Raises ``StoreURLError`` if there is no such store or it does not answer.
        """
        store = open_store(url)
        assert store is not None
        self._store: PageStore = store
        self._own = own
        self._manifest = Manifest(store, namespace, own)
        self._threads = ThreadPoolExecutor(QUERY_THREADS, "query")
        self._threads.submit(self._manifest.add_own, ADD_TIMEOUT_S)
        self.answers: SimpleQueue[QueryDone] = SimpleQueue()
        if isinstance(store, EmbeddedStore):
            self.address = StoreAddress(store.url, store.secret)
        else:
            self.address = StoreAddress(url, None)

    def ask(self, query: Query, wake: Callable[[], None]) -> None:
        """Answer a query later; never blocks."""
        self._threads.submit(self._answer, query, time.monotonic(), wake)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._store.close()

    def _answer(self, query: Query, asked_at: float, wake: Callable[[], None]) -> None:
        """One that has waited its time out in the queue is late already, and a slow store need not be asked."""
        pages = 0
        try:
            if time.monotonic() - asked_at < QUERY_S:
                pages = match_prefix(self._store, query.hashes, self._own, self._manifest, QUERY_S)
        except Exception:  # a store should answer with a number; whatever it does instead is a miss
            traceback.print_exc()
        finally:
            self.answers.put(QueryDone(query.number, pages))
            wake()
            self._manifest.add_own(ADD_TIMEOUT_S)


def open_for_rank(address: StoreAddress) -> PageStore:
    store = open_store(address.url, secret=address.secret)
    assert store is not None
    return store
