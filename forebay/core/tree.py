"""The prefix tree: one node per full, immutable page, resident in device memory, host memory or both.

        root --- h0 --- h1 --- h2          a node's hash covers its whole prefix and namespace (`pages.hashing`), so one flat
                    `-- h1'                dictionary is the tree: a match walks hashes until one is missing

There are no multi-page nodes, so a lookup never splits anything and an operation in flight never finds its span re-cut.
Each tier has its own pins. A request pins *every* device page of its path, so device pins never rise from a parent to its child.

What eviction may take (rule R9, least recently used first by a tick, never a clock):
    device page   unpinned, and the node has a host page too, or no child depends on it: then the node goes with its page
    host page     unpinned, and no child has a host page: the host-resident nodes under a host-resident parent are a closed set
A node without a page in either tier is deleted: there are no stubs. The resident nodes stay prefix-closed.

With `STAGING` residency host pages are there for transfers alone: they do not let their device
page go before its descendants.
"""

import heapq
from collections.abc import Iterator, Sequence
from enum import IntEnum

from forebay.core.ledger import FetchLedger
from forebay.core.residency import CACHE, Residency

NONE = -1


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1


TIERS = (Tier.DEVICE, Tier.HOST)
DEVICE, HOST = TIERS  # an enum's member is slow to look up


class Node:
    """One resident page. ``pages`` and ``pins`` by tier (page `NONE`: not there). ``tick``: last use.

    ``offers`` by tier: where it belongs among the candidates for eviction, if it is one of them.
    ``children`` by tier: how many have a page there; ``heirs``: how many there are. ``stale``: deleted from the tree.
    ``group``: the hash of its prefix's first page.
    ``private``: only requests that may not be stored have used it. ``wanted``: stands in the queue for a host page; ``saving``:
    a BACKUP of it is under way. ``hits``: matches. ``stored``: believed to be in the store; ``storing``: on its way there, tried
    ``tries`` times. ``brought``: its host page was fetched, and no plan has loaded it yet.
    ``plan``: the one that computed it, 0 if none did. ``tainted``: what that wrote means nothing.
    """

    __slots__ = (
        "brought", "children", "group", "hash", "heirs", "hits", "offers", "pages", "parent", "pins",
        "plan", "private", "saving", "stale", "stored", "storing", "tainted", "tick", "tries", "wanted",
    )  # fmt: skip

    def __init__(self, hash: bytes, parent: "Node | None", tick: int) -> None:
        self.hash = hash
        self.group: bytes = hash if parent is None else parent.group
        self.parent = parent
        self.pages = [NONE, NONE]
        self.pins = [0, 0]
        self.children = [0, 0]
        self.offers: list[tuple[int, int] | None] = [None, None]
        self.heirs = 0
        self.tick = tick
        self.hits = 0
        self.stale = False
        self.private = False
        self.wanted = False
        self.saving = False
        self.stored = False
        self.storing = False
        self.tries = 0
        self.brought = False
        self.plan = 0
        self.tainted = False

    @property
    def page(self) -> int:
        """The device page, which must be there."""
        page = self.pages[DEVICE]
        assert page != NONE
        return page


class PrefixTree:
    """Nodes by page hash, with pins and an eviction order for each tier."""

    def __init__(self, residency: Residency = CACHE, ledger: FetchLedger | None = None) -> None:
        self._host_frees_device = residency.frees_device
        self._ledger = ledger or FetchLedger()
        self._nodes: dict[bytes, Node] = {}
        self._tick = 0
        self._unpinned = [0, 0]
        # Candidates (tick, serial, node), at most one of a node. It stays where it is when its node is used again or may not be evicted
        # any more, and is put right once it comes up.
        self._candidates: list[list[tuple[int, int, Node]]] = [[], []]
        self._serial = 0
        self._buried = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def unpinned(self, tier: Tier) -> int:
        """Nodes with an unpinned page in ``tier``: eviction can get no more than that."""
        return self._unpinned[tier]

    def get(self, hash: bytes) -> Node | None:
        return self._nodes.get(hash)

    def match(self, hashes: Sequence[bytes]) -> list[Node]:
        """Nodes of the longest resident prefix of ``hashes``, in order, in whatever tier."""
        get = self._nodes.get
        path = []
        for hash in hashes:
            node = get(hash)
            if node is None:
                break
            path.append(node)
        return path

    def bury(self, nodes: Sequence[Node]) -> None:
        """Nothing finds these nodes any more, nor what hangs on them. Pages and pins stay as they
        are; they go like any other's. Looks at all nodes: this is rare."""
        below = {id(node) for node in nodes}
        found = []
        for node in self._nodes.values():  # a parent comes before its children
            if id(node) in below or id(node.parent) in below:
                below.add(id(node))
                found.append(node)
        for node in found:
            del self._nodes[node.hash]
            self._buried += 1
            node.hash = b"tainted %d" % self._buried  # no page's hash is that short
            node.group = node.hash if node.parent is None else node.parent.group
            node.tainted, node.stored = True, False
            self._nodes[node.hash] = node

    def insert(self, hash: bytes, parent: Node | None, tier: Tier, page: int) -> Node:
        """A new node with a page in ``tier``, pinned there once by its caller. ``parent`` is resident (None: the first page)."""
        assert hash not in self._nodes
        assert parent is None or not parent.stale
        node = Node(hash, parent, self._tick)
        self._nodes[hash] = node
        if parent is not None:
            parent.heirs += 1
        self.place(node, tier, page)
        return node

    def place(self, node: Node, tier: Tier, page: int) -> None:
        """The node has a page in ``tier`` too, pinned there once by the caller."""
        assert not node.stale and node.pages[tier] == NONE
        node.pages[tier] = page
        node.pins[tier] = 1
        if node.parent is not None:
            node.parent.children[tier] += 1
        self.reconsider(node)  # a page in one tier may be what lets the other's go

    def displace(self, node: Node, tier: Tier) -> int:
        """Take back a page that only its caller pins; the node stays through its other tier. Returns the page."""
        assert node.pins[tier] == 1 and node.pages[1 - tier] != NONE
        node.pins[tier] = 0
        self._unpinned[tier] += 1
        return self._take(node, tier)

    def pin(self, node: Node, tier: Tier = DEVICE) -> None:
        assert not node.stale and node.pages[tier] != NONE
        if not node.pins[tier]:
            self._unpinned[tier] -= 1
        node.pins[tier] += 1

    def unpin(self, path: Sequence[Node], tier: Tier = DEVICE) -> None:
        """Release one pin of each node of a path (or of any part of one); they all count as used now."""
        self._tick += 1
        for node in path:
            assert node.pins[tier] > 0
            node.tick = self._tick
            node.pins[tier] -= 1
            if not node.pins[tier]:
                self._unpinned[tier] += 1
            self.reconsider(node)

    def oldest(self, tier: Tier) -> Node | None:
        """What eviction would take next."""
        heap = self._candidates[tier]
        while heap:
            tick, _, node = heap[0]
            offer = node.offers[tier]
            if offer is None or offer[0] != node.tick or not self._evictable(node, tier):
                heapq.heappop(heap)
                node.offers[tier] = None
            elif offer[0] == tick:
                return node
            else:
                heapq.heapreplace(heap, (*offer, node))
        return None

    def evict(self, tier: Tier) -> int | None:
        """Take the page of the least recently used candidate; None if there is none."""
        node = self.oldest(tier)
        return None if node is None else self._take(node, tier)

    def evict_hanging(self) -> int | None:
        """Take the host page of a leaf that alone keeps a device page from being evicted; None if there is none.

        That is a fetched page (host only) below an unpinned node without a host page. Rare, so it looks at all nodes.
        """
        for node in self._nodes.values():
            if node.pages[DEVICE] == NONE and not node.heirs and not node.pins[HOST]:
                above = node.parent
                while above is not None and above.pages[DEVICE] == NONE:
                    above = above.parent
                if (
                    above is not None
                    and not above.pins[DEVICE]
                    and (not self._host_frees_device or above.pages[HOST] == NONE)
                ):
                    return self._take(node, HOST)
        return None

    def reconsider(self, node: Node) -> None:
        """Something changed for this node; it may be evictable now. Most are pinned in one tier, and not there in the other."""
        pins, pages = node.pins, node.pages
        if not pins[DEVICE] and pages[DEVICE] != NONE and self._evictable(node, DEVICE):
            self._offer(node, DEVICE)
        if not pins[HOST] and pages[HOST] != NONE and self._evictable(node, HOST):
            self._offer(node, HOST)

    def _take(self, node: Node, tier: Tier) -> int:
        page = node.pages[tier]
        node.pages[tier] = NONE
        if node.brought and tier is HOST:
            node.brought = False
            self._ledger.lose("evicted")
        self._unpinned[tier] -= 1
        parent = node.parent
        if parent is not None:
            parent.children[tier] -= 1
        if node.pages[1 - tier] == NONE:
            del self._nodes[node.hash]
            node.stale = True
            if parent is not None:
                parent.heirs -= 1
        if parent is not None:
            self.reconsider(parent)
        return page

    def _offer(self, node: Node, tier: Tier) -> None:
        self._serial += 1
        offer = node.offers[tier]
        if offer is None:
            node.offers[tier] = (node.tick, self._serial)
            heapq.heappush(self._candidates[tier], (node.tick, self._serial, node))
            if len(self._candidates[tier]) > 2 * len(self._nodes) + 64:
                self._drop_stale(tier)
        elif offer[0] != node.tick:
            node.offers[tier] = (node.tick, self._serial)

    def _drop_stale(self, tier: Tier) -> None:
        """Deleted nodes may lie deep among the candidates."""
        for _, _, node in self._candidates[tier]:
            if node.stale:
                node.offers[tier] = None
        fresh = [entry for entry in self._candidates[tier] if not entry[2].stale]
        heapq.heapify(fresh)
        self._candidates[tier] = fresh

    def _evictable(self, node: Node, tier: Tier) -> bool:
        if node.pages[tier] == NONE or node.pins[tier] or node.stale:
            return False
        if tier is DEVICE:
            return not node.heirs or (node.pages[HOST] != NONE and self._host_frees_device)
        return not node.children[HOST] and (node.pages[DEVICE] != NONE or not node.heirs)
