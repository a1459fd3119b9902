"""The prefix tree against a dumb twin that keeps whole sequences in a list."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.core.messages import pack_tokens
from forebay.core.page_cache import PageCache
from forebay.core.pages import Owner, PagePool
from forebay.core.tree import NONE, Node, PrefixTree, Tier
from forebay.pages.hashing import hash_chain, root_hash

ROOT = root_hash(b"", "", 1)
PREFIXES = st.lists(st.integers(1, 2), min_size=1, max_size=5).map(tuple)


class TreeTwin(RuleBasedStateMachine):
    """Pages are single tokens. The twin knows for each resident prefix its tiers, who holds it there, and when it was last used."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.resident: dict[tuple[int, ...], set[Tier]] = {}
        self.ticks: dict[tuple[int, ...], int] = {}
        self.holders: list[tuple[tuple[int, ...], list[Node]]] = []
        self.tick = 0
        self.pages = 0

    def hashes(self, prefix: tuple[int, ...]) -> list[bytes]:
        return hash_chain(ROOT, pack_tokens(prefix), 1)

    def node(self, prefix: tuple[int, ...]) -> Node:
        node = self.tree.get(self.hashes(prefix)[-1])
        assert node is not None
        return node

    def held(self, prefix: tuple[int, ...]) -> bool:
        return any(holder[: len(prefix)] == prefix for holder, _ in self.holders)

    def children(self, prefix: tuple[int, ...]) -> list[set[Tier]]:
        return [tiers for other, tiers in self.resident.items() if other[:-1] == prefix]

    def may_go(self, prefix: tuple[int, ...], tier: Tier) -> bool:
        """The two rules of the tree's own documentation, by looking at everything."""
        tiers, children = self.resident[prefix], self.children(prefix)
        if tier not in tiers or (tier is Tier.DEVICE and self.held(prefix)):
            return False
        if tier is Tier.DEVICE:
            return Tier.HOST in tiers or not children
        return not any(Tier.HOST in child for child in children) and (
            Tier.DEVICE in tiers or not children
        )

    @rule(prefix=PREFIXES)
    def use(self, prefix: tuple[int, ...]) -> None:
        """Match what is there, bring it all to the device, insert the rest, hold all of it."""
        hashes = self.hashes(prefix)
        path = self.tree.match(hashes)
        known = 0
        while known < len(prefix) and prefix[: known + 1] in self.resident:
            known += 1
        assert len(path) == known
        for node in path:
            if node.pages[Tier.DEVICE] == NONE:
                self.pages += 1
                self.tree.place(node, Tier.DEVICE, self.pages)
            else:
                self.tree.pin(node)
        for index in range(known, len(prefix)):
            self.pages += 1
            path.append(
                self.tree.insert(hashes[index], path[-1] if path else None, Tier.DEVICE, self.pages)
            )
            self.ticks[prefix[: index + 1]] = self.tick
        for length in range(1, len(prefix) + 1):
            self.resident.setdefault(prefix[:length], set()).add(Tier.DEVICE)
        self.holders.append((prefix, path))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        prefix, path = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.tree.unpin(path)
        self.tick += 1
        for length in range(1, len(prefix) + 1):
            self.ticks[prefix[:length]] = self.tick

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        """A page goes to the host, if its parent is there."""
        prefix = data.draw(st.sampled_from(sorted(self.resident)))
        if Tier.HOST in self.resident[prefix] or (
            prefix[:-1] and Tier.HOST not in self.resident[prefix[:-1]]
        ):
            return
        self.pages += 1
        self.tree.place(self.node(prefix), Tier.HOST, self.pages)
        self.tree.unpin([self.node(prefix)], Tier.HOST)
        self.tick += 1
        self.ticks[prefix] = self.tick
        self.resident[prefix].add(Tier.HOST)

    @rule(tier=st.sampled_from(Tier))
    def evict(self, tier: Tier) -> None:
        candidates = {
            prefix: self.ticks[prefix] for prefix in self.resident if self.may_go(prefix, tier)
        }
        pages = {self.node(prefix).pages[tier]: prefix for prefix in candidates}
        page = self.tree.evict(tier)
        if not candidates:
            assert page is None
            return
        assert page in pages, "eviction took a page that it may not take, or none"
        gone = pages[page]
        assert candidates[gone] == min(candidates.values()), "not the least recently used"
        self.resident[gone].discard(tier)
        if not self.resident[gone]:
            del self.resident[gone]
            del self.ticks[gone]

    @invariant()
    def agree(self) -> None:
        assert len(self.tree) == len(self.resident)
        for prefix, tiers in self.resident.items():
            assert {tier for tier in Tier if self.node(prefix).pages[tier] != NONE} == tiers
        device = sum(
            Tier.DEVICE in tiers and not self.held(prefix)
            for prefix, tiers in self.resident.items()
        )
        assert self.tree.unpinned(Tier.DEVICE) == device
        assert self.tree.unpinned(Tier.HOST) == sum(
            Tier.HOST in tiers for tiers in self.resident.values()
        )


TestTreeTwin = TreeTwin.TestCase
TestTreeTwin.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_page_is_freed_exactly_once() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1, Owner.REQUEST)
    pool.release(page, Owner.REQUEST)
    with pytest.raises(AssertionError, match="belongs to FREE"):
        pool.release(page, Owner.REQUEST)


def test_a_page_given_up_stays_fenced_until_the_plan_that_names_it_has_retired() -> None:
    cache = PageCache(4, 0, retired=0)
    pages = cache.allocate(3)
    assert pages is not None
    cache.release((), pages, after_plan=2)
    assert cache.device.free == 1 and cache.allocate(2) is None
    cache.retire(1)
    assert cache.device.free == 1
    cache.retire(2)
    assert cache.device.free == 4


def test_an_allocation_that_cannot_be_met_evicts_nothing() -> None:
    cache = PageCache(3, 0, retired=0)
    pages = cache.allocate(2)
    assert pages is not None
    cache.release([cache.adopt(b"h", None, pages[0])], (), after_plan=0)
    assert cache.allocate(3) is None and len(cache.tree) == 1
    assert cache.allocate(2) is not None and len(cache.tree) == 0
