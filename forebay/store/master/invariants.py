"""What must hold in the master after every step. `check` is O(everything): tests and the simulator run it each time.

 1. Ranges of a holder (complete, writing, promoting, draining) are disjoint and tile its capacity together with its free extents.
 2. A tenant's ``memory_bytes`` is the sum over the ranges it pays for.
 3. Every listed object has a replica; all of its replicas are COMPLETE, its memory replicas at different holders.
 4. A memory replica is in exactly one lane while COMPLETE, of its tenant and holder, and in a VOLATILE one only without SSD copy.
 5. Ticks rise along a lane, and ``lane.bytes`` is the sum of its replicas.
 6. Tasks are within their cap; a task's object points back to it and has an SSD copy or is no longer listed.
 7. Generations and stamps are below ``next_generation``.
 8. A put in flight is owned by a living session and known to its tenant, and the other way round.
 9. Waiting puts are bounded, and their sessions hold no room for the keys they wait for.
10. Burials wait for present holders only, and those exist.
11. Unheard are exactly holders that have not completed an inventory with this master.
"""

from forebay.store.master import space
from forebay.store.master.records import Holder, Kind, Lane, State
from forebay.store.master.transitions import ReplicaState


def check(state: State) -> None:
    """Raises ``AssertionError`` naming the invariant."""
    for holder in state.holders.values():
        _ranges_tile(state, holder)
        for tenant, lanes in holder.lanes.items():
            for lane in (lanes.volatile, lanes.durable, lanes.prefetched):
                _lane(lane, tenant, holder)
    _tenants_pay(state)
    _objects(state)
    _tasks(state)
    _puts(state)
    for name in state.unheard.keys() & state.by_name.keys():
        assert not state.by_name[name].complete, (
            "11: a holder whose inventory is in is said to be unheard"
        )
    for burial in state.burials.values():
        assert burial.missing, "10: a burial with nothing missing was not finished"
        waited_for = {number for number, _ in burial.missing.values()}
        assert all(state.holders[number].present for number in waited_for), (
            "10: a burial waits for an absent holder"
        )
    known = {bury for burial in state.burials.values() for bury in burial.missing}
    assert known == set(state.buries), "10: numbers of buries"


def _ranges_tile(state: State, holder: Holder) -> None:
    taken = [(replica.offset, replica.size) for replica in space.ranges(holder, state)]
    position = 0
    for start, size in sorted(taken + holder.extents.ranges()):
        assert start == position, (
            f"1: holder {holder.number}: range at {start} where {position} was due"
        )
        position = start + size
    assert position == holder.extents.capacity, (
        f"1: holder {holder.number}: {position} of {holder.extents.capacity} accounted for"
    )


def _tenants_pay(state: State) -> None:
    due: dict[str, int] = dict.fromkeys(state.tenants, 0)
    for holder in state.holders.values():
        for replica in space.ranges(holder, state):
            due[replica.object.tenant.name] += replica.size
    assert due == {tenant.name: tenant.memory_bytes for tenant in state.tenants.values()}, (
        "2: memory_bytes"
    )


def _objects(state: State) -> None:
    for tenant in state.tenants.values():
        for key, found in tenant.objects.items():
            assert found.memory or found.ssd, f"3: {key!r} has no replica"
            states = [replica.state for replica in found.memory] + [
                copy.state for copy in found.ssd
            ]
            assert all(one is ReplicaState.COMPLETE for one in states), f"3: {key!r} is {states}"
            assert len({replica.holder.number for replica in found.memory}) == len(found.memory), (
                f"3: {key!r}"
            )
            assert found.generation < state.next_generation, "7: generation"
            for replica in found.memory:
                assert replica.object is found and replica.lane is not None, (
                    f"4: {key!r} is in no lane"
                )
                assert replica.stamp < state.next_generation, "7: stamp"


def _lane(lane: Lane, tenant: str, holder: Holder) -> None:
    total, tick = 0, -1
    for replica in lane:
        assert (
            replica.lane is lane
            and replica.holder is holder
            and replica.object.tenant.name == tenant
        ), "4: lane"
        assert replica.state is ReplicaState.COMPLETE and replica in replica.object.memory, (
            "4: a lane holds what is not complete"
        )
        assert lane.kind is not Kind.VOLATILE or not replica.object.ssd, "4: kind"
        assert replica.tick > tick, "5: ticks"
        total, tick = total + replica.size, replica.tick
    assert total == lane.bytes, "5: bytes"


def _tasks(state: State) -> None:
    assert len(state.tasks) <= state.config.inflight_promotions, "6: cap"
    for number, task in state.tasks.items():
        assert task.number == number and task.object.task is task, "6: task"
        listed = task.object.tenant.objects.get(task.object.key) is task.object
        assert not listed or task.object.ssd, "6: a listed object is promoted without a source"


def _puts(state: State) -> None:
    owned = {
        (id(put), session)
        for session, owner in state.sessions.items()
        for put in owner.puts.values()
    }
    pending = {
        (id(put), put.session)
        for tenant in state.tenants.values()
        for put in tenant.pending.values()
    }
    assert owned == pending, "8: puts in flight"
    assert len(state.waiting) <= state.config.max_waiting_puts, "9: waiting"
