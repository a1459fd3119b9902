"""Device and host pages of one grid: pools, prefix tree and the fence, with the moves between them that keep bytes right.

A request's page table is a *path* of pinned nodes followed by pages of its own. What a request gives up while plans that
name it are in flight waits behind the fence of the last of them (rule R5): plans retire in order, so one number is enough and
no plan has to list the pages it reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.core.ledger import FetchLedger
from forebay.core.pages import FENCED, NODE, REQUEST, TRANSFER, Owner, PagePool
from forebay.core.residency import CACHE, Residency
from forebay.core.tree import DEVICE, HOST, NONE, Node, PrefixTree, Tier


@dataclass(frozen=True, slots=True)
class Fenced:
    """Given up, but not before a plan has retired: device pins, host pins, a request's own device pages."""

    path: Sequence[Node]
    pages: Sequence[int]
    loaded: Sequence[Node]


class PageCache:
    """L1 and L2 of one epoch. ``retired``: the newest plan that has retired."""

    def __init__(
        self,
        device_pages: int,
        host_pages: int,
        retired: int,
        residency: Residency = CACHE,
        ledger: FetchLedger | None = None,
    ) -> None:
        self.residency = residency
        self.ledger = ledger or FetchLedger()
        self.device = PagePool(device_pages)
        self.host = PagePool(host_pages)
        self.tree = PrefixTree(residency, self.ledger)
        self.retired = retired
        self._fences: dict[int, list[Fenced]] = {}

    @property
    def obtainable(self) -> int:
        """Device pages that `allocate` could give now at most: free ones and those that eviction may get."""
        return self.device.free + self.tree.unpinned(DEVICE)

    @property
    def fenced(self) -> list[Fenced]:
        """What waits for plans to retire, for the invariants."""
        return [entry for entries in self._fences.values() for entry in entries]

    @property
    def fence_numbers(self) -> list[int]:
        """Plans that something waits for."""
        return list(self._fences)

    def pin(self, path: Sequence[Node]) -> None:
        for node in path:
            self.tree.pin(node)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` device pages for a request, evicting as needed (also host pages that alone keep a device page).

        None if there are not as many; within `obtainable` that means that pinned host pages keep some.
        """
        if count > self.obtainable or not self._make_room(self.device, DEVICE, count):
            return None
        return self.device.allocate(count, REQUEST)

    def allocate_host(self) -> int | None:
        """One host page for a transfer, evicting as needed; None if there is none."""
        if not self._make_room(self.host, HOST, 1):
            return None
        return self.host.allocate(1, TRANSFER)[0]

    def adopt(self, hash: bytes, parent: Node | None, page: int) -> Node:
        """The request's device page becomes the tree's node for ``hash``, pinned by that request."""
        self.device.to_node(page, REQUEST)
        return self.tree.insert(hash, parent, DEVICE, page)

    def readopt(self, node: Node, page: int) -> None:
        """The request's device page joins a node that was in host memory only, pinned by that request."""
        self.device.to_node(page, REQUEST)
        self.tree.place(node, DEVICE, page)
        if node.brought:
            node.brought = False
            self.ledger.lose("covered")

    # ------------------------------------------------------------------------------------------ LOAD: host -> device

    def begin_load(self, nodes: Sequence[Node], pages: Sequence[int]) -> None:
        """Nodes that were in host memory only get device pages (a request's), pinned by the LOAD in both tiers."""
        for node, page in zip(nodes, pages, strict=True):
            self.device.to_node(page, REQUEST)
            self.tree.place(node, DEVICE, page)
            self.tree.pin(node, HOST)

    def carry_loads(self, nodes: Sequence[Node]) -> None:
        """A plan carries these LOADs: what was fetched is used."""
        for node in nodes:
            if node.brought:
                node.brought = False
                self.ledger.use()

    def cancel_load(self, node: Node) -> None:
        """Take back a LOAD that no plan carries and nobody but the LOAD itself pins."""
        self.device.release(self.tree.displace(node, DEVICE), NODE)
        self.tree.unpin((node,), HOST)

    # ------------------------------------------------------------------------------------------ BACKUP: device -> host

    def begin_backup(self, node: Node) -> int | None:
        """A host page to copy ``node`` into, its device page pinned meanwhile; None if there is no host page."""
        assert not node.saving and node.pages[HOST] == NONE
        parent = () if node.parent is None or node.parent.pages[HOST] == NONE else (node.parent,)
        for each in parent:
            self.tree.pin(each, HOST)  # making room must not take the page that this copy hangs on
        page = self.allocate_host()
        self.tree.unpin(parent, HOST)
        if page is not None:
            self.tree.pin(node)
            node.saving = True
        return page

    def end_backup(self, node: Node, page: int, saved: bool) -> None:
        """All ranks are done with the copy. Host residency stays closed: without its parent's host page a copy is worth nothing, unless
        it is only on its way to the store."""
        node.saving = False
        rooted = node.parent is None or node.parent.pages[HOST] != NONE
        if saved and (rooted or not self.residency.follows_parent):
            self.host.to_node(page, TRANSFER)
            self.tree.place(node, HOST, page)
            self.tree.unpin((node,), HOST)
        else:
            self.host.release(page, TRANSFER)
        self.tree.unpin((node,))

    # ------------------------------------------------------------------------------------------ FETCH: store -> host

    def free_host(self, page: int) -> None:
        """A transfer's host page that nothing came of."""
        self.host.release(page, TRANSFER)

    def place_fetched(self, hash: bytes, parent: Node | None, page: int) -> Node:
        """A wanted page joins the tree, unpinned; if the tree has the page in host memory already, or will have, it is freed.

        What the tree has meanwhile, in whatever tier, is covered.
        """
        node = self.tree.get(hash)
        if node is None or (node.pages[HOST] == NONE and not node.saving):
            self.host.to_node(page, TRANSFER)
            if node is None:
                node = self.tree.insert(hash, parent, HOST, page)
                node.brought = True
                self.ledger.brought += 1
            else:
                self.ledger.leave("covered", 1)
                self.tree.place(node, HOST, page)
            self.tree.unpin((node,), HOST)
            node.stored = True
        else:
            self.ledger.leave("covered", 1)
            self.free_host(page)
        return node

    # ------------------------------------------------------------------------------------------ giving up

    def release(
        self,
        path: Sequence[Node],
        pages: Sequence[int],
        after_plan: int,
        loaded: Sequence[Node] = (),
    ) -> None:
        """Give up device pins, a request's own pages and host pins of a LOAD once plan ``after_plan`` has retired."""
        if after_plan <= self.retired:
            self._let_go(Fenced(path, pages, loaded), REQUEST)
            return
        for page in pages:
            self.device.fence(page)
        self._fences.setdefault(after_plan, []).append(Fenced(path, pages, loaded))

    def retire(self, number: int) -> None:
        """Plan ``number`` is done on all ranks."""
        assert number == self.retired + 1, f"plan {number} retired after {self.retired}"
        self.retired = number
        for fenced in self._fences.pop(number, ()):
            self._let_go(fenced, FENCED)

    def flush(self, tiers: Sequence[Tier]) -> int:
        """Evict all that nothing pins; returns the number of pages freed."""
        freed = 0
        progress = True
        while (
            progress
        ):  # a device page may go only once its node's children have gone from the host, and so on
            progress = False
            for tier in tiers:
                pool = self._pool(tier)
                while (page := self.tree.evict(tier)) is not None:
                    pool.release(page, NODE)
                    freed += 1
                    progress = True
                if tier is DEVICE:
                    progress |= self._unblock()
        return freed

    def end_transfers(self) -> None:
        """Let go of host pages of `STAGING` that no transfer and no waiting request needs any more. Call after each step."""
        if not self.residency.outlives_transfers:
            while (page := self.tree.evict(HOST)) is not None:
                self.host.release(page, NODE)

    def held(self, tiers: Sequence[Tier]) -> int:
        return sum(self._pool(tier).capacity - self._pool(tier).free for tier in tiers)

    def _pool(self, tier: Tier) -> PagePool:
        return self.device if tier is DEVICE else self.host

    def _make_room(self, pool: PagePool, tier: Tier, count: int) -> bool:
        while pool.free < count:
            page = self.tree.evict(tier)
            if page is not None:
                pool.release(page, NODE)
            elif tier is HOST or not self._unblock():
                return False
        return True

    def _unblock(self) -> bool:
        """Device pages may be kept by nodes below them that are in host memory only (fetched ones): let one of those go."""
        page = self.tree.evict_hanging() if self.tree.unpinned(DEVICE) else None
        if page is not None:
            self.host.release(page, NODE)
        return page is not None

    def _let_go(self, fenced: Fenced, owner: Owner) -> None:
        self.tree.unpin(fenced.path)
        self.tree.unpin(fenced.loaded, HOST)
        for page in fenced.pages:
            self.device.release(page, owner)
