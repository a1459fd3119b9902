"""What must hold between any two planner steps. `check` raises ``AssertionError`` with the number of what does not.

I1  every page has one owner, and the pool's counts are right (R4)
I2  a node's pins are exactly the requests and fences that hold it; request pages are held by exactly one request
I3  the tree is closed: parents of resident nodes are resident, children are counted, pins never rise towards the leaves (R9)
I4  a request in a plan in flight holds its pages; fences only wait for plans in flight (R5)
I5  plans in flight are consecutive, at most pp, and the newest is the last one built (R1)
I6  slots are used once; requests are in exactly one place: waiting or running
I7  a running request's table covers what was computed, and what the workers were told
I8  something will wake every running request: it is prefilling, ready to decode, or waits for a plan in flight
I9  ``computing`` names running requests and pages that they have yet to compute (R8)
I10 the number of unpinned nodes is what eviction can get
"""

from collections import Counter

from forebay.core.device_cache import DeviceCache
from forebay.core.pages import Owner
from forebay.core.replica import Replica
from forebay.core.request import RequestState


def check(replica: Replica) -> None:
    """All invariants; O(pages), so for tests and simulation."""
    _check_places(replica)
    cache = replica.cache
    if cache is None:
        assert not replica.running and not replica.in_flight and not replica.computing, "I6: running without a grid"
        return
    _check_pages(replica, cache)
    _check_tree(cache)
    _check_flight(replica, cache)
    _check_requests(replica)


def _check_pages(replica: Replica, cache: DeviceCache) -> None:
    owners = Counter(cache.pool.owner(page) for page in range(cache.pool.capacity))
    for owner in Owner:
        assert owners[owner] == cache.pool.count(owner), f"I1: {owner.name} counts {cache.pool.count(owner)}, is {owners[owner]}"
    pins: Counter[bytes] = Counter()
    request_pages: Counter[int] = Counter()
    fenced_pages: Counter[int] = Counter()
    for request in replica.running:
        pins.update(node.hash for node in request.nodes)
        request_pages.update(request.own_pages)
    for path, pages in cache.fenced:
        pins.update(node.hash for node in path)
        fenced_pages.update(pages)
    for held, owner in ((request_pages, Owner.REQUEST), (fenced_pages, Owner.FENCED)):
        for page, count in held.items():
            assert count == 1 and cache.pool.owner(page) is owner, f"I2: page {page} is held {count} times as {owner.name}"
        assert len(held) == cache.pool.count(owner), f"I2: {cache.pool.count(owner) - len(held)} {owner.name} pages are leaked"
    node_pages: set[int] = set()
    for node in cache.tree:
        assert node.pins == pins[node.hash], f"I2: a node has {node.pins} pins, {pins[node.hash]} holders"
        assert cache.pool.owner(node.page) is Owner.NODE, f"I2: node page {node.page} is {cache.pool.owner(node.page).name}"
        node_pages.add(node.page)
    assert len(node_pages) == len(cache.tree) == cache.pool.count(Owner.NODE), "I2: node pages are not the tree's"


def _check_tree(cache: DeviceCache) -> None:
    children: Counter[bytes] = Counter()
    for node in cache.tree:
        assert not node.stale and cache.tree.get(node.hash) is node, "I3: stale node in the tree"
        if node.parent is not None:
            assert cache.tree.get(node.parent.hash) is node.parent, "I3: a resident node's parent is not resident"
            assert node.parent.pins >= node.pins, "I3: a child has more pins than its parent"
            children[node.parent.hash] += 1
    for node in cache.tree:
        assert node.children == children[node.hash], f"I3: {node.children} children counted, {children[node.hash]} there"
    assert cache.tree.unpinned == sum(not node.pins for node in cache.tree), "I10: unpinned nodes are miscounted"


def _check_flight(replica: Replica, cache: DeviceCache) -> None:
    numbers = [record.number for record in replica.in_flight]
    assert numbers == list(range(cache.retired + 1, replica.built + 1)), f"I5: in flight {numbers}, built {replica.built}"
    assert len(numbers) <= replica.config.pp, "I5: more plans in flight than stages"
    for record in replica.in_flight:
        assert record.waits_for, "I5: an acknowledged plan has not retired"
    assert all(cache.retired < number <= replica.built for number in cache.fence_numbers), "I4: a fence waits for no plan in flight"
    for request in replica.running:
        assert request.last_plan <= replica.built, "I4: a request names a plan that was not built"


def _check_places(replica: Replica) -> None:
    slots = [request.slot for request in replica.running]
    assert len(set(slots)) == len(slots) and all(0 <= slot < replica.config.max_running for slot in slots), "I6: slots"
    waiting = {request.request_id for request in replica.waiting}
    running = {request.request_id for request in replica.running}
    assert not waiting & running and waiting | running == set(replica.requests), "I6: requests are lost or in two places"
    for request in replica.waiting:
        assert request.state is RequestState.WAITING and not request.table and not request.nodes, "I6: a waiting request holds pages"
    for hash, request in replica.computing.items():
        assert request.state is RequestState.RUNNING, "I9: a request that does not run is to compute a page"
        assert hash in request.hashes[len(request.nodes) :], "I9: the page was computed already"


def _check_requests(replica: Replica) -> None:
    page_size = replica.config.page_size
    sampling = {id(request) for record in replica.in_flight for _, request in record.sampling}
    ready = Counter(id(request) for request in replica.decodes)
    for request in replica.running:
        assert request.computed <= len(request.table) * page_size, "I7: computed beyond the table"
        assert request.sent <= len(request.table) and len(request.nodes) <= len(request.table), "I7: table shorter than told"
        twins = {twin.index for twin in request.twins}
        for index, node in enumerate(request.nodes):
            assert (request.table[index] == node.page) != (index in twins), f"I7: table entry {index} is not its node's page"
        if request.prefilling:
            assert request.remaining and not request.awaits_token and not ready[id(request)], "I8: a prefill with nothing to do"
        elif request.awaits_token:
            assert id(request) in sampling and not ready[id(request)], "I8: no plan in flight brings the token"
        else:
            assert ready[id(request)] == 1 and request.remaining == 1, "I8: nothing will wake a decode"
    assert len(ready) <= len(replica.running) and sum(ready.values()) == len(ready), "I8: a decode is queued twice"
