"""Who may run next (rule R12): match, pin and reserve in one step, or release everything."""

import math
from collections.abc import Iterator, Sequence

from forebay.core.messages import Usage
from forebay.core.pace import work_of
from forebay.core.page_cache import PageCache
from forebay.core.replica import Replica
from forebay.core.request import Request
from forebay.core.transfers.backup import SELECTIVE_HITS, WritePolicy
from forebay.core.transfers.tickets import release_ready
from forebay.core.tree import DEVICE, HOST, NONE, Node

PREFIX_WINDOW = 64
HEAD_START = 0.15


def admit(replica: Replica, now: float) -> None:
    """Admit waiting requests in order until slots or pages run out; the first that does not fit stops all behind it.

    A request whose next page is just being computed by a running one waits a plan without holding up others (rule R8). Those that ask
    or fetch are passed over, but with a head start.
    """
    cache = replica.cache
    assert cache is not None
    running, most = replica.running, replica.config.max_running
    if not replica.waiting or len(running) >= most or any([other.suspect for other in running]):
        return
    urgency: float | None = (
        None  # of those that ask or fetch; looked up once, and only if somebody may give way to them
    )
    for request in _candidates(replica):
        if len(running) >= most:
            return
        if replica.tickets.waits_at_best(request) and _has_room(replica, request):
            replica.tickets.leave(request, cache)
        if replica.tickets.waits(request):
            continue
        if _next_page_is_coming(replica, request):
            continue
        until = _gives_way_until(replica, request)
        if now < until:
            if urgency is None:
                urgency = next(
                    (other.order[0] for other in replica.waiting if replica.tickets.waits(other)),
                    math.inf,
                )
            if urgency <= request.order[0]:
                replica.gives_way_until = min(until, replica.gives_way_until or until)
                continue
        if request.suspect and running:
            return  # its turn has come, and it runs alone
        loads = _reserve(replica, request)
        if loads is None:
            return
        fetched = set(map(id, request.ready))
        release_ready(request, cache)
        replica.start_running(request)
        _want_backups(replica, request)
        if request.usage is None:
            _account(replica, request, [id(node) in fetched for node in loads], now)
        if request.suspect:
            return


def _candidates(replica: Replica) -> Iterator[Request]:
    """Waiting requests by priority and arrival; with ``prefix_first`` the longest cached prefix first among the next few."""
    if not replica.config.prefix_first:
        return iter(replica.waiting)
    window = list(replica.waiting)[:PREFIX_WINDOW]
    cache = replica.cache
    assert cache is not None
    cached = {request.order: len(cache.tree.match(request.extend_hashes())) for request in window}
    return iter(
        sorted(
            window, key=lambda request: (request.order[0], -cached[request.order], request.order[1])
        )
    )


def _has_room(replica: Replica, request: Request) -> bool:
    """Whether `_reserve` would find device pages, wherever the prefix comes from: what is loaded takes as many as what is computed."""
    cache = replica.cache
    assert cache is not None
    held = [node for node in _usable_prefix(request, cache) if node.pages[DEVICE] != NONE]
    unpinned = sum(not node.pins[DEVICE] for node in held)
    return _wanted_pages(replica, request) - len(held) <= cache.obtainable - unpinned


def _usable_prefix(request: Request, cache: PageCache) -> list[Node]:
    """What is cached of its prefix; nothing for a request whose prompt is scored, since KV does not tell its logits."""
    hashes = request.extend_hashes()
    return [] if request.scores else cache.tree.match(hashes)


def _wanted_pages(replica: Replica, request: Request) -> int:
    """For the tokens known now and one page more, as far as the request will ever need it."""
    return min(replica.pages_for(request.length) + 1, replica.pages_at_most(request))


def _gives_way_until(replica: Replica, request: Request) -> float:
    """How long ``request`` lets those go first that ask or fetch, whoever came first, unless they are of lower priority.

    A chunk cannot be interrupted and what has been fetched runs in next to no time, so it is worth a `HEAD_START` of what the chunk
    will take in the first stage, from when it came. Not on the staged route, where a fetch waits for chunks itself.
    """
    config = replica.config
    cached = config.page_size * request.probe
    left = request.length - cached
    if config.staged or not config.hits_ahead or left <= config.page_size:
        return -math.inf  # what is left is as quick as what is fetched
    work = work_of(min(left, config.chunk_tokens), cached)
    return request.arrived_at + HEAD_START * replica.first_stage.predict(work)


def _next_page_is_coming(replica: Replica, request: Request) -> bool:
    cache = replica.cache
    assert cache is not None
    if request.scores:
        return False
    hashes, tree = request.extend_hashes(), cache.tree
    # The first missing page has rarely moved far since the last look.
    while request.probe < len(hashes) and tree.get(hashes[request.probe]) is not None:
        request.probe += 1
    while request.probe and tree.get(hashes[request.probe - 1]) is None:
        request.probe -= 1
    return request.probe < len(hashes) and hashes[request.probe] in replica.computing


def _reserve(replica: Replica, request: Request) -> list[Node] | None:
    """Pin the cached prefix, begin to load what of it is in host memory only, and take device pages for that and for the rest of
    the known tokens, if one more page could be had besides. The nodes to be loaded, or None and nothing has changed."""
    cache = replica.cache
    assert cache is not None
    path = _usable_prefix(request, cache)
    loads = [node for node in path if node.pages[DEVICE] == NONE]
    if 0 < len(loads) * replica.config.page_size <= replica.config.load_back_threshold:
        path = path[: path.index(loads[0])]
        loads = []
    pages = replica.pages_for(request.length)
    held = [node for node in path if node.pages[DEVICE] != NONE]
    cache.pin(held)
    for node in loads:
        cache.tree.pin(
            node, HOST
        )  # before device pages are taken, or making room could take what is to be loaded
    wanted = _wanted_pages(replica, request) - len(held)
    own = None
    if wanted <= cache.obtainable:
        own = cache.allocate(pages - len(held))
        while own is None and take_back_ready(replica, request):
            own = cache.allocate(pages - len(held))
    cache.tree.unpin(loads, HOST)
    if own is None:
        cache.release(held, (), cache.retired)
        return None
    replica.loads.begin(cache, loads, own[: len(loads)])
    request.nodes = path
    request.table = [node.page for node in path] + own[len(loads) :]
    # The last token is always computed (rule R7), even if its page is cached.
    request.cached = request.computed = min(
        len(path) * replica.config.page_size, request.length - 1
    )
    return loads


def take_back_ready(replica: Replica, needs: Request) -> bool:
    """What a ticket has brought for the youngest waiting request is pinned no longer, when pins on host pages keep device pages that
    ``needs`` must have. The pages stay cached until they are evicted. False if there is nothing to take back."""
    cache = replica.cache
    assert cache is not None
    holders = [request for request in replica.waiting if request.ready and request is not needs]
    if not holders:
        return False
    release_ready(max(holders, key=lambda request: request.order), cache)
    return True


def _account(replica: Replica, request: Request, loads: Sequence[bool], now: float) -> None:
    """Where the prompt's KV came from, told once; a token that is computed although its page is cached counts for no tier.

    ``loads``: for each page that was loaded, whether the request's ticket had brought it from the store.
    """
    page_size = replica.config.page_size
    store = min(sum(loads) * page_size, request.computed)
    host = min((len(loads) - sum(loads)) * page_size, request.computed - store)
    device = request.computed - host - store
    request.usage = request.unsaid = Usage(
        cached_device=device, cached_host=host, cached_store=store, queue_s=now - request.arrived_at
    )
    replica.spans.append(request.queue_span(now))
    replica.cached_device_tokens += device
    replica.cached_host_tokens += host
    replica.cached_store_tokens += store


def _want_backups(replica: Replica, request: Request) -> None:
    """A hit may be what sends a page to host memory, or from there to the store, if it did not get there before."""
    policy = replica.config.write_policy
    for node in request.nodes:
        node.hits += 1
        node.private &= request.no_store
        second = policy is WritePolicy.WRITE_THROUGH_SELECTIVE and node.hits >= SELECTIVE_HITS
        if not request.no_store and (second or policy is WritePolicy.WRITE_THROUGH):
            replica.backups.want(node)
            if replica.config.has_store and replica.cache is not None and node.pages[HOST] != NONE:
                replica.stores.want(replica.cache, node)
