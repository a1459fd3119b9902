"""The staged route on one rank: it looks at what has come for it between its forwards, and never during one (`core.transfers.routes`).

    ticket channel --StagedTicket, StagedReturn, Cancel--> `take` (I/O thread) ---.
    fetch threads  --pages read-------------------------> `read` ----------------+--> inbox --> look: at once when no forward
    compute loop   --`forward` ends---------------------------------------------'              runs, else when it ends

A stage that waits for hidden states is not in a forward, so it looks: an engine whose stages look less often is slower than this.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from forebay.core.messages import (
    Cancel,
    FetchProgress,
    FromWorker,
    StagedReturn,
    StagedTaken,
    StagedTicket,
)
from forebay.core.spans import SpanKind
from forebay.observe.events import SpanRing


@dataclass(frozen=True, slots=True)
class _Read:
    transfer: int
    pages: int
    found: int | None


_Word = StagedTicket | StagedReturn | Cancel | _Read


class StagedRoute:
    """``is_last``: this rank is of the last stage, which answers without being asked. ``fetch``: starts the reads of a ticket and
    returns at once; `read` is called when they have ended. ``say``: sends an acknowledgement, from any thread, in order."""

    def __init__(
        self,
        epoch: int,
        rank: int,
        is_last: bool,
        ring: SpanRing,
        fetch: Callable[[StagedTicket], None],
        say: Callable[[FromWorker], None],
    ) -> None:
        self._epoch, self._rank, self._is_last = epoch, rank, is_last
        self._ring, self._fetch, self._say = ring, fetch, say
        self._lock = threading.Lock()
        self._in_forward = False
        self._inbox: deque[tuple[int, _Word]] = deque()
        self._unanswered: set[int] = set()
        self._asked: set[int] = set()
        self._done: dict[int, _Read] = {}

    def take(self, order: StagedTicket | StagedReturn | Cancel) -> None:
        """From the I/O thread."""
        self._put(order)

    def read(self, transfer: int, pages: int, found: int | None) -> None:
        """From a fetch thread: the first ``pages`` of the ticket are here, and no more will come. ``found``: see `FetchProgress`."""
        self._put(_Read(transfer, pages, found))

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass, on the compute loop: until it ends nothing is looked at."""
        with self._lock:
            self._in_forward = True
        try:
            yield
        finally:
            with self._lock:
                self._in_forward = False
                self._look()

    def _put(self, word: _Word) -> None:
        with self._lock:
            self._inbox.append((time.monotonic_ns(), word))
            if not self._in_forward:
                self._look()

    def _look(self) -> None:
        """Begin what has come, answer what may be answered."""
        while self._inbox:
            arrived_ns, word = self._inbox.popleft()
            match word:
                case StagedTicket():
                    self._ring.record(SpanKind.TICKET, arrived_ns, word.transfer, len(word.pages))
                    self._unanswered.add(word.transfer)
                    self._say(StagedTaken(self._epoch, self._rank, word.transfer))
                    self._fetch(word)
                case _Read():
                    self._done[word.transfer] = word
                case StagedReturn() | Cancel():
                    if word.transfer in self._unanswered:  # a Cancel may come after the answer
                        self._asked.add(word.transfer)
        for transfer in tuple(self._done):
            if self._is_last or transfer in self._asked:
                self._answer(transfer)

    def _answer(self, transfer: int) -> None:
        self._unanswered.remove(transfer)
        self._asked.discard(transfer)
        read = self._done.pop(transfer)
        self._say(FetchProgress(self._epoch, self._rank, transfer, read.pages, True, read.found))
