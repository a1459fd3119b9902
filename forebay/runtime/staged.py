"""The staged route on one rank: what the compute loop does about stored prefixes between its forwards (`core.staged`).

ticket channel --StagedTicket, StagedReturn, Cancel--> `take` (I/O thread) --.
fetch thread   --pages read-------------------------> `read` ----------------+--> inbox --> `look` (compute loop, between forwards)
                                                                              `--> wakes `wait` (compute loop, idle)
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import zmq

from forebay.core.messages import Cancel, FetchProgress, FromWorker, StagedReturn, StagedTaken, StagedTicket
from forebay.core.spans import SpanKind
from forebay.observe.events import SpanRing


@dataclass(frozen=True, slots=True)
class _Read:
    transfer: int
    pages: int


class StagedRoute:
    """``is_last``: this rank is of the last stage, which answers without being asked. ``fetch``: starts the reads of a ticket and
    returns at once; `read` is called when they have ended. ``say``: sends an acknowledgement, in order."""

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
        self._inbox: SimpleQueue[tuple[int, StagedTicket | StagedReturn | Cancel | _Read]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._unanswered: set[int] = set()
        self._asked: set[int] = set()
        self._done: dict[int, int] = {}

    def take(self, order: StagedTicket | StagedReturn | Cancel) -> None:
        """From the I/O thread: what the compute loop will find when it looks next."""
        self._put(order)

    def read(self, transfer: int, pages: int) -> None:
        """From a fetch thread: the first ``pages`` of the ticket are here, and no more will come."""
        self._put(_Read(transfer, pages))

    def wait(self, channel: "zmq.Socket[bytes]") -> None:
        """On the compute loop: look now and whenever something comes, until ``channel`` has a message."""
        poller = zmq.Poller()
        poller.register(channel, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while True:
            self.look()
            found = dict(poller.poll())
            if channel in found:
                return
            os.eventfd_read(self._wake)

    def look(self) -> None:
        """On the compute loop, between two forwards: begin what has come, answer what may be answered."""
        while not self._inbox.empty():
            arrived_ns, word = self._inbox.get()
            match word:
                case StagedTicket():
                    self._ring.record(SpanKind.STAGED, arrived_ns, word.transfer, len(word.pages))
                    self._unanswered.add(word.transfer)
                    self._say(StagedTaken(self._epoch, self._rank, word.transfer))
                    self._fetch(word)
                case _Read():
                    self._done[word.transfer] = word.pages
                case StagedReturn() | Cancel():
                    if word.transfer in self._unanswered:  # a Cancel may come after the answer
                        self._asked.add(word.transfer)
        for transfer in tuple(self._done):
            if self._is_last or transfer in self._asked:
                self._answer(transfer)

    def _answer(self, transfer: int) -> None:
        self._unanswered.remove(transfer)
        self._asked.discard(transfer)
        self._say(FetchProgress(self._epoch, self._rank, transfer, self._done.pop(transfer), True))

    def _put(self, word: StagedTicket | StagedReturn | Cancel | _Read) -> None:
        self._inbox.put((time.monotonic_ns(), word))
        os.eventfd_write(self._wake, 1)
