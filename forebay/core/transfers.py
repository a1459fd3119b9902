"""BACKUP: full pages on their way from device to host memory.

        want(node) --> wanted queue --plan built, a host page to be had--> in flight --TransferDone from all ranks--> saved

The queue is in the order in which pages became full, so root comes before leaf and there are no holes. A page that finds no host
page stays wanted with all its descendants, and is tried again with the next plan. Nobody waits for a backup. What a transfer has
saved is the MIN over ranks of what each has. With staging host pages a backup is only the way to the store: what is there already is
not saved again, and a page does not need its parent's host page.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from forebay.core.messages import Backup, Copy, ProtocolError, TransferDone
from forebay.core.page_cache import PageCache
from forebay.core.tree import DEVICE, HOST, NONE, Node

MAX_BACKUP_PAGES = 128
MAX_PASSED_OVER = (
    64  # of those that wait for a host page, at most this many are looked at in one step
)
SELECTIVE_HITS = 2
WRITE_BACK_FREE_SHARE = 0.1


class WritePolicy(StrEnum):
    """When a page goes to host memory: as soon as it is full, on its second hit, or when device pages run short."""

    WRITE_THROUGH = "write-through"
    WRITE_THROUGH_SELECTIVE = "write-through-selective"
    WRITE_BACK = "write-back"


@dataclass(slots=True)
class _InFlight:
    nodes: list[Node]
    pages: list[int]
    waits_for: set[int]
    saved: int  # MIN over the ranks heard so far


class BackupQueue:
    """What is to be copied to the host, and what is being copied."""

    def __init__(self, staging: bool) -> None:
        self._staging = staging
        self._wanted: deque[Node] = deque()
        self._in_flight: dict[int, _InFlight] = {}
        self._transfers = 0

    @property
    def in_flight(self) -> dict[int, Sequence[tuple[Node, int]]]:
        """(node, host page) of each transfer under way, for the invariants."""
        return {
            number: list(zip(flight.nodes, flight.pages, strict=True))
            for number, flight in self._in_flight.items()
        }

    def want(self, node: Node) -> None:
        if self._staging and (node.stored or node.storing):
            return
        if not (node.private or node.wanted or node.saving or node.pages[HOST] != NONE):
            node.wanted = True
            self._wanted.append(node)

    def start(self, cache: PageCache, ranks: int) -> Backup | None:
        """The next batch, its host pages taken and its device pages pinned; None if there is nothing, or no room."""
        nodes: list[Node] = []
        pages: list[int] = []
        passed_over = 0
        if not cache.host.capacity:
            self._wanted.clear()
        for _ in range(len(self._wanted)):
            if len(nodes) == MAX_BACKUP_PAGES or passed_over == MAX_PASSED_OVER:
                break
            node = self._wanted.popleft()
            page = cache.begin_backup(node) if self._may_be_saved(node) else None
            if page is not None:
                nodes.append(node)
                pages.append(page)
            elif self._stays_wanted(node):
                self._wanted.append(node)  # behind all others, as its descendants will be
                passed_over += 1
                continue
            node.wanted = False
        if not nodes:
            return None
        self._transfers += 1
        self._in_flight[self._transfers] = _InFlight(nodes, pages, set(range(ranks)), len(nodes))
        return Backup(
            self._transfers,
            tuple(Copy(node.page, page) for node, page in zip(nodes, pages, strict=True)),
        )

    def done(self, cache: PageCache, ack: TransferDone) -> list[Node]:
        """Fold one rank's acknowledgement; the nodes that are in host memory now. Raises ``ProtocolError``."""
        flight = self._in_flight.get(ack.transfer)
        if (
            flight is None
            or ack.rank not in flight.waits_for
            or not 0 <= ack.pages <= len(flight.nodes)
        ):
            raise ProtocolError(
                f"rank {ack.rank} acknowledged {ack.pages} pages of transfer {ack.transfer}, which it was not asked for"
            )
        flight.waits_for.remove(ack.rank)
        flight.saved = min(flight.saved, ack.pages)
        if flight.waits_for:
            return []
        del self._in_flight[ack.transfer]
        for index, (node, page) in enumerate(zip(flight.nodes, flight.pages, strict=True)):
            cache.end_backup(node, page, index < flight.saved)
        return [node for node in flight.nodes if node.pages[HOST] != NONE]

    def clear(self) -> None:
        self._wanted.clear()
        self._in_flight.clear()

    def _stays_wanted(self, node: Node) -> bool:
        """There is something to save, and it waits for a host page, its own or an ancestor's."""
        if node.stale or node.pages[DEVICE] == NONE or node.pages[HOST] != NONE:
            return False
        parent = node.parent
        return (
            self._staging
            or parent is None
            or parent.wanted
            or parent.saving
            or parent.pages[HOST] != NONE
        )

    def _may_be_saved(self, node: Node) -> bool:
        """It is still there, and its parent has a host page or will have one before it."""
        if node.stale or node.saving or node.pages[DEVICE] == NONE or node.pages[HOST] != NONE:
            return False
        parent = node.parent
        return self._staging or parent is None or parent.saving or parent.pages[HOST] != NONE
