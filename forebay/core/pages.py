"""One tier's pages: who owns each (rule R4), and which are free.

                allocate                      to_node
        FREE ------------> REQUEST or TRANSFER --------> NODE
          ^                    |        \\                  |
          |                    |         `--fence--> FENCED |
          '-------release------'----release------'----release

A page has one owner. A device page that a plan in flight may still touch is not freed but FENCED until that plan has retired (rule
R5). Pins on NODE pages are kept by the tree: a node's page is released only when nothing pins it. Host pages have no FENCED state:
only transfers touch them, and they keep their pins until all ranks have acknowledged.
"""

from enum import IntEnum


class Owner(IntEnum):
    FREE = 0
    REQUEST = 1
    NODE = 2
    FENCED = 3
    TRANSFER = 4


FREE, REQUEST, NODE, FENCED, TRANSFER = Owner  # an enum's member is slow to look up


class PagePool:
    """``capacity`` page ids, valid on every rank. All moves assert the owner that they take the page from."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._owner = bytearray(capacity)
        self._counts = [capacity, 0, 0, 0, 0]

    @property
    def free(self) -> int:
        return self._counts[FREE]

    def count(self, owner: Owner) -> int:
        return self._counts[owner]

    @property
    def counts(self) -> tuple[int, ...]:
        """Pages by owner."""
        return tuple(self._counts)

    def owner(self, page: int) -> Owner:
        return Owner(self._owner[page])

    def belongs_to(self, page: int, owner: Owner) -> bool:
        return self._owner[page] == owner

    def recount(self, owner: Owner) -> int:
        """`count`, page by page: for the invariants."""
        return self._owner.count(owner)

    def allocate(self, count: int, owner: Owner) -> list[int]:
        """``count`` free pages, now ``owner``'s. The caller has made sure that there are as many."""
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} are free"
        if not count:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        pages.reverse()
        for page in pages:
            self._move(page, FREE, owner)
        return pages

    def to_node(self, page: int, source: Owner) -> None:
        self._move(page, source, NODE)

    def fence(self, page: int) -> None:
        self._move(page, REQUEST, FENCED)

    def release(self, page: int, owner: Owner) -> None:
        """Back to the free list from ``owner``, which must be the page's owner now: a page is freed exactly once."""
        assert owner is not FREE
        self._move(page, owner, FREE)
        self._free.append(page)

    def _move(self, page: int, source: Owner, target: Owner) -> None:
        assert self._owner[page] == source, (
            f"page {page} belongs to {Owner(self._owner[page]).name}, not {source.name}"
        )
        self._owner[page] = target
        self._counts[source] -= 1
        self._counts[target] += 1
