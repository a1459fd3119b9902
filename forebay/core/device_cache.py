"""Device pages (L1) of one grid: pool, prefix tree and the fence, with the moves between them that keep bytes right.

A request's page table is a *path* of pinned nodes followed by pages of its own. What a request gives up while plans that
name it are in flight waits behind the fence of the last of them (rule R5): plans retire in order, so one number is enough and
no plan has to list the pages it reads.
"""

from collections.abc import Sequence

from forebay.core.pages import Owner, PagePool
from forebay.core.tree import Node, PrefixTree


class DeviceCache:
    """L1 of one epoch. ``retired``: the newest plan that has retired."""

    def __init__(self, capacity: int, retired: int) -> None:
        self.pool = PagePool(capacity)
        self.tree = PrefixTree()
        self.retired = retired
        self._fences: dict[int, list[tuple[Sequence[Node], Sequence[int]]]] = {}

    @property
    def obtainable(self) -> int:
        """Pages that `allocate` could give now: free ones and those that eviction can get."""
        return self.pool.free + self.tree.unpinned

    @property
    def fenced(self) -> list[tuple[Sequence[Node], Sequence[int]]]:
        """What waits for plans to retire: pins and pages, for the invariants."""
        return [entry for entries in self._fences.values() for entry in entries]

    @property
    def fence_numbers(self) -> list[int]:
        """Plans that something waits for."""
        return list(self._fences)

    def pin(self, path: Sequence[Node]) -> None:
        for node in path:
            self.tree.pin(node)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages for a request, evicting as needed; None, and nothing evicted, if there are not as many."""
        if count > self.obtainable:
            return None
        while self.pool.free < count:
            page = self.tree.evict()
            assert page is not None, "the tree counts an unpinned node that it cannot evict"
            self.pool.release(page, Owner.NODE)
        return self.pool.allocate(count)

    def adopt(self, hash: bytes, parent: Node | None, page: int) -> Node:
        """The request's page becomes the tree's node for ``hash``, pinned by that request."""
        self.pool.to_node(page)
        return self.tree.insert(hash, parent, page)

    def release(self, path: Sequence[Node], pages: Sequence[int], after_plan: int) -> None:
        """Give up pins and a request's own pages once plan ``after_plan`` has retired."""
        if after_plan <= self.retired:
            self.tree.unpin(path)
            for page in pages:
                self.pool.release(page, Owner.REQUEST)
            return
        for page in pages:
            self.pool.fence(page)
        self._fences.setdefault(after_plan, []).append((path, pages))

    def retire(self, number: int) -> None:
        """Plan ``number`` is done on all ranks."""
        assert number == self.retired + 1, f"plan {number} retired after {self.retired}"
        self.retired = number
        for path, pages in self._fences.pop(number, ()):
            self.tree.unpin(path)
            for page in pages:
                self.pool.release(page, Owner.FENCED)

    def flush(self) -> int:
        """Evict all that nothing pins; returns the number of pages freed."""
        freed = 0
        while (page := self.tree.evict()) is not None:
            self.pool.release(page, Owner.NODE)
            freed += 1
        return freed
