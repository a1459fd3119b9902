"""LOAD: host pages of a cached prefix on their way to the device.

    begin (at admission) --> wait for a plan --carry--> in that plan, until it retires
                                  '--cancel: the last request that needed them has ended

Loads ride with the very next plan, whichever request's piece comes first, so a page that has a
device id is loaded by the time that any plan can read it. They need no book of their own: a rank
that acknowledges the plan says by it that the plan's loads are done, and a load that fails in
memory ends the rank (rule R10). Until the plan has retired its fence keeps both pages.
"""

from collections.abc import Iterator, Sequence

from forebay.core.messages import Copy
from forebay.core.page_cache import PageCache
from forebay.core.tree import DEVICE, HOST, Node


class LoadQueue:
    """Loads that no plan carries yet."""

    def __init__(self) -> None:
        self._waiting: list[Node] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._waiting)

    def begin(self, cache: PageCache, nodes: Sequence[Node], pages: Sequence[int]) -> None:
        """``nodes`` are in host memory only; ``pages``: a request's device pages for them."""
        assert len(nodes) == len(pages)
        cache.begin_load(nodes, pages)
        cache.pin(nodes)
        self._waiting += nodes

    def cancel_unused(self, cache: PageCache) -> None:
        """Those that no request waits for any more, deepest first."""
        for node in reversed(tuple(self._waiting)):
            if node.pins[DEVICE] == 1:
                cache.cancel_load(node)
                self._waiting.remove(node)

    def carry(self, cache: PageCache, plan: int) -> tuple[Copy, ...]:
        """All of them go with ``plan``."""
        nodes, self._waiting = self._waiting, []
        copies = tuple(Copy(node.page, node.pages[HOST]) for node in nodes)
        cache.carry_loads(nodes)
        cache.release(nodes, (), plan, loaded=nodes)
        return copies

    def clear(self) -> None:
        self._waiting.clear()
