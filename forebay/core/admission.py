"""Who may run next (rule R12): match, pin and reserve in one step, or release everything."""

from collections.abc import Iterator

from forebay.core.messages import Usage
from forebay.core.replica import Replica
from forebay.core.request import Request

PREFIX_WINDOW = 64


def admit(replica: Replica, now: float) -> None:
    """Admit waiting requests in order until slots or pages run out; the first that does not fit stops all behind it.

    A request whose next page is just being computed by a running one waits a plan without holding up others (rule R8).
    """
    for request in _candidates(replica):
        if len(replica.running) >= replica.config.max_running:
            return
        if _next_page_is_coming(replica, request):
            continue
        if not _reserve(replica, request):
            return
        replica.start_running(request)
        if request.usage is None:
            cached = request.computed
            request.usage = Usage(cached_device=cached, queue_s=now - request.arrived_at)
            replica.cached_device_tokens += cached


def _candidates(replica: Replica) -> Iterator[Request]:
    """Waiting requests by priority and arrival; with ``prefix_first`` the longest cached prefix first among the next few."""
    if not replica.config.prefix_first:
        return iter(replica.waiting)
    window = list(replica.waiting)[:PREFIX_WINDOW]
    cache = replica.cache
    assert cache is not None
    cached = {request.order: len(cache.tree.match(request.extend_hashes())) for request in window}
    return iter(sorted(window, key=lambda request: (request.order[0], -cached[request.order], request.order[1])))


def _next_page_is_coming(replica: Replica, request: Request) -> bool:
    cache = replica.cache
    assert cache is not None
    for hash in request.extend_hashes():
        if cache.tree.get(hash) is None:
            return hash in replica.computing
    return False


def _reserve(replica: Replica, request: Request) -> bool:
    """Pin the cached prefix and take pages for the rest of the known tokens, if one more page could be had besides."""
    cache = replica.cache
    assert cache is not None
    path = cache.tree.match(request.extend_hashes())
    pages = replica.pages_for(request.length)
    wanted = min(pages + 1, replica.pages_at_most(request))
    cache.pin(path)
    if wanted - len(path) > cache.obtainable:
        cache.release(path, (), cache.retired)
        return False
    own = cache.allocate(pages - len(path))
    assert own is not None
    request.nodes = path
    request.table = [node.page for node in path] + own
    # The last token is always computed (rule R7), even if its page is cached.
    request.computed = min(len(path) * replica.config.page_size, request.length - 1)
    return True
