"""What runs next: one plan out of the running requests.

    decodes   requests whose last token is known, longest waiting first; at most a pp-th of them in one plan, so that all
              stages have some at the same time
    hits      prefills with at most a page left: scheduled like decodes, outside the chunk budget
    chunks    the other prefills in order of admission, in whole pages, within one chunk budget

Hits do not ride with chunks, which would keep them in every stage for as long as a chunk takes: they go ahead in a plan of their own,
which costs the chunks one pass over the weights. Each prompt bears that once for every begun `OVERTAKE_WORK` of its own, however many
hits there are: a 32nd of what it takes itself, or one pass. Then hits ride with its chunks.

A chunk may be built while the same prompt's previous chunk is still in flight, since every rank applies plans in order.
"""

import math
from dataclasses import dataclass, field

from forebay.core.admission import take_back_ready
from forebay.core.digest import PlanDigest
from forebay.core.lifecycle import RequestState
from forebay.core.messages import Backup, Opening, Piece, Plan, Remap
from forebay.core.pace import PASS_WORK, work_of
from forebay.core.page_cache import PageCache
from forebay.core.replica import InFlight, Replica
from forebay.core.request import Request, Twin
from forebay.core.transfers.backup import WRITE_BACK_FREE_SHARE, WritePolicy
from forebay.core.tree import DEVICE, HOST, NONE
from forebay.pages.hashing import TOKEN_BYTES

OVERTAKE_WORK = 32 * PASS_WORK


@dataclass(slots=True)
class _Draft:
    """The plan under construction."""

    number: int
    digest: PlanDigest
    openings: list[Opening] = field(default_factory=list)
    remaps: list[Remap] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sampling: list[Request] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    work: float = 0.0
    tokens: int = 0
    is_ahead: bool = False
    scoring: list[tuple[int, str]] = field(default_factory=list)


def build_plan(replica: Replica, epoch: int, now: float) -> Plan | None:
    """The next plan, or None if the pipeline is full or nothing can run."""
    cache, in_flight, pp = replica.cache, replica.in_flight, replica.config.pp
    assert cache is not None
    if len(in_flight) >= 2 * pp or sum(not record.is_ahead for record in in_flight) >= pp:
        return None
    draft = _Draft(replica.built + 1, PlanDigest(replica.digest, replica.built + 1))
    _add_decodes(replica, draft)
    _add_prefills(replica, draft)
    if not draft.pieces:
        return None
    plan = Plan(
        epoch=epoch,
        number=draft.number,
        openings=tuple(draft.openings),
        remaps=tuple(draft.remaps),
        pieces=tuple(draft.pieces),
        digest=draft.digest.value,
        loads=replica.loads.carry(cache, draft.number),
        backup=_start_backup(replica),
    )
    replica.built = plan.number
    replica.digest = plan.digest
    waits_for = set(range(replica.config.ranks))
    replica.in_flight.append(
        InFlight(
            plan.number,
            now,
            draft.work,
            waits_for,
            draft.slots,
            draft.sampling,
            draft.requests,
            draft.tokens,
            draft.is_ahead,
            scoring=draft.scoring,
        )
    )
    return plan


def _add_decodes(replica: Replica, draft: _Draft) -> None:
    decoding = len([request for request in replica.running if not request.prefilling])
    quota = -(-decoding // replica.config.pp)
    decodes, page_size = replica.decodes, replica.config.page_size
    while quota and decodes:
        request = decodes[0]
        has_page = request.computed < len(request.table) * page_size and not request.twins
        if not has_page and not _ensure_page(replica, request):
            if request.state is RequestState.RUNNING:
                return  # there is no page to be had before a plan retires
            continue  # it was the youngest, and was retracted itself
        decodes.popleft()
        _add_piece(replica, draft, request, 1)
        quota -= 1


def _add_prefills(replica: Replica, draft: _Draft) -> None:
    """Prefills have had their pages since admission."""
    page_size = replica.config.page_size
    prefills = [request for request in replica.running if request.prefilling]
    hits = [request for request in prefills if request.remaining <= page_size]
    chunked = [request for request in prefills if request.remaining > page_size]
    for request in hits:
        _add_piece(replica, draft, request, request.remaining)
    if (
        hits
        and chunked
        and replica.config.hits_ahead
        and all(request.overtaken < overtakes_allowed(request) for request in chunked)
    ):
        draft.is_ahead = True
        for request in chunked:
            request.overtaken += 1
        return
    budget = replica.config.chunk_tokens
    for request in chunked:
        count = min(request.remaining, budget)
        if count < request.remaining:
            count -= count % page_size  # it starts on a page border and so ends on one
        if count:
            _add_piece(replica, draft, request, count)
            budget -= count


def overtakes_allowed(request: Request) -> int:
    """Plans of hits that may go ahead of its chunks from its admission on."""
    return math.ceil(work_of(request.length - request.cached, request.cached) / OVERTAKE_WORK)


def _ensure_page(replica: Replica, request: Request) -> bool:
    """A page for the request's next position, retracting younger requests if need be (rule R12)."""
    cache = replica.cache
    assert cache is not None
    if request.twins:
        _settle_twins(replica, request)
    if request.computed < len(request.table) * replica.config.page_size:
        return True
    while (pages := cache.allocate(1)) is None:
        if cache.obtainable and take_back_ready(replica, request):
            continue
        idle = [other for other in replica.running if other.last_plan <= cache.retired]
        if not idle:
            return False
        victim = max(idle, key=lambda other: other.order)
        replica.retract(victim)
        if victim is request:
            return False
    request.table += pages
    return True


def _settle_twins(replica: Replica, request: Request) -> None:
    """Switch twins whose plan has retired to their node's page; the duplicate is free once plans built so far have retired.

    The workers learn of it with the request's next piece, before anything of that slot runs (rule R8).
    """
    cache = replica.cache
    assert cache is not None
    ripe = [twin for twin in request.twins if twin.plan <= cache.retired]
    for twin in ripe:
        duplicate, page = request.table[twin.index], request.nodes[twin.index].page
        request.table[twin.index] = page
        request.remaps.append((twin.index, page))
        cache.release((), (duplicate,), replica.built)
    if ripe:
        request.twins = [twin for twin in request.twins if twin.plan > cache.retired]


def _add_piece(replica: Replica, draft: _Draft, request: Request, count: int) -> None:
    """Runs for every token of every decode, so what is rarely needed is asked for first."""
    page_size, slot, sent = replica.config.page_size, request.slot, request.sent
    start = request.computed
    stop = start + count
    in_nodes = len(request.nodes) * page_size
    packed = request.packed
    sample = stop * TOKEN_BYTES == len(packed)
    tokens = bytes(packed[start * TOKEN_BYTES : stop * TOKEN_BYTES])
    if not sent:
        draft.openings.append(_opening(request, start))
    if request.remaps:
        for index, page in request.remaps:
            draft.remaps.append(Remap(slot, index, page))
            draft.digest.remap(slot, index, page)
        request.remaps.clear()
    pages: tuple[int, ...] = ()
    if stop > sent * page_size:
        request.sent = -(-stop // page_size)
        pages = tuple(request.table[sent : request.sent])
    write_from = start if start > in_nodes else in_nodes
    draft.pieces.append(Piece(slot, start, tokens, pages, write_from, sample))
    draft.digest.piece(slot, start, tokens, pages, request.sent, write_from, sample)
    draft.work += work_of(count, start)
    draft.tokens += count
    draft.requests.append(request)
    request.computed = stop
    request.last_plan = draft.number
    if request.params.prompt_logprobs is not None and request.scores:
        draft.scoring.append((slot, request.request_id))
    if sample:
        request.prefilling = False
        request.awaits_token = True
        draft.slots.append(slot)
        draft.sampling.append(request)
    if stop >= in_nodes + page_size:
        _insert_nodes(replica, request, draft.number)


def _opening(request: Request, start: int) -> Opening:
    return Opening(
        slot=request.slot,
        request_id=request.request_id,
        params=request.params,
        eos=request.eos,
        prompt_tokens=request.prompt_tokens,
        outputs=request.emitted,
        history=_history(request, start),
    )


def _history(request: Request, start: int) -> bytes:
    """What the sampler must know of the tokens before ``start``."""
    params = request.params
    with_outputs = params.needs_outputs and start > request.prompt_tokens
    return request.tokens(0, start) if params.has_penalties or with_outputs else b""


def _insert_nodes(replica: Replica, request: Request, number: int) -> None:
    """Pages that plan ``number`` fills become nodes, for later plans to match (rule R6)."""
    cache = replica.cache
    assert cache is not None
    for index in range(len(request.nodes), request.computed // replica.config.page_size):
        hash = request.extend_hashes()[index]
        node = cache.tree.get(hash)
        if node is None:
            parent = request.nodes[-1] if request.nodes else None
            node = cache.adopt(hash, parent, request.table[index])
            node.plan = number
            node.private = request.no_store
            if replica.config.write_policy is WritePolicy.WRITE_THROUGH:
                replica.backups.want(node)
        elif node.pages[DEVICE] == NONE:  # it was not worth loading, and has been computed again
            cache.readopt(node, request.table[index])
            node.plan = number
        else:
            cache.pin((node,))
            request.twins.append(Twin(index, number))
        request.nodes.append(node)
        if replica.computing.get(hash) is request:
            del replica.computing[hash]


def _start_backup(replica: Replica) -> Backup | None:
    cache = replica.cache
    assert cache is not None
    if replica.config.write_policy is WritePolicy.WRITE_BACK:
        _want_oldest(replica, cache)
    return replica.backups.start(cache, replica.config.ranks)


def _want_oldest(replica: Replica, cache: PageCache) -> None:
    """Write-back: while few device pages are free, what eviction would take next is to be saved first, with its ancestors."""
    if cache.device.free >= cache.device.capacity * WRITE_BACK_FREE_SHARE:
        return
    node = cache.tree.oldest(DEVICE)
    path = []
    kept = cache.residency.outlives_transfers
    while node is not None and node.pages[HOST] == NONE and (kept or not node.stored):
        path.append(node)
        node = node.parent
    for ancestor in reversed(path):
        replica.backups.want(ancestor)
