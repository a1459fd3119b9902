"""Questions. ``exists``, ``match_prefix``, ``query``, ``list`` and ``stats`` change nothing: neither a lease nor an order of use, so
that probing never blocks eviction and a probe for a prefetch never admits a key by itself. ``get`` leases and counts as use.
"""

from heapq import nlargest, nsmallest

from forebay.store.backend import Status
from forebay.store.master import promotion, space
from forebay.store.master.records import LEASE_SLACK_S, Holder, Object, State, Tenant
from forebay.store.wire.messages import (
    MAX_PEERS,
    Codes,
    Count,
    HolderEntry,
    HolderTable,
    KeyPage,
    Located,
    Place,
    Spot,
    StoreStats,
    Tier,
)

MAX_LIST = 10_000
MAX_TENANTS_TOLD = 1000
_GOT_BYTES = {
    Tier.MEMORY: "got_memory_bytes",
    Tier.SSD: "got_ssd_bytes",
}  # of objects, by where a get was sent


def exists(state: State, now: float, tenant: Tenant, call: int, keys: list[bytes]) -> Codes:
    objects = tenant.objects
    absent = int(state.absent_code(now))
    codes = bytearray(len(keys))
    for index, key in enumerate(keys):
        found = objects.get(key)
        if found is None:
            codes[index] = absent
        elif not found.readable():
            codes[index] = Status.UNAVAILABLE
    return Codes(call, bytes(codes))


def match_prefix(tenant: Tenant, call: int, keys: list[bytes], parts: list[bytes]) -> Count:
    objects = tenant.objects
    for index, key in enumerate(keys):
        for part in parts or (b"",):
            found = objects.get(key + part)
            if found is None or not found.readable():
                return Count(call, index)
    return Count(call, len(keys))


def query(state: State, now: float, tenant: Tenant, call: int, keys: list[bytes]) -> Located:
    return Located(call, 0.0, [_place(state, now, tenant.objects.get(key)) for key in keys])


def get(state: State, now: float, tenant: Tenant, call: int, keys: list[bytes]) -> Located:
    places = []
    until = now + state.config.lease_s + LEASE_SLACK_S
    for key in keys:
        found = tenant.objects.get(key)
        place = _place(state, now, found)
        places.append(place)
        if found is None or place.code != Status.OK:
            state.count("get_missed")
            continue
        state.count("get_found")
        if found.memory:
            found.lease_until = max(found.lease_until, until)
            for replica in found.memory:
                space.touch(state, replica)
        state.count(_GOT_BYTES[place.spots[0].tier], found.length)
        if place.spots[0].tier is Tier.SSD:
            promotion.on_hit(state, now, found)
    return Located(call, state.config.lease_s, places)


def list_keys(tenant: Tenant, call: int, prefix: bytes, after: bytes, limit: int) -> KeyPage:
    """O(objects of the tenant): for people, not for a hot path."""
    wanted = (
        key
        for key, found in tenant.objects.items()
        if key > after and key.startswith(prefix) and found.readable()
    )
    return KeyPage(
        call, [(key, tenant.objects[key].length) for key in nsmallest(min(limit, MAX_LIST), wanted)]
    )


def holders(state: State, call: int) -> HolderTable:
    """All that are there, and of the others as many as a message may have."""
    absent = [number for number, holder in state.holders.items() if not holder.present]
    untold = set(absent[MAX_PEERS:])
    return HolderTable(
        call,
        state.epoch,
        [_entry(holder) for number, holder in state.holders.items() if number not in untold],
    )


def stats(state: State, call: int) -> StoreStats:
    present = [holder for holder in state.holders.values() if holder.present]
    return StoreStats(
        call,
        state.epoch,
        objects=sum(len(tenant.objects) for tenant in state.tenants.values()),
        memory_bytes=sum(holder.extents.capacity for holder in present),
        memory_used=sum(holder.used for holder in present),
        ssd_bytes=sum(holder.register.ssd_bytes for holder in present),
        ssd_used=sum(holder.ssd_used for holder in present),
        holders=len(state.holders),
        holders_usable=len(state.usable_holders()),
        waiting_puts=len(state.waiting),
        promotions_in_flight=len(state.tasks),
        counters=dict(state.counters),
        tenants={tenant.name: tenant.memory_bytes for tenant in _largest(state)},
    )


def _largest(state: State) -> list[Tenant]:
    """As many as a message may have."""
    return nlargest(
        MAX_TENANTS_TOLD, state.tenants.values(), key=lambda tenant: tenant.memory_bytes
    )


def _place(state: State, now: float, found: Object | None) -> Place:
    if found is None:
        return Place(int(state.absent_code(now)))
    spots = [
        Spot(replica.holder.number, Tier.MEMORY, replica.offset, replica.stamp)
        for replica in found.memory
        if replica.holder.usable
    ]
    spots += [
        Spot(replica.holder.number, Tier.SSD) for replica in found.ssd if replica.holder.usable
    ]
    if not spots:
        return Place(Status.UNAVAILABLE)
    return Place(Status.OK, found.length, found.generation, tuple(spots))


def _entry(holder: Holder) -> HolderEntry:
    register = holder.register
    return HolderEntry(
        holder.number,
        register.name,
        register.instance,
        register.host,
        register.port,
        register.unix,
        register.machine,
        holder.usable,
        holder.extents.capacity,
        holder.used,
        register.ssd_bytes,
        holder.ssd_used,
        holder.ssd_state,
    )
