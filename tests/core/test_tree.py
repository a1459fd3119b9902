"""The prefix tree against a dumb twin that keeps whole sequences in a list."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.core.device_cache import DeviceCache
from forebay.core.hashing import hash_chain, root_hash
from forebay.core.messages import pack_tokens
from forebay.core.pages import Owner, PagePool
from forebay.core.tree import Node, PrefixTree

ROOT = root_hash(b"", "", 1)
PREFIXES = st.lists(st.integers(1, 2), min_size=1, max_size=5).map(tuple)


class TreeTwin(RuleBasedStateMachine):
    """Pages are single tokens. The twin knows resident prefixes, who holds them and when they were last used."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.resident: dict[tuple[int, ...], int] = {}  # prefix -> tick of last use
        self.holders: list[tuple[tuple[int, ...], list[Node]]] = []
        self.tick = 0
        self.pages = 0

    def hashes(self, prefix: tuple[int, ...]) -> list[bytes]:
        return hash_chain(ROOT, pack_tokens(prefix), 1)

    def held(self, prefix: tuple[int, ...]) -> bool:
        return any(holder[: len(prefix)] == prefix for holder, _ in self.holders)

    @rule(prefix=PREFIXES)
    def use(self, prefix: tuple[int, ...]) -> None:
        """Match what is there, insert the rest, hold all of it."""
        hashes = self.hashes(prefix)
        path = self.tree.match(hashes)
        known = 0
        while known < len(prefix) and prefix[: known + 1] in self.resident:
            known += 1
        assert len(path) == known
        for node in path:
            self.tree.pin(node)
        for index in range(known, len(prefix)):
            self.pages += 1
            path.append(self.tree.insert(hashes[index], path[-1] if path else None, self.pages))
            self.resident[prefix[: index + 1]] = self.tick
        self.holders.append((prefix, path))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        prefix, path = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.tree.unpin(path)
        self.tick += 1
        for length in range(1, len(prefix) + 1):
            self.resident[prefix[:length]] = self.tick

    @rule()
    def evict(self) -> None:
        leaves = {
            prefix: tick
            for prefix, tick in self.resident.items()
            if not self.held(prefix) and not any(other[:-1] == prefix for other in self.resident)
        }
        page = self.tree.evict()
        if not leaves:
            assert page is None
            return
        gone = [prefix for prefix in self.resident if self.tree.get(self.hashes(prefix)[-1]) is None]
        assert len(gone) == 1 and page is not None
        assert gone[0] in leaves and leaves[gone[0]] == min(leaves.values()), "not the least recently used leaf"
        del self.resident[gone[0]]

    @invariant()
    def agree(self) -> None:
        assert len(self.tree) == len(self.resident)
        assert self.tree.unpinned == sum(not self.held(prefix) for prefix in self.resident)


TestTreeTwin = TreeTwin.TestCase
TestTreeTwin.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_page_is_freed_exactly_once() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.release(page, Owner.REQUEST)
    with pytest.raises(AssertionError, match="belongs to FREE"):
        pool.release(page, Owner.REQUEST)


def test_a_page_given_up_stays_fenced_until_the_plan_that_names_it_has_retired() -> None:
    cache = DeviceCache(4, retired=0)
    pages = cache.allocate(3)
    assert pages is not None
    cache.release((), pages, after_plan=2)
    assert cache.pool.free == 1 and cache.allocate(2) is None
    cache.retire(1)
    assert cache.pool.free == 1
    cache.retire(2)
    assert cache.pool.free == 4


def test_an_allocation_that_cannot_be_met_evicts_nothing() -> None:
    cache = DeviceCache(3, retired=0)
    pages = cache.allocate(2)
    assert pages is not None
    cache.release([cache.adopt(b"h", None, pages[0])], (), after_plan=0)
    assert cache.allocate(3) is None and len(cache.tree) == 1
    assert cache.allocate(2) is not None and len(cache.tree) == 0
