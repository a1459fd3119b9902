"""What must hold between any two planner steps.

`check` raises ``AssertionError`` with the number of what does not. Every step of every planner checks
what is cheap (I5, and the counts of I6 and I17); a server checks all of it every N steps if asked.

I1  every page has one owner, and the pool's counts are right (R4)
I2  a node's pins are exactly the requests and fences that hold it; request pages are held by exactly one request
I3  the tree is closed: parents of resident nodes are resident, there are no stubs, children are counted (R9), and a prefix is one group
I4  a request in a plan in flight holds its pages; fences only wait for plans in flight (R5)
I5  plans in flight are consecutive, at most pp and as many of hits that went ahead, and the newest is the last one built (R1)
I6  slots are used once; requests are in exactly one place: waiting or running
I7  a running request's table covers what was computed, and what the workers were told
I8  something will wake every running request: it is prefilling, ready to decode, or waits for a plan in flight
I9  ``computing`` names running requests and pages that they have yet to compute (R8)
I10 the tree counts its unpinned pages right
I11 host pages belong to nodes or to backups under way; what a backup copies keeps its device page pinned
I12 a batch to the store, and what a ticket has brought for a waiting request, pin their host pages
I13 a load that no plan carries yet pins its node in both tiers
I14 with staging host pages, something that moves or waits needs each of them, or a page below it
I15 a waiting request that has not asked the store for what it misses will do so
I16 plans of hits have gone ahead of no prompt more often than it bears
I17 every stored page that was asked for is used, unused for one reason, brought and not yet used, or still under way
"""

from collections import Counter

from forebay.core.building import overtakes_allowed
from forebay.core.lifecycle import Phase, RequestState
from forebay.core.page_cache import PageCache
from forebay.core.pages import Owner, PagePool
from forebay.core.replica import Replica
from forebay.core.tree import NONE, TIERS, Tier

STUB = [NONE, NONE]


def check_cheaply(replica: Replica) -> None:
    """What costs O(plans in flight): always on, after every step of a real planner too."""
    ledger, under_way = replica.ledger, replica.tickets.pages_under_way
    told = ledger.used + sum(ledger.unused.values()) + ledger.brought + under_way
    assert ledger.wanted == told, (
        f"I17: {ledger.wanted} pages wanted, {told} accounted for: {ledger}, {under_way} under way"
    )
    _check_counts(replica)
    cache = replica.cache
    if cache is None:
        assert not replica.running and not replica.in_flight and not replica.computing, (
            "I6: running without a grid"
        )
        return
    _check_plans(replica, cache)


def check(replica: Replica) -> None:
    """All invariants; O(pages), so for tests, for simulation, and now and then in production."""
    check_cheaply(replica)
    _check_places(replica)
    _check_ledger(replica)
    cache = replica.cache
    if cache is None:
        return
    _check_pages(replica, cache)
    _check_tree(cache)
    _check_flight(replica, cache)
    _check_staging(cache)
    _check_requests(replica)


def _check_pages(replica: Replica, cache: PageCache) -> None:
    for pool in (cache.device, cache.host):
        for owner in Owner:
            counted = pool.recount(owner)
            assert counted == pool.count(owner), (
                f"I1: {owner.name} counts {pool.count(owner)}, is {counted}"
            )
    pins: tuple[Counter[bytes], Counter[bytes]] = (Counter(), Counter())
    request_pages: Counter[int] = Counter()
    fenced_pages: Counter[int] = Counter()
    host_pages: Counter[int] = Counter()
    for request in replica.running:
        pins[Tier.DEVICE].update(node.hash for node in request.nodes)
        request_pages.update(request.own_pages)
    for fenced in cache.fenced:
        pins[Tier.DEVICE].update(node.hash for node in fenced.path)
        pins[Tier.HOST].update(node.hash for node in fenced.loaded)
        fenced_pages.update(fenced.pages)
    for node in replica.loads:
        for tier in TIERS:
            assert node.pages[tier] != NONE, "I13: a load of a node that has not both pages"
            pins[tier][node.hash] += 1
    for copies in replica.backups.in_flight.values():
        for node, page in copies:
            assert node.saving and node.pages[Tier.HOST] == NONE, (
                "I11: a backup of a node that has a host page"
            )
            pins[Tier.DEVICE][node.hash] += 1
            host_pages[page] += 1
    host_pages.update(replica.tickets.held_pages)
    for nodes in (
        replica.stores.in_flight,
        replica.stores.pinned,
        *(request.ready for request in replica.requests.values()),
    ):
        for node in nodes:
            assert node.pages[Tier.HOST] != NONE, "I12: a pinned host page is not there"
            pins[Tier.HOST][node.hash] += 1
    _check_held(cache.device, Owner.REQUEST, request_pages)
    _check_held(cache.device, Owner.FENCED, fenced_pages)
    _check_held(cache.host, Owner.TRANSFER, host_pages)
    for tier, pool in ((Tier.DEVICE, cache.device), (Tier.HOST, cache.host)):
        _check_held(
            pool,
            Owner.NODE,
            Counter([node.pages[tier] for node in cache.tree if node.pages[tier] != NONE]),
        )
        held = pins[tier]
        wrong = [node for node in cache.tree if node.pins[tier] != held[node.hash]]
        assert not wrong, (
            f"I2: a node has {wrong[0].pins[tier]} {tier.name} pins, {held[wrong[0].hash]} holders"
        )


def _check_held(pool: PagePool, owner: Owner, held: Counter[int]) -> None:
    for page, count in held.items():
        assert count == 1 and pool.belongs_to(page, owner), (
            f"I2: page {page} is held {count} times as {owner.name}"
        )
    assert len(held) == pool.count(owner), (
        f"I2: {pool.count(owner) - len(held)} {owner.name} pages are leaked"
    )


def _check_tree(cache: PageCache) -> None:
    tree = cache.tree
    nodes = list(tree)
    heirs = Counter([id(node.parent) for node in nodes])
    for node in nodes:
        parent = node.parent
        assert not node.stale and tree.get(node.hash) is node, "I3: stale node in the tree"
        assert node.pages != STUB, "I3: a stub"
        assert parent is None or tree.get(parent.hash) is parent, (
            "I3: a resident node's parent is not resident"
        )
        assert node.group == (node.hash if parent is None else parent.group), (
            "I3: a node is of another group than its prefix"
        )
        assert node.heirs == heirs[id(node)], (
            f"I3: {node.heirs} children counted, {heirs[id(node)]} there"
        )
    for tier in TIERS:
        resident = [node for node in nodes if node.pages[tier] != NONE]
        children = Counter([id(node.parent) for node in resident])
        wrong = [node for node in nodes if node.children[tier] != children[id(node)]]
        assert not wrong, f"I3: children in {tier.name} miscounted"
        unpinned = len([node for node in resident if not node.pins[tier]])
        assert tree.unpinned(tier) == unpinned, (
            f"I10: {tier.name} counts {tree.unpinned(tier)}, is {unpinned}"
        )


def _check_staging(cache: PageCache) -> None:
    if not cache.residency.outlives_transfers:
        assert cache.tree.oldest(Tier.HOST) is None, "I14: a host page outlives its transfer"


def _check_plans(replica: Replica, cache: PageCache) -> None:
    plans, built = replica.in_flight, replica.built
    assert len(plans) == built - cache.retired, f"I5: {len(plans)} in flight, built {built}"
    assert not plans or plans[-1].number == built, f"I5: {plans[-1].number} is not {built}"
    assert len(plans) <= 2 * replica.config.pp, "I5: too many plans of hits that went ahead"


def _check_flight(replica: Replica, cache: PageCache) -> None:
    numbers = [record.number for record in replica.in_flight]
    assert numbers == list(range(cache.retired + 1, replica.built + 1)), (
        f"I5: in flight {numbers}, built {replica.built}"
    )
    ahead = sum(record.is_ahead for record in replica.in_flight)
    assert len(numbers) - ahead <= replica.config.pp, "I5: more plans in flight than stages"
    for record in replica.in_flight:
        assert record.waits_for, "I5: an acknowledged plan has not retired"
    assert all(cache.retired < number <= replica.built for number in cache.fence_numbers), (
        "I4: a fence waits for no plan in flight"
    )
    for request in replica.running:
        assert request.last_plan <= replica.built, "I4: a request names a plan that was not built"


def _check_ledger(replica: Replica) -> None:
    ledger = replica.ledger
    brought = 0 if replica.cache is None else sum([node.brought for node in replica.cache.tree])
    assert ledger.brought == brought, (
        f"I17: {ledger.brought} brought pages counted, {brought} in the tree"
    )
    under_way = replica.tickets.pages_under_way
    assert min((under_way, *ledger.unused.values())) >= 0, (
        f"I17: less than nothing: {ledger}, {under_way} under way"
    )


def _check_counts(replica: Replica) -> None:
    running = len(replica.running)
    assert running + len(replica.waiting) == len(replica.requests), (
        "I6: requests are lost or in two places"
    )
    if replica.cache is not None:
        assert running + replica.free_slots == replica.config.max_running, "I6: slots"


def _check_places(replica: Replica) -> None:
    slots = {request.slot for request in replica.running}
    assert len(slots) == len(replica.running), "I6: a slot is used twice"
    waiting = {request.request_id for request in replica.waiting}
    running = {request.request_id for request in replica.running}
    assert not waiting & running and waiting | running == set(replica.requests), (
        "I6: requests are lost or in two places"
    )
    for request in replica.waiting:
        assert request.state is RequestState.WAITING and not request.table and not request.nodes, (
            "I6: a waiting request holds pages"
        )
    unasked = set(map(id, replica.unasked))
    for request in replica.waiting if replica.config.has_store else ():
        assert request.phase is not Phase.NOT_ASKED or id(request) in unasked, (
            "I15: a waiting request would never ask the store"
        )
    for hash, request in replica.computing.items():
        assert request.state is RequestState.RUNNING, (
            "I9: a request that does not run is to compute a page"
        )
        assert hash in request.hashes[len(request.nodes) :], "I9: the page was computed already"


def _check_requests(replica: Replica) -> None:
    page_size = replica.config.page_size
    sampling = {id(request) for record in replica.in_flight for request in record.sampling}
    ready = Counter(id(request) for request in replica.decodes)
    for request in replica.running:
        assert request.computed <= len(request.table) * page_size, "I7: computed beyond the table"
        assert request.sent <= len(request.table) and len(request.nodes) <= len(request.table), (
            "I7: table shorter than told"
        )
        assert request.overtaken <= overtakes_allowed(request), (
            "I16: hits go ahead of a prompt again and again"
        )
        twins = {twin.index for twin in request.twins}
        for index, node in enumerate(request.nodes):
            assert (request.table[index] == node.page) != (index in twins), (
                f"I7: table entry {index} is not its node's page"
            )
        if request.prefilling:
            assert request.remaining and not request.awaits_token and not ready[id(request)], (
                "I8: a prefill with nothing to do"
            )
        elif request.awaits_token:
            assert id(request) in sampling and not ready[id(request)], (
                "I8: no plan in flight brings the token"
            )
        else:
            assert ready[id(request)] == 1 and request.remaining == 1, (
                "I8: nothing will wake a decode"
            )
    assert len(ready) <= len(replica.running) and sum(ready.values()) == len(ready), (
        "I8: a decode is queued twice"
    )
