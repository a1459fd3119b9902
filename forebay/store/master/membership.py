"""Holders come, tell what they have, fall silent, go (rules ST3, ST4 and ST6).

A registration opens a round: what the master knew of the holder stays listed but is UNAVAILABLE until its inventory is complete.
Each inventory entry then confirms a replica, adds one (a restarted master knows nothing), or is refused because a newer generation
or a tombstone stands against it. What no entry confirmed is dropped. Adopted memory may still be read under leases of an earlier
epoch, so it is leased for ttl + 1 s from the start of the inventory.
"""

from msgspec.structs import replace

from forebay.store.master import burial, promotion, puts, space
from forebay.store.master.extents import Extents, footprint
from forebay.store.master.records import HEADER_BYTES, Close, Holder, MemoryReplica, Object, State
from forebay.store.master.transitions import Cause, ReplicaState, move
from forebay.store.wire.messages import (
    MAX_PEERS,
    Beat,
    Dropped,
    Grave,
    HeldMemory,
    HeldSsd,
    Inventory,
    Peers,
    Persisted,
    Register,
    Registered,
    Retire,
    Serving,
)

RESTART_GRACE_S = 1.0
INVENTORY_S = 10.0
INVENTORY_ENTRIES_PER_S = 1000  # a hundredth of what holders tell
GONE_SILENCES = 5  # after so many times ``silence_s`` more, who is suspected is taken for gone
MAX_COUNT = 1 << 62


def register(state: State, now: float, session: int, message: Register, token_key: bytes) -> None:
    """A holder (re)connects. Its earlier connection, if any, is closed."""
    holder = state.by_name.get(message.name)
    if holder is None:
        holder = Holder(len(state.by_name) + 1, message, session, token_key)
        state.by_name[message.name] = state.holders[holder.number] = holder
        holder.open = state.open
        state.unheard[message.name] = None
    elif holder.present:
        earlier = holder.session
        lost(state, holder)
        state.sessions[earlier].holder = None
        state.out.append(Close(earlier, f"holder {message.name} registered again"))
    same_memory = holder.register.instance == message.instance
    holder.register, holder.session, holder.token_key = message, session, token_key
    holder.round += 1
    holder.present, holder.complete, holder.suspect = True, False, False
    holder.last_seen, holder.inventory_next = now, 0
    holder.ssd_ok, holder.ssd_state = holder.has_log, "ok" if holder.has_log else "none"
    holder.settle()
    state.sessions[session].holder = holder
    if not same_memory:
        _forget_memory(state, holder)
    for tenant in state.tenants.values():
        for put in tenant.pending.values():
            put.persisted = [
                other for other in put.persisted if other is not holder
            ]  # its inventory says what it has
    state.next_generation = max(state.next_generation, message.highest_generation + 1)
    _expect(state, message.peers)
    names = _all_names(state)
    for other in state.holders.values():
        if other.present:
            state.send(other.session, Peers(names))
    state.send(session, Registered(holder.number, state.epoch, token_key, state.config.lease_s))


def _expect(state: State, peers: list[str]) -> None:
    """Holders that another one knows of. A bound on them costs nobody anything but who makes names up."""
    unknown = [name for name in peers if name not in state.by_name and name not in state.unheard]
    state.unheard |= dict.fromkeys(unknown[: max(0, MAX_PEERS - len(state.unheard))])


def _all_names(state: State) -> list[str]:
    """Of all holders, those that are there first."""
    here = [name for name, holder in state.by_name.items() if holder.present]
    return [*dict.fromkeys((*here, *state.by_name, *state.unheard))][:MAX_PEERS]


def inventory(state: State, now: float, holder: Holder, message: Inventory) -> None:
    if message.sequence != holder.inventory_next or holder.complete:
        reason = f"inventory piece {message.sequence} came where {holder.inventory_next} was due"
        state.out.append(Close(holder.session, reason))
        return
    holder.inventory_next += 1
    burial.learn(state, message.graves)
    digger = burial.Digger(state)
    deaths = burial.Deaths(state, holder)
    refused: list[tuple[int, int]] = []
    pending = {replica.stamp for replica in space.unlisted(holder, state)}
    for entry in message.memory:
        if not _take_memory(state, now, holder, entry, digger, deaths, pending):
            refused.append((entry.offset, entry.stamp))
    for held in message.ssd:
        _take_ssd(state, now, holder, held, digger, deaths)
    if refused:
        state.send(holder.session, Retire(refused))
    digger.send(holder.session, None, b"")
    if message.last:
        for name in list(state.graves):
            owing = state.by_name.get(name)
            if owing is not None and owing.complete:
                _deliver(state, now, owing)  # it came back before its keeper did
        _complete(state, now, holder)


def lost(state: State, holder: Holder) -> None:
    """Its connection ended. Its keys are UNAVAILABLE until it comes back; puts it was to receive go on if they have others."""
    holder.present = holder.complete = False
    holder.settle()
    promotion.holder_lost(state, holder)
    burial.holder_lost(state, holder)
    state.count("holder_lost")


def beat(state: State, now: float, holder: Holder, message: Beat) -> None:
    holder.ssd_used, holder.ssd_state = message.ssd_used, message.ssd_state
    holder.ssd_ok = message.ssd_ok and holder.has_log
    if message.unasked:
        _count_claimed(state, "get_found", message.unasked)
        _count_claimed(state, "got_ssd_bytes", message.unasked_bytes)


def _count_claimed(state: State, name: str, by: int) -> None:
    """What a holder claims may be anything; what is counted has to fit an answer."""
    state.counters[name] = min(MAX_COUNT, state.counters.get(name, 0) + by)


def heard(holder: Holder, now: float) -> None:
    """Any message of a holder ends suspicion."""
    holder.last_seen = now
    if holder.suspect:
        holder.suspect = False
        holder.settle()


def suspect_silent(state: State, now: float) -> None:
    """A machine that vanished says no farewell: what waits for it (removals) must not wait for ever, so others stand in for it then."""
    for holder in state.holders.values():
        if (
            holder.present
            and not holder.suspect
            and now - holder.last_seen > state.config.silence_s
        ):
            holder.suspect, holder.suspect_since = True, now
            holder.settle()
            state.count("holder_suspected")
        elif (
            holder.present
            and holder.suspect
            and now - holder.suspect_since > GONE_SILENCES * state.config.silence_s
        ):
            state.out.append(Close(holder.session, "silent for too long"))


def tells_until(now: float, until: float | None, message: Register | Inventory) -> float:
    """When an inventory must be over that ``message`` begins or goes on with: `INVENTORY_S` from now at most, and only as much later
    than before (``until``) as what it tells is worth."""
    if until is None or isinstance(message, Register):
        return now + INVENTORY_S
    told = len(message.memory) + len(message.ssd) + len(message.graves)
    return min(now + INVENTORY_S, until + told / INVENTORY_ENTRIES_PER_S)


def drop_slow_tellers(state: State, now: float, until: dict[int, float]) -> None:
    """Whoever does not go on with its inventory may not keep everybody waiting for what it has (`State.absent_code`). ``until``: by
    session (`tells_until`)."""
    for holder in state.holders.values():
        if holder.present and not holder.complete and now > until[holder.session]:
            state.out.append(
                Close(holder.session, f"its inventory stood still for {INVENTORY_S:g} s")
            )


def persisted(state: State, holder: Holder, message: Persisted) -> None:
    """These objects gained an SSD copy; of a put in flight it is noted, of anything else the log must forget it."""
    digger = burial.Digger(state)
    for entry in message.entries:
        tenant = state.tenants.get(entry.tenant)
        known = tenant.objects.get(entry.key) if tenant else None
        put = tenant.pending.get(entry.key) if tenant else None
        if known is not None and known.generation == entry.generation:
            puts.install_ssd(state, known, holder)
        elif put is not None and put.object.generation == entry.generation:
            put.persisted.append(holder)
        else:
            digger.bury_at(holder, Grave(entry.tenant, entry.key, entry.generation, True))
    digger.send(holder.session, None, b"")


def dropped(state: State, holder: Holder, message: Dropped) -> None:
    """These records left the log of ``holder``, or will never be in it."""
    for entry in message.entries:
        tenant = state.tenants.get(entry.tenant)
        known = tenant.objects.get(entry.key) if tenant else None
        put = tenant.pending.get(entry.key) if tenant else None
        if known is not None and known.generation == entry.generation:
            _drop_ssd(state, known, holder)
        elif put is not None and put.object.generation == entry.generation:
            put.unloggable = True
            put.persisted = [other for other in put.persisted if other is not holder]


def _drop_ssd(state: State, object: Object, holder: Holder) -> None:
    object.heard(holder)
    for copy in object.ssd:
        if copy.holder is holder:
            move(copy, Cause.LOSE)
            object.ssd = tuple(other for other in object.ssd if other is not copy)
            break
    space.relist(object)
    _unlist_if_empty(object)


def _unlist_if_empty(object: Object) -> None:
    if not object.memory and not object.ssd and object.tenant.objects.get(object.key) is object:
        del object.tenant.objects[object.key]


def _take_memory(
    state: State,
    now: float,
    holder: Holder,
    entry: HeldMemory,
    digger: burial.Digger,
    deaths: burial.Deaths,
    pending: set[int],
) -> bool:
    """Confirm or adopt one object in memory; False if the holder is to retire it."""
    tenant = state.tenant(entry.tenant)
    known = tenant.objects.get(entry.key)
    if known is not None:
        for replica in known.memory:
            if (
                replica.holder is holder
                and replica.stamp == entry.stamp
                and replica.offset == entry.offset
            ):
                replica.round = holder.round
                return True
    if entry.stamp in pending:
        return True  # a put in flight, or draining: its own story goes on
    size = footprint(entry.length, HEADER_BYTES)
    if not holder.extents.reserve(entry.offset, size):
        return False
    until = now + state.config.lease_s + RESTART_GRACE_S
    death = deaths.of(entry.tenant, entry.key, entry.generation)
    newer = known is not None and known.generation > entry.generation
    if entry.buried or death is not None or newer:
        _drain_stranger(
            holder, Object(tenant, entry.key, entry.generation, entry.length), entry, until
        )
        if not entry.buried:
            digger.bury_at(holder, death or Grave(entry.tenant, entry.key, entry.generation))
        return True
    object = _adopt(state, now, tenant.name, entry.key, entry.generation, entry.length, digger)
    replica = MemoryReplica(object, holder, entry.offset, entry.stamp)
    move(replica, Cause.ADOPT)
    space.take_note(replica)
    space.list_memory(state, replica)
    object.lease_until = max(object.lease_until, until)
    state.next_generation = max(state.next_generation, entry.stamp + 1)
    return True


def _take_ssd(
    state: State,
    now: float,
    holder: Holder,
    entry: HeldSsd,
    digger: burial.Digger,
    deaths: burial.Deaths,
) -> None:
    tenant = state.tenant(entry.tenant)
    known = tenant.objects.get(entry.key)
    death = deaths.of(entry.tenant, entry.key, entry.generation)
    if death is not None or (known is not None and known.generation > entry.generation):
        digger.bury_at(holder, death or Grave(entry.tenant, entry.key, entry.generation))
        return
    put = tenant.pending.get(entry.key)
    if put is not None and put.object.generation == entry.generation:
        put.persisted.append(holder)
        return
    object = _adopt(state, now, entry.tenant, entry.key, entry.generation, entry.length, digger)
    puts.install_ssd(state, object, holder)


def _adopt(
    state: State,
    now: float,
    tenant_name: str,
    key: bytes,
    generation: int,
    length: int,
    digger: burial.Digger,
) -> Object:
    """The object of this generation, newly listed if need be; an older one is buried and gives way."""
    tenant = state.tenant(tenant_name)
    known = tenant.objects.get(key)
    if known is not None and known.generation == generation:
        return known
    if known is not None:
        digger.bury(known)
        puts.unlist(state, now, known)
    object = tenant.objects[key] = Object(tenant, key, generation, length)
    state.next_generation = max(state.next_generation, generation + 1)
    return object


def _drain_stranger(holder: Holder, object: Object, entry: HeldMemory, until: float) -> None:
    object.lease_until = until
    replica = MemoryReplica(object, holder, entry.offset, entry.stamp)
    move(replica, Cause.DRAIN)
    space.take_note(replica)
    holder.draining[entry.stamp] = replica


def _complete(state: State, now: float, holder: Holder) -> None:
    """The inventory is in: what it did not confirm is gone."""
    state.unheard.pop(holder.register.name, None)
    if (
        holder.round > 1
    ):  # else this master knew nothing of it: after a restart all holders come, and each look is at all objects
        _drop_unconfirmed(state, holder)
    _deliver(state, now, holder)
    holder.complete = True
    holder.settle()
    open_if_heard(state, now)
    state.send(holder.session, Serving(sum(1 for _ in space.ranges(holder, state))))


def _drop_unconfirmed(state: State, holder: Holder) -> None:
    for tenant in state.tenants.values():
        for object in list(tenant.objects.values()):
            for replica in object.memory:
                if replica.holder is holder and replica.round != holder.round:
                    space.drop_memory(state, replica, lease_until=0.0, now=0.0)
            if any(copy.holder is holder and copy.round != holder.round for copy in object.ssd):
                _drop_ssd(state, object, holder)
            object.heard(holder)
            _unlist_if_empty(object)


def _deliver(state: State, now: float, holder: Holder) -> None:
    """Tell ``holder`` what was removed while it was away, and believe nothing it has against that."""
    owed = burial.graves_against(state, holder)
    if not owed:
        return
    digger = burial.Digger(state)
    deaths = burial.Deaths(state, holder)
    for grave in owed:
        known = state.tenant(grave.tenant).objects.get(grave.key)
        death = deaths.of(grave.tenant, grave.key, known.generation) if known is not None else None
        if known is not None and death is not None:
            if death.exact:
                _forget_at(state, now, known, holder)
            else:
                digger.bury(known)
                puts.unlist(state, now, known)
        digger.bury_at(holder, replace(grave, behalf=""))
    digger.send(holder.session, None, b"", delivers=holder.register.name)


def _forget_at(state: State, now: float, object: Object, holder: Holder) -> None:
    """The put was given up at ``holder``; where it succeeded the object lives on."""
    for replica in [replica for replica in object.memory if replica.holder is holder]:
        space.drop_memory(state, replica, object.lease_until, now)
    if any(copy.holder is holder for copy in object.ssd):
        _drop_ssd(state, object, holder)
    _unlist_if_empty(object)


def open_if_heard(state: State, now: float) -> None:
    """A new master serves when it has heard every holder there is, or has waited ``settle_s`` for those that are missing: one of them
    may keep a removal that another has to hear of. Before the first has come it knows of none, which is not the same as all."""
    heard = state.holders and not state.unheard
    if not state.open and (heard or now >= state.started + state.config.settle_s):
        state.open = True
        for holder in state.holders.values():
            holder.open = True
            holder.settle()


def _forget_memory(state: State, holder: Holder) -> None:
    """Its segment is a new one: every replica in the old one is lost, and readers of the old one harm nobody."""
    for replica in list(space.ranges(holder, state)):
        object = replica.object
        object.memory = tuple(other for other in object.memory if other is not replica)
        object.tenant.memory_bytes -= replica.size
        if replica.lane is not None:
            replica.lane.remove(replica)
        was_put = replica.state is ReplicaState.WRITING
        move(replica, Cause.LOSE)
        if not was_put:
            object.unhear(holder)
            _unlist_if_empty(object)
    holder.draining.clear()
    holder.lanes.clear()
    holder.in_flight_bytes = 0
    holder.extents = Extents(holder.register.memory_bytes)
