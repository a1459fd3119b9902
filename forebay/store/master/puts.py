"""Writes: start, end, revoke, and puts that wait for room (rules ST3 and ST7).

A put is invisible until its end, and belongs to the connection that started it: when that is lost it is revoked at once, and when it
does nothing for a minute too. Nobody
waits while holding room: a PutStart is answered as soon as any of its keys has a definite answer, with AGAIN for the others, and
waits (``put_wait_s`` at most) only while all of its keys do. So batches cannot starve each other.
"""

import hashlib
import struct
from dataclasses import dataclass

from forebay.store.backend import Status
from forebay.store.master import space
from forebay.store.master.burial import Digger, may_bury
from forebay.store.master.extents import footprint
from forebay.store.master.records import (
    HEADER_BYTES,
    Holder,
    MemoryReplica,
    Object,
    Put,
    Session,
    SsdReplica,
    State,
    Tenant,
    Waiting,
)
from forebay.store.master.transitions import Cause, move
from forebay.store.wire.messages import (
    AGAIN,
    MAX_KEY_BYTES,
    MAX_OBJECT_BYTES,
    Codes,
    Grant,
    Granted,
    Grave,
    PutEnd,
    PutRevoke,
    PutStart,
    Room,
)

OK, EXISTS, NOT_FOUND = (
    Status.OK,
    Status.EXISTS,
    Status.NOT_FOUND,
)  # an enum's member is slow to look up
ALLOCATE, COMMIT = Cause.ALLOCATE, Cause.COMMIT
TOKEN_BYTES = 8
MAX_RETRIES_A_STEP = 256
MAX_WAITING_KEYS = (
    1 << 17
)  # of all waiting puts: they are kept meanwhile, and whoever asks chooses how long they are
PUT_LIFE_S = 60.0  # and a second more for each of these:
PUT_BYTES_PER_S = 1 << 20
CHECKED_EVERY_S = 1.0
MUST_EVICT = 1 << 62  # of an urgency: more than any holder has under way
_PLACE = struct.Struct("<QQQI")


def room_token(
    token_key: bytes, tenant: str, key: bytes, generation: int, offset: int, length: int
) -> bytes:
    """Proves to a holder that its master gave this room to this tenant for this key."""
    name = tenant.encode()
    signed = _PLACE.pack(generation, offset, length, len(name)) + name + key
    return hashlib.blake2b(signed, key=token_key, digest_size=TOKEN_BYTES).digest()


def start(state: State, now: float, session: int, message: PutStart) -> None:
    request = Waiting(
        session, message.call, message.keys, message.lengths, now + state.config.put_wait_s
    )
    if try_answer(state, now, request, final=False):
        return
    too_many_keys = state.waiting_keys + len(message.keys) > MAX_WAITING_KEYS
    if too_many_keys or len(state.waiting) >= state.config.max_waiting_puts:
        try_answer(state, now, request, final=True)
        return
    state.count("puts_waited")
    state.waiting.append(request)
    state.waiting_keys += len(request.keys)


def try_answer(state: State, now: float, request: Waiting, *, final: bool) -> bool:
    """Grant what can be granted; True if an answer was sent. ``final``: no more waiting, AGAIN becomes an error."""
    writer = _writer(
        state, request.session, now + PUT_LIFE_S + sum(request.lengths) / PUT_BYTES_PER_S
    )
    grants = [
        _grant(state, now, writer, key, length)
        for key, length in zip(request.keys, request.lengths, strict=True)
    ]
    if not final and grants and all(grant.code == AGAIN for grant in grants):
        return False
    if final:
        refusal = Grant(Status.NO_SPACE if writer.holders else Status.UNAVAILABLE)
        grants = [refusal if grant.code == AGAIN else grant for grant in grants]
        state.count("puts_refused", sum(grant is refusal for grant in grants))
    state.send(request.session, Granted(request.call, grants))
    return True


def retry_waiting(state: State, now: float) -> None:
    """Room may have appeared, or time run out: oldest first, and not too many in one step."""
    for _ in range(min(len(state.waiting), MAX_RETRIES_A_STEP)):
        request = state.waiting.popleft()
        if request.session in state.sessions and not try_answer(
            state, now, request, final=now >= request.deadline
        ):
            state.waiting.append(request)
        else:
            state.waiting_keys -= len(request.keys)


def end(state: State, now: float, session: int, message: PutEnd) -> None:
    owner, digger, codes = state.sessions[session], Digger(state), bytearray()
    for key, generation, written in zip(
        message.keys, message.generations, message.written, strict=True
    ):
        put = owner.puts.pop((key, generation), None)
        codes.append(NOT_FOUND if put is None else _commit(state, now, put, written, digger))
    digger.send(session, message.call, bytes(codes))


def revoke(state: State, session: int, message: PutRevoke) -> None:
    owner, codes = state.sessions[session], bytearray()
    for key, generation in zip(message.keys, message.generations, strict=True):
        put = owner.puts.pop((key, generation), None)
        codes.append(Status.NOT_FOUND if put is None else Status.OK)
        if put is not None:
            discard(state, put)
    state.send(session, Codes(message.call, bytes(codes)))


def writer_lost(state: State, owner: Session) -> None:
    for put in owner.puts.values():
        discard(state, put)
        state.count("puts_revoked")
    owner.puts.clear()


def expire(state: State, now: float) -> None:
    """A writer that is there and does not go on (stopped, hostile) may not keep a key and its room for ever. Whatever it writes later
    is older than what its room has then, or buried."""
    if now < state.puts_checked + CHECKED_EVERY_S:
        return
    state.puts_checked = now
    for tenant in state.tenants.values():
        for put in [put for put in tenant.pending.values() if put.deadline <= now]:
            del state.sessions[put.session].puts[put.object.key, put.object.generation]
            discard(state, put)
            state.count("puts_expired")


def discard(state: State, put: Put) -> None:
    """Take back the room of a put that will not end, and whatever of it reached a log."""
    digger = Digger(state)
    _bury_put(put, [*_receivers(put)], digger)
    for replica in put.object.memory:
        drop_unwritten(state, replica)
    put.object.memory = ()
    del put.object.tenant.pending[put.object.key]
    digger.send(put.session, None, b"")


def drop_unwritten(state: State, replica: MemoryReplica) -> None:
    move(replica, Cause.REVOKE)
    replica.holder.in_flight_bytes -= replica.size
    space.free(state, replica)


def install_ssd(state: State, object: Object, holder: Holder) -> None:
    """``object`` is in the log of ``holder``: announced, or found in its inventory."""
    object.heard(holder)
    for known in object.ssd:
        if known.holder is holder:
            known.round = holder.round
            return
    replica = SsdReplica(holder)
    move(replica, Cause.ADOPT)
    object.ssd = (*object.ssd, replica)
    space.relist(object)


def unlist(state: State, now: float, object: Object) -> None:
    """An object leaves the tables: removed, or replaced. Bury it first."""
    for replica in object.memory:
        space.drop_memory(state, replica, object.lease_until, now)
    for copy in object.ssd:
        move(copy, Cause.RETIRE)
    object.ssd = ()
    if object.tenant.objects.get(object.key) is object:
        del object.tenant.objects[object.key]


@dataclass(frozen=True, slots=True)
class _Writer:
    """Who asks for room, and who may give it: nothing that is granted changes which holders can be used."""

    session: int
    owner: Session
    holders: list[Holder]
    largest: int  # bytes of the largest segment
    deadline: float


def _writer(state: State, session: int, deadline: float) -> _Writer:
    holders = state.usable_holders()
    largest = max((holder.extents.capacity for holder in holders), default=0)
    return _Writer(session, state.sessions[session], holders, largest, deadline)


def _grant(state: State, now: float, writer: _Writer, key: bytes, length: int) -> Grant:
    tenant, holders = writer.owner.tenant, writer.holders
    if not 0 < len(key) <= MAX_KEY_BYTES or not 0 < length <= MAX_OBJECT_BYTES:
        return Grant(Status.INVALID)
    known = tenant.objects.get(key)
    if known is not None and known.length == length and known.readable():
        return Grant(EXISTS)
    if key in tenant.pending:
        return Grant(AGAIN)
    if not holders:
        return Grant(AGAIN)
    need = footprint(length, HEADER_BYTES)
    if need > writer.largest:
        return Grant(Status.NO_SPACE)
    if tenant.quota is not None and not _within_quota(
        state, now, tenant, need * min(state.config.replicas, len(holders))
    ):
        return Grant(Status.QUOTA_EXCEEDED)
    places = _choose(state, now, need, holders)
    return _open(state, writer, key, length, places) if places else Grant(AGAIN)


def _open(
    state: State, writer: _Writer, key: bytes, length: int, places: list[tuple[Holder, int]]
) -> Grant:
    tenant, generation = writer.owner.tenant, state.new_generation()
    object = Object(tenant, key, generation, length)
    rooms, replicas = [], []
    for holder, offset in places:
        replica = MemoryReplica(object, holder, offset, generation)
        move(replica, ALLOCATE)
        space.take_note(replica)
        holder.in_flight_bytes += replica.size
        replicas.append(replica)
        rooms.append(
            Room(
                holder.number,
                offset,
                room_token(holder.token_key, tenant.name, key, generation, offset, length),
            )
        )
    object.memory = tuple(replicas)
    put = Put(object, writer.session, writer.deadline)
    tenant.pending[key] = put
    writer.owner.puts[key, generation] = put
    return Grant(OK, generation, tuple(rooms))


def _choose(state: State, now: float, need: int, holders: list[Holder]) -> list[tuple[Holder, int]]:
    """Room at up to ``replicas`` holders."""
    places: list[tuple[Holder, int]] = []
    for holder in _in_turn(state, holders):
        offset = space.allocate(state, now, holder, need)
        if offset is not None:
            places.append((holder, offset))
            if len(places) == state.config.replicas:
                break
    return places


def _in_turn(state: State, holders: list[Holder]) -> list[Holder]:
    """Those that need not evict go first, of them those with least on its way, and then in turn, so that a new empty holder does not
    draw every write."""
    state.turn += 1
    if len(holders) == 1:
        return holders
    first, high = state.turn % len(holders), state.config.high_watermark

    def urgency(holder: Holder) -> int:
        extents = holder.extents
        capacity, under_way = extents.capacity, holder.in_flight_bytes >> 26  # / 64 MiB
        return (
            under_way
            if capacity - extents.free_bytes <= high * capacity
            else MUST_EVICT + under_way
        )

    return sorted(holders[first:] + holders[:first], key=urgency)


def _receivers(put: Put) -> dict[Holder, None]:
    """Who may have something of it. One that lost its memory meanwhile may have logged it before."""
    return dict.fromkeys([replica.holder for replica in put.object.memory] + put.persisted)


def _bury_put(put: Put, holders: list[Holder], digger: Digger) -> None:
    object = put.object
    for holder in holders:
        digger.bury_at(holder, Grave(object.tenant.name, object.key, object.generation, True))


def _within_quota(state: State, now: float, tenant: Tenant, need: int) -> bool:
    assert tenant.quota is not None
    excess = tenant.memory_bytes + need - tenant.quota
    return excess <= 0 or space.evict_tenant(state, now, tenant.name, excess) >= excess


def _commit(state: State, now: float, put: Put, written: tuple[int, ...], digger: Digger) -> Status:
    object, tenant = put.object, put.object.tenant
    good = (
        tuple([replica for replica in object.memory if replica.holder.number in written])
        if written
        else object.memory
    )
    if not any([replica.holder.usable for replica in good]):
        discard(state, put)
        return Status.UNAVAILABLE
    if written:
        _bury_put(
            put, [holder for holder in _receivers(put) if holder.number not in written], digger
        )
        for replica in object.memory:
            if replica not in good:
                drop_unwritten(state, replica)
    object.memory = ()
    del tenant.pending[object.key]
    known = tenant.objects.get(object.key)
    if known is not None:
        digger.bury(known)
        unlist(state, now, known)
    elif state.burials:
        digger.supersede(object)
    tenant.objects[object.key] = object
    for replica in good:
        move(replica, COMMIT)
        replica.round = replica.holder.round
        replica.holder.in_flight_bytes -= replica.size
        space.list_memory(state, replica)
    if put.unloggable:
        space.relist(object)
    for holder in put.persisted:
        if not written or holder.number in written:
            install_ssd(state, object, holder)
    state.count("put")
    state.count("put_bytes", object.length)
    return OK


def remove(state: State, now: float, session: int, call: int, keys: list[bytes]) -> None:
    tenant, digger, codes = state.sessions[session].tenant, Digger(state), bytearray()
    for key in keys:
        known = tenant.objects.get(key)
        if known is None:
            codes.append(state.absent_code(now))
            continue
        if not may_bury(state, known):
            codes.append(Status.UNAVAILABLE)
            continue
        digger.bury(known)
        unlist(state, now, known)
        state.count("removed")
        codes.append(Status.OK)
    digger.send(session, call, bytes(codes))
