"""The prefix tree: one node per full, immutable page (DESIGN 4.1).

        root --- h0 --- h1 --- h2          a node's hash covers its whole prefix and namespace (`core.hashing`), so one flat
                    `-- h1'                dictionary is the tree: a match walks hashes until one is missing

There are no multi-page nodes, so a lookup never splits anything and an operation in flight never finds its span re-cut.
A request pins *every* node of its path, so ``pins`` never rises from a parent to its child and an unpinned node has an unpinned
subtree: the number of unpinned nodes is the number of pages that eviction can get. Eviction takes unpinned leaves, least recently
used first by a tick (never a clock), so the resident nodes stay prefix-closed (rule R9).
"""

import heapq
from collections.abc import Iterator, Sequence


class Node:
    """One resident page. ``page``: its device page. ``tick``: last use. ``stale``: dropped from the tree."""

    __slots__ = ("children", "hash", "page", "parent", "pins", "stale", "tick")

    def __init__(self, hash: bytes, parent: "Node | None", page: int, tick: int) -> None:
        self.hash = hash
        self.parent = parent
        self.page = page
        self.tick = tick
        self.pins = 0
        self.children = 0
        self.stale = False


class PrefixTree:
    """Nodes by page hash, with pins and an eviction order."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._tick = 0
        self._unpinned = 0
        # Candidates (tick, serial, node), lazily deleted: one counts only if its node is still an unpinned leaf of that tick.
        self._leaves: list[tuple[int, int, Node]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    @property
    def unpinned(self) -> int:
        """Nodes that nothing pins: as many pages can eviction get."""
        return self._unpinned

    def get(self, hash: bytes) -> Node | None:
        return self._nodes.get(hash)

    def match(self, hashes: Sequence[bytes]) -> list[Node]:
        """Nodes of the longest resident prefix of ``hashes``, in order."""
        get = self._nodes.get
        path = []
        for hash in hashes:
            node = get(hash)
            if node is None:
                break
            path.append(node)
        return path

    def insert(self, hash: bytes, parent: Node | None, page: int) -> Node:
        """A new node, pinned once by its caller. ``parent`` is resident and pinned (None: the first page)."""
        assert hash not in self._nodes
        assert parent is None or (parent.pins and not parent.stale)
        node = Node(hash, parent, page, self._tick)
        node.pins = 1
        self._nodes[hash] = node
        if parent is not None:
            parent.children += 1
        return node

    def pin(self, node: Node) -> None:
        assert not node.stale
        if not node.pins:
            self._unpinned -= 1
        node.pins += 1

    def unpin(self, path: Sequence[Node]) -> None:
        """Release one pin of each node of a path (or of any part of one); they all count as used now."""
        self._tick += 1
        for node in path:
            assert node.pins > 0
            node.tick = self._tick
            node.pins -= 1
            if not node.pins:
                self._unpinned += 1
                if not node.children:
                    self._offer(node)

    def evict(self) -> int | None:
        """Drop the least recently used unpinned leaf and return its page; None if there is none."""
        while self._leaves:
            tick, _, node = heapq.heappop(self._leaves)
            if not node.stale and node.tick == tick and not node.pins and not node.children:
                self._drop(node)
                return node.page
        return None

    def _drop(self, node: Node) -> None:
        del self._nodes[node.hash]
        node.stale = True
        self._unpinned -= 1
        parent = node.parent
        if parent is not None:
            parent.children -= 1
            if not parent.children and not parent.pins:
                self._offer(parent)

    def _offer(self, node: Node) -> None:
        self._serial += 1
        heapq.heappush(self._leaves, (node.tick, self._serial, node))
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = [entry for entry in self._leaves if _is_candidate(entry)]
            heapq.heapify(self._leaves)


def _is_candidate(entry: tuple[int, int, Node]) -> bool:
    tick, _, node = entry
    return not node.stale and node.tick == tick and not node.pins and not node.children
