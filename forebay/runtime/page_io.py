"""FETCH and STORE of one rank: between its host pages and the store, on threads of their own.

    ticket channel --Ticket, Cancel, Store--> `take` (I/O thread) --> fetch threads / store thread --> acknowledgements

On the staged route tickets go through the compute loop instead (`runtime.staged`).

A ticket is read in batches from the front; the first page that does not come ends it. Whatever a store does on a bad day shortens this
rank's progress and nothing else: every order is acknowledged with its final word (rule R11, field reports P18, B7).
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from forebay.core.batches import BatchSizes
from forebay.core.messages import (
    Cancel,
    FetchProgress,
    FromWorker,
    PageKey,
    StagedReturn,
    StagedTicket,
    Store,
    StoreDone,
    StoreHealth,
    Ticket,
    ToWorkerIo,
)
from forebay.core.spans import SpanKind
from forebay.core.transfers.policy import TICKETS_AT_ONCE
from forebay.observe.events import SpanRing
from forebay.observe.figures import Meter
from forebay.pages.reader import PageReader
from forebay.runtime.host_pool import HostPool
from forebay.runtime.staged import StagedRoute
from forebay.store.backend import PutItem, Status
from forebay.store.backends.guarded import WatchedStore

FETCH_TIMEOUT_S = 4.0  # of one batch: a request may wait for it, once
STAGED_QUERY_S = 0.1
STORE_TIMEOUT_S = 6.0
_THERE = (Status.OK, Status.EXISTS)


class PageIo:
    """Carries out the planner's orders. ``part``: the name of this rank's piece of a page, as it is stored. ``say``: sends an
    acknowledgement, from any thread, in order."""

    def __init__(
        self,
        store: WatchedStore,
        reader: PageReader,
        host: HostPool,
        part: bytes,
        epoch: int,
        rank: int,
        is_last_stage: bool,
        ring: SpanRing,
        meter: Meter,
        say: Callable[[FromWorker], None],
    ) -> None:
        self._store = store
        self._reader = reader
        self._host = host
        self._part = part
        self._epoch = epoch
        self._rank = rank
        self._ring = ring
        self._meter = meter
        self._say = say
        self._sizes = BatchSizes(host.block_bytes)
        self._cancelled: set[int] = set()
        self._live: set[int] = set()
        self._lock = threading.Lock()
        self._fetchers = ThreadPoolExecutor(TICKETS_AT_ONCE, "fetch")
        self._storer = ThreadPoolExecutor(1, "store")
        self.staged = StagedRoute(epoch, rank, is_last_stage, ring, self._fetch_staged, say)

    @property
    def store_health(self) -> StoreHealth:
        return self._store.figures

    def take(self, order: ToWorkerIo) -> None:
        """Start what the planner asks for; returns at once. Orders of another epoch are dropped (rule R1)."""
        if order.epoch != self._epoch:
            return
        match order:
            case Ticket() if (
                self._store.is_open
            ):  # the threads may hang in calls that do not return
                self._say(FetchProgress(self._epoch, self._rank, order.transfer, 0, True))
            case Store() if self._store.is_open:
                self._say(
                    StoreDone(self._epoch, self._rank, order.transfer, bytes(len(order.pages)))
                )
            case Ticket():
                self._begin(order.transfer)
                self._fetchers.submit(self._fetch, order)
            case StagedTicket() | StagedReturn():
                self.staged.take(order)
            case Cancel():
                with self._lock:
                    if order.transfer in self._live:
                        self._cancelled.add(order.transfer)
                self.staged.take(order)
            case Store():
                self._storer.submit(self._put, order)

    def stop(self) -> None:
        """Begin nothing new and wait for what is being read or written; the store's own time-outs bound that."""
        with self._lock:
            self._cancelled |= self._live
        self._fetchers.shutdown(cancel_futures=True)
        self._storer.shutdown(cancel_futures=True)
        self._store.close()

    def _fetch(self, ticket: Ticket) -> None:
        def progress(pages: int) -> None:
            if pages < len(ticket.pages):
                self._say(FetchProgress(self._epoch, self._rank, ticket.transfer, pages, False))

        done = self._read_all(ticket.transfer, lambda: ticket.pages, progress)
        self._say(FetchProgress(self._epoch, self._rank, ticket.transfer, done, True))

    def _fetch_staged(self, ticket: StagedTicket) -> None:
        """On the compute loop: this rank asks for its own part and reads what is there, on a fetch thread."""
        found: list[int] = []

        def present() -> Sequence[PageKey]:
            found.append(self._reader.match(ticket.pages, STAGED_QUERY_S))
            return ticket.pages[: found[0]]

        def work() -> None:
            done = self._read_all(ticket.transfer, present, lambda pages: None)
            self.staged.read(ticket.transfer, done, found[0] if found else None)

        if self._store.is_open:
            self.staged.read(ticket.transfer, 0, None)
            return
        self._begin(ticket.transfer)
        self._fetchers.submit(work)

    def _begin(self, transfer: int) -> None:
        with self._lock:
            self._live.add(transfer)

    def _read_all(
        self,
        transfer: int,
        wanted: Callable[[], Sequence[PageKey]],
        progress: Callable[[int], None],
    ) -> int:
        """Read batch after batch, with ``progress`` after each; how many pages came, from the front."""
        began = time.monotonic_ns()
        done = 0
        size = self._sizes.first
        try:
            pages = wanted()
            while done < len(pages) and not self._is_cancelled(transfer):
                batch = pages[done : done + size]
                asked_at = time.monotonic()
                read = self._reader.read(batch, FETCH_TIMEOUT_S)
                done += read
                if read < len(batch):
                    break
                size = self._sizes.following(read, time.monotonic() - asked_at)
                progress(done)
        except (
            Exception
        ):  # a store should answer with statuses; whatever it does instead is a miss from here on
            traceback.print_exc()
        finally:
            with self._lock:
                self._live.discard(transfer)
                self._cancelled.discard(transfer)
            self._ring.record(SpanKind.FETCH, began, transfer, done)
            self._meter.transfer(
                "fetch", done * self._host.block_bytes, (time.monotonic_ns() - began) / 1e9
            )
        return done

    def _put(self, order: Store) -> None:
        began = time.monotonic_ns()
        stored = bytes(len(order.pages))
        try:
            statuses = [
                status
                for batch in _batches(order.pages, self._sizes.first)
                for status in self._put_batch(batch)
            ]
            stored = bytes(status in _THERE for status in statuses)
        except Exception:  # not stored, then
            traceback.print_exc()
        finally:
            self._ring.record(SpanKind.STORE, began, order.transfer, sum(stored))
            self._meter.transfer(
                "store", sum(stored) * self._host.block_bytes, (time.monotonic_ns() - began) / 1e9
            )
            self._say(StoreDone(self._epoch, self._rank, order.transfer, stored))

    def _put_batch(self, pages: Sequence[PageKey]) -> list[Status]:
        items = [
            PutItem(page.hash + self._part, self._host.block(page.host), page.group)
            for page in pages
        ]
        return self._store.put_from(items, STORE_TIMEOUT_S)

    def _is_cancelled(self, transfer: int) -> bool:
        with self._lock:
            return transfer in self._cancelled


def _batches(pages: Sequence[PageKey], size: int) -> Iterator[Sequence[PageKey]]:
    for first in range(0, len(pages), size):
        yield pages[first : first + size]
