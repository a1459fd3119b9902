"""Room in holders' segments: taking it, freeing it, and what is evicted for it (rules ST1 and ST7).

Order of eviction at one holder: prefetched objects nobody read in time, then durable ones by last use (also those whose SSD copy was
evicted: they had their time). Those still on their way to the log are never evicted, unless the holder has no working SSD. An object
under a lease is passed over; one that must go at once (removed, replaced) leaves the tables but keeps its range, DRAINING, until its
last lease has ended.
"""

from collections.abc import Iterator

from forebay.store.master.records import Holder, Kind, Lane, MemoryReplica, Object, Send, State
from forebay.store.master.transitions import Cause, ReplicaState, move
from forebay.store.wire.messages import MAX_ENTRIES, Retire

VOLATILE, GONE, RETIRE = (
    Kind.VOLATILE,
    ReplicaState.GONE,
    Cause.RETIRE,
)  # an enum's member is slow to look up
MAX_PASSED_OVER = 256  # leased objects skipped per lane and eviction before it is called full
EVICTED = (Kind.PREFETCHED, Kind.DURABLE)
EVICTED_WITHOUT_LOG = (*EVICTED, Kind.VOLATILE)


def allocate(state: State, now: float, holder: Holder, need: int) -> int | None:
    """The offset of room for a `footprint` of ``need`` bytes, evicting as far as the watermarks say; None if there is none now."""
    extents, config = holder.extents, state.config
    capacity = extents.capacity
    if need > capacity:
        return None
    if capacity - extents.free_bytes + need > config.high_watermark * capacity:
        kept = max(0, int(config.low_watermark * capacity) - need)
        for victim in _victims(now, holder):
            evict(state, victim)
            if capacity - extents.free_bytes <= kept:
                break
    offset = extents.take(need)
    if offset is None:
        for victim in _victims(now, holder):
            evict(state, victim)
            offset = extents.take(need)
            if offset is not None:
                break
    return offset


def allocate_prefetch(state: State, now: float, holder: Holder, need: int) -> int | None:
    """Room for a prefetched object: within its share like any put, beyond it only in place of its own unleased kind."""
    share = int(state.config.prefetch_share * holder.extents.capacity)
    if need > share:
        return None
    while holder.prefetched_bytes() + _promoting_bytes(state, holder) + need > share:
        victim = _oldest(now, holder, Kind.PREFETCHED)
        if victim is None:
            return None
        evict(state, victim)
    return allocate(state, now, holder, need)


def evict(state: State, replica: MemoryReplica) -> None:
    """Drop one unleased memory replica; the object stays if it is anywhere else."""
    object, lane = replica.object, replica.lane
    state.count("evicted")
    state.count("evicted_bytes", object.length)
    if lane is not None and lane.kind is VOLATILE:
        state.count("evicted_unlogged")
    drop_memory(state, replica, lease_until=0.0, now=0.0)
    if not object.memory and not object.ssd:
        del object.tenant.objects[object.key]


def drop_memory(state: State, replica: MemoryReplica, lease_until: float, now: float) -> None:
    """Take a COMPLETE replica from its object, and free its range now or when ``lease_until`` has passed."""
    object, holder = replica.object, replica.holder
    memory, lane = object.memory, replica.lane
    object.memory = (
        () if memory == (replica,) else tuple([other for other in memory if other is not replica])
    )
    object.unhear(holder)
    assert lane is not None
    lane.remove(replica)
    if lease_until > now:
        move(replica, Cause.DRAIN)
        replica.object = _ghost(object, lease_until)
        holder.draining[replica.stamp] = replica
    else:
        move(replica, RETIRE)
        free(state, replica)


def free(state: State, replica: MemoryReplica) -> None:
    """The range of a replica that is GONE: back to the free space, and its header to be retired."""
    assert replica.state is GONE
    give_back(replica)
    if replica.holder.present:
        _retire(state, replica.holder.session, (replica.offset, replica.stamp))


def _retire(state: State, session: int, header: tuple[int, int]) -> None:
    """One message for all that goes in a row, as it does when a watermark is reached."""
    last = state.out[-1] if state.out else None
    if (
        type(last) is Send
        and last.session == session
        and type(last.message) is Retire
        and len(last.message.ranges) < MAX_ENTRIES
    ):
        last.message.ranges.append(header)
    else:
        state.send(session, Retire([header]))


def give_back(replica: MemoryReplica) -> None:
    replica.holder.extents.give(replica.offset, replica.size)
    replica.object.tenant.memory_bytes -= replica.size


def take_note(replica: MemoryReplica) -> None:
    """Its range was just allocated: the tenant pays for it."""
    replica.object.tenant.memory_bytes += replica.size


def list_memory(state: State, replica: MemoryReplica, kind: Kind | None = None) -> None:
    """A replica became COMPLETE: into its lane, as the most recently used."""
    object = replica.object
    object.memory = (*object.memory, replica)
    lanes = replica.holder.lanes_of(object.tenant.name)
    lane = lanes.of(kind) if kind is not None else lanes.durable if object.ssd else lanes.volatile
    lane.append(replica, state.new_tick())


def relist(object: Object) -> None:
    """An object is durable now, or never will be: its memory replicas may be evicted, and keep their place in the order of use."""
    for replica in object.memory:
        lane = replica.lane
        assert lane is not None
        if lane.kind is VOLATILE:
            tick = replica.tick
            lane.remove(replica)
            _insert_by_tick(replica.holder.lanes_of(object.tenant.name).durable, replica, tick)


def touch(state: State, replica: MemoryReplica) -> None:
    """A use by get: most recently used, and no longer merely prefetched."""
    lane = replica.lane
    assert lane is not None
    lanes = replica.holder.lanes_of(replica.object.tenant.name)
    lane.remove(replica)
    (lanes.durable if lane.kind is Kind.PREFETCHED else lane).append(replica, state.new_tick())


def free_drained(state: State, now: float) -> bool:
    """Free ranges whose last lease has ended; True if there were any."""
    found = False
    for holder in state.holders.values():
        for replica in [one for one in holder.draining.values() if one.object.lease_until <= now]:
            del holder.draining[replica.stamp]
            move(replica, Cause.FREE)
            free(state, replica)
            found = True
    return found


def evict_tenant(state: State, now: float, tenant_name: str, excess: int) -> int:
    """Evict up to ``excess`` bytes of one tenant's oldest durable objects, over all holders; what was freed."""
    freed = 0
    while freed < excess:
        heads = [
            replica
            for holder in state.usable_holders()
            if tenant_name in holder.lanes
            for kind in EVICTED
            if (replica := _first_evictable(now, holder.lanes[tenant_name].of(kind))) is not None
        ]
        if not heads:
            break
        victim = min(heads, key=lambda replica: replica.tick)
        freed += victim.size
        evict(state, victim)
    return freed


def _victims(now: float, holder: Holder) -> Iterator[MemoryReplica]:
    """What may go at one holder, in order; each is evicted before the next is asked for."""
    for kind in EVICTED if holder.ssd_ok else EVICTED_WITHOUT_LOG:
        while (victim := _oldest(now, holder, kind)) is not None:
            yield victim


def _oldest(now: float, holder: Holder, kind: Kind) -> MemoryReplica | None:
    """The least recently used evictable replica of one kind, over tenants."""
    oldest: MemoryReplica | None = None
    for lanes in holder.lanes.values():
        lane = lanes.of(kind)
        head = _first_evictable(now, lane) if lane.head is not None else None
        if head is not None and (oldest is None or head.tick < oldest.tick):
            oldest = head
    return oldest


def _first_evictable(now: float, lane: Lane) -> MemoryReplica | None:
    replica, kind = lane.head, lane.kind
    for _ in range(MAX_PASSED_OVER + 1):
        if replica is None:
            return None
        object = replica.object
        expendable = (
            kind is VOLATILE or not object.ssd or object.durable()
        )  # not while its log is away
        if expendable and object.lease_until <= now:
            return replica
        replica = replica.after
    return None


def _promoting_bytes(state: State, holder: Holder) -> int:
    return sum(
        task.replica.size
        for task in state.tasks.values()
        if task.replica is not None and task.holder is holder
    )


def _insert_by_tick(lane: Lane, replica: MemoryReplica, tick: int) -> None:
    """Objects become durable nearly in the order they were used, so the place is near the tail."""
    later = lane.tail
    if later is None or later.tick < tick:
        lane.append(replica, tick)
        return
    while later.before is not None and later.before.tick > tick:
        later = later.before
    replica.lane, replica.tick, replica.before, replica.after = lane, tick, later.before, later
    if later.before is None:
        lane.head = replica
    else:
        later.before.after = replica
    later.before = replica
    lane.bytes += replica.size


def _ghost(object: Object, lease_until: float) -> Object:
    """Stands for an object that is no longer listed while its range drains."""
    ghost = Object(object.tenant, object.key, object.generation, object.length)
    ghost.lease_until = lease_until
    return ghost


def ranges(holder: Holder, state: State) -> Iterator[MemoryReplica]:
    """Every replica that holds a range of ``holder``: for inventories and invariants, O(objects)."""
    for lanes in holder.lanes.values():
        for lane in (lanes.volatile, lanes.durable, lanes.prefetched):
            yield from lane
    yield from unlisted(holder, state)


def unlisted(holder: Holder, state: State) -> Iterator[MemoryReplica]:
    """Those of them that no object lists: draining, being put, being promoted. Few."""
    yield from holder.draining.values()
    for tenant in state.tenants.values():
        for put in tenant.pending.values():
            yield from (replica for replica in put.object.memory if replica.holder is holder)
    yield from (
        task.replica
        for task in state.tasks.values()
        if task.replica is not None and task.holder is holder
    )
