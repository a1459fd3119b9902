"""BACKUP: full pages on their way from device to host memory.

        want(node) --> wanted queue --plan built, a host page to be had--> in flight --TransferDone from all ranks--> saved

The queue is in the order in which pages became full, so root comes before leaf and there are no holes. A page that finds no host
page stays wanted with all its descendants, and is tried again with the next plan. Nobody waits for a backup. What a transfer has
saved is the MIN over ranks of what each has. With staging host pages a backup is only the way to the store: what is there already is
not saved again, and a page does not need its parent's host page.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from forebay.core.messages import Backup, Copy, TransferDone
from forebay.core.page_cache import PageCache
from forebay.core.residency import Residency
from forebay.core.transfers.transfer import Leading, Transfer, TransferBook
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


@dataclass(slots=True, kw_only=True, eq=False)
class _Saving(Transfer[Leading]):
    copies: list[tuple[Node, int]]  # a node, and the host page that its device page is copied to


class BackupQueue:
    """What is to be copied to the host, and what is being copied."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._wanted: deque[Node] = deque()
        self._book: TransferBook[_Saving] = TransferBook("transfer")
        self._transfers = 0

    @property
    def in_flight(self) -> dict[int, list[tuple[Node, int]]]:
        """Of each transfer under way, the nodes that are being copied, with their host pages."""
        return {transfer.number: transfer.copies for transfer in self._book}

    def want(self, node: Node) -> None:
        if (node.stored or node.storing) and not self._residency.outlives_transfers:
            return  # it would only be the way to the store
        if not (node.private or node.wanted or node.saving or node.pages[HOST] != NONE):
            node.wanted = True
            self._wanted.append(node)

    def start(self, cache: PageCache, ranks: int) -> Backup | None:
        """The next batch, its host pages taken and its device pages pinned; None if there is nothing, or no room."""
        copies: list[tuple[Node, int]] = []
        passed_over = 0
        if not cache.host.capacity:
            self._wanted.clear()
        for _ in range(len(self._wanted)):
            if len(copies) == MAX_BACKUP_PAGES or passed_over == MAX_PASSED_OVER:
                break
            node = self._wanted.popleft()
            page = cache.begin_backup(node) if self._may_be_saved(node) else None
            if page is not None:
                copies.append((node, page))
            elif self._stays_wanted(node):
                self._wanted.append(node)  # behind all others, as its descendants will be
                passed_over += 1
                continue
            node.wanted = False
        if not copies:
            return None
        self._transfers += 1
        self._book.open(
            _Saving(
                number=self._transfers,
                left=set(range(ranks)),
                fold=Leading(len(copies), ranks),
                copies=copies,
            )
        )
        return Backup(self._transfers, tuple(Copy(node.page, page) for node, page in copies))

    def done(self, cache: PageCache, ack: TransferDone) -> list[Node]:
        """Fold one rank's acknowledgement; the nodes that are in host memory now.

        Raises ``ProtocolError``.
        """
        transfer = self._book.acknowledged(ack.rank, ack.transfer, ack.pages, ack.pages)
        if transfer.left:
            return []
        self._book.close(transfer)
        saved = transfer.fold.pages
        for index, (node, page) in enumerate(transfer.copies):
            cache.end_backup(node, page, index < saved)
        return [node for node, _ in transfer.copies if node.pages[HOST] != NONE]

    def clear(self) -> None:
        self._wanted.clear()
        self._book.clear()

    def _stays_wanted(self, node: Node) -> bool:
        """There is something to save, and it waits for a host page, its own or an ancestor's."""
        if node.stale or node.tainted or node.pages[DEVICE] == NONE or node.pages[HOST] != NONE:
            return False
        parent = node.parent
        return (
            not self._residency.follows_parent
            or parent is None
            or parent.wanted
            or parent.saving
            or parent.pages[HOST] != NONE
        )

    def _may_be_saved(self, node: Node) -> bool:
        """It is still there, and its parent has a host page or will have one before it."""
        if node.stale or node.tainted or node.saving:
            return False
        if node.pages[DEVICE] == NONE or node.pages[HOST] != NONE:
            return False
        parent = node.parent
        return (
            not self._residency.follows_parent
            or parent is None
            or parent.saving
            or parent.pages[HOST] != NONE
        )
