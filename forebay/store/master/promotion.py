"""SSD -> DRAM tasks, for both triggers one chain: register -> alloc_start -> (holder: read, write) -> done.

While a task lives it pins its object's SSD source and counts against one cap. A prefetch gets its read lease when it is done and
not before, so a failed promotion leaves no lease behind.
"""

from forebay.store.backend import Status
from forebay.store.master import space
from forebay.store.master.extents import footprint
from forebay.store.master.records import (
    HEADER_BYTES,
    LEASE_SLACK_S,
    Holder,
    Kind,
    MemoryReplica,
    Object,
    State,
    Task,
    Trigger,
)
from forebay.store.master.transitions import Cause, move
from forebay.store.wire.messages import (
    Allocated,
    AllocStart,
    Allotment,
    Prefetchable,
    PrefetchCode,
    Promote,
    PromotionDone,
    RegisterPrefetch,
)

MAX_COMMIT_LEASE_S = 30.0


def register_prefetch(
    state: State, now: float, holder: Holder, tenant: str, key: bytes, hint_s: float
) -> tuple[PrefetchCode, int]:
    """May ``holder`` promote ``key``? The code and the task's number (0 unless OK). The checks
    stand in the order in which a holder is told of them."""
    owner = state.tenants.get(tenant)
    if not state.config.ssd_prefetch or not holder.usable:
        return PrefetchCode.UNAVAILABLE_IN_CURRENT_STATUS, 0
    known = owner.objects.get(key) if owner is not None else None
    in_flight = owner is not None and key in owner.pending
    if known is None and not in_flight:
        settled = state.absent_code(now) is Status.NOT_FOUND
        return (
            PrefetchCode.OBJECT_NOT_FOUND if settled else PrefetchCode.UNAVAILABLE_IN_CURRENT_STATUS
        ), 0
    if known is None or in_flight:
        return PrefetchCode.REPLICA_IS_NOT_READY, 0
    if known.memory or known.task is not None:
        return PrefetchCode.PROMOTION_ALREADY_EXISTS, 0
    if not known.durable():
        return PrefetchCode.REPLICA_IS_NOT_READY, 0
    if all(copy.holder is not holder for copy in known.ssd):
        return PrefetchCode.INVALID_PARAMS, 0
    if len(state.tasks) >= state.config.inflight_promotions or not _within_quota(known):
        return PrefetchCode.KEYS_ULTRA_LIMIT, 0
    return PrefetchCode.OK, _create(state, now, known, holder, Trigger.PREFETCH, hint_s).number


def register_many(
    state: State, now: float, holder: Holder, message: RegisterPrefetch
) -> Prefetchable:
    answers = [
        register_prefetch(state, now, holder, message.tenant, key, message.hint_s)
        for key in message.keys
    ]
    for code, _ in answers:
        state.count(f"prefetch_{code.name.lower()}")
    return Prefetchable(
        message.call, bytes(code for code, _ in answers), [task for _, task in answers]
    )


def on_hit(state: State, now: float, object: Object) -> None:
    """A get found ``object`` on SSD only: promote it if it is asked for often enough and there is room without evicting."""
    if not state.config.promotion_on_hit:
        return
    popular = (
        state.sketch.add(object.tenant.name.encode() + b"\0" + object.key)
        >= state.config.hit_threshold
    )
    holder = next((copy.holder for copy in object.ssd if copy.holder.usable), None)
    if not popular or holder is None or object.memory or object.task is not None:
        return
    if holder.used + object.length > state.config.high_watermark * holder.extents.capacity:
        state.count("promotion_gated")
        return
    if not _within_quota(object):
        state.count("promotion_over_quota")
        return
    if len(state.tasks) >= state.config.inflight_promotions or object.key in object.tenant.pending:
        return
    task = _create(state, now, object, holder, Trigger.HIT, 0.0)
    state.send(holder.session, Promote(task.number, object.tenant.name, object.key))


def alloc_start(state: State, now: float, holder: Holder, message: AllocStart) -> Allocated:
    return Allocated(
        message.call,
        [_allot(state, now, holder, state.tasks.get(number)) for number in message.tasks],
    )


def done(state: State, now: float, holder: Holder, message: PromotionDone) -> None:
    """The holder wrote the replica (``ok``), or gave up. An unknown task had timed out: its memory is retired already."""
    task = state.tasks.get(message.task)
    if task is None or task.holder is not holder:
        return
    object, replica = task.object, task.replica
    listed = object.tenant.objects.get(object.key) is object
    if not message.ok or replica is None or not listed:
        fail(state, task)
        return
    _close(state, task)
    move(replica, Cause.COMMIT)
    task.replica = None
    prefetched = task.trigger is Trigger.PREFETCH
    space.list_memory(state, replica, Kind.PREFETCHED if prefetched else None)
    if prefetched:
        lease_s = min(MAX_COMMIT_LEASE_S, max(state.config.lease_s, task.hint_s))
        object.lease_until = max(object.lease_until, now + lease_s + LEASE_SLACK_S)
    state.count(f"promoted_{task.trigger.name.lower()}")
    state.count("promoted_bytes", object.length)


def fail(state: State, task: Task) -> None:
    """End a task without a replica: its room goes back, its source is free, no lease is left."""
    _close(state, task)
    if task.replica is not None:
        move(task.replica, Cause.REVOKE)
        space.free(state, task.replica)
        task.replica = None
    state.count(f"promotion_failed_{task.trigger.name.lower()}")


def expire(state: State, now: float) -> bool:
    late = [task for task in state.tasks.values() if task.deadline <= now]
    for task in late:
        fail(state, task)
    return bool(late)


def holder_lost(state: State, holder: Holder) -> None:
    for task in [task for task in state.tasks.values() if task.holder is holder]:
        fail(state, task)


def _create(
    state: State, now: float, object: Object, holder: Holder, trigger: Trigger, hint_s: float
) -> Task:
    task = Task(
        state.new_number(), object, holder, trigger, now + state.config.task_timeout_s, hint_s
    )
    state.tasks[task.number] = task
    object.task = task
    return task


def _close(state: State, task: Task) -> None:
    del state.tasks[task.number]
    task.object.task = None


def _within_quota(object: Object) -> bool:
    """Whether its tenant may have it in DRAM too. Nothing of the tenant goes for it: a promotion is a convenience, unlike a put."""
    tenant = object.tenant
    return (
        tenant.quota is None
        or tenant.memory_bytes + footprint(object.length, HEADER_BYTES) <= tenant.quota
    )


def _allot(state: State, now: float, holder: Holder, task: Task | None) -> Allotment:
    if task is None or task.holder is not holder or task.replica is not None:
        return Allotment(PrefetchCode.OBJECT_NOT_FOUND)
    object = task.object
    if object.tenant.objects.get(object.key) is not object or object.memory:
        fail(state, task)
        return Allotment(PrefetchCode.OBJECT_NOT_FOUND)
    if not _within_quota(object):
        fail(state, task)
        return Allotment(PrefetchCode.KEYS_ULTRA_LIMIT)
    room = space.allocate_prefetch if task.trigger is Trigger.PREFETCH else space.allocate
    offset = room(state, now, holder, footprint(object.length, HEADER_BYTES))
    if offset is None:
        fail(state, task)
        return Allotment(PrefetchCode.NO_AVAILABLE_HANDLE)
    task.replica = MemoryReplica(object, holder, offset, state.new_generation())
    move(task.replica, Cause.PROMOTE)
    space.take_note(task.replica)
    return Allotment(PrefetchCode.OK, object.generation, object.length, offset, task.replica.stamp)
