"""The master as a value that is stepped: ``effects = machine.step(now, event)``.

No clock, random, socket, thread or file. ``now`` is monotonic seconds; leases and time-outs are durations on it. An event for which
the peer is to blame raises nothing here: what a message may contain is settled by its decoder and `wire.frames`, and a message that
comes at the wrong time is answered with a code or ends its connection.
"""

import hashlib
import struct

from msgspec import Struct

from forebay.store.master import burial, claims, membership, promotion, puts, reads, space
from forebay.store.master.records import Close, Effect, MasterConfig, Session, State
from forebay.store.wire.messages import (
    AllocStart,
    AskHolders,
    AskStats,
    Beat,
    Buried,
    ClientToMaster,
    Codes,
    Dropped,
    Exists,
    Get,
    HolderToMaster,
    Inventory,
    ListKeys,
    Located,
    MatchPrefix,
    Persisted,
    PromotionDone,
    PutEnd,
    PutRevoke,
    PutStart,
    Query,
    Register,
    RegisterPrefetch,
    Remove,
)


class Connected(Struct, frozen=True):
    """A peer proved to be ``tenant``."""

    session: int
    tenant: str


class Disconnected(Struct, frozen=True):
    session: int


class FromClient(Struct, frozen=True):
    session: int
    message: ClientToMaster


class FromHolder(Struct, frozen=True):
    session: int
    message: HolderToMaster


class Ticked(Struct, frozen=True):
    """Time has passed; wanted at least every 50 ms."""


Event = Connected | Disconnected | FromClient | FromHolder | Ticked


class Master:
    """``epoch`` names this incarnation. ``first_generation`` must be above what any absent holder may have seen of earlier ones:
    servers derive it from the wall clock; inventories raise it further. ``secret`` seeds the keys that sign rooms for writers."""

    def __init__(
        self,
        config: MasterConfig,
        now: float,
        *,
        epoch: int,
        first_generation: int = 1,
        secret: bytes = b"",
    ) -> None:
        self.state = State(config, epoch, now, first_generation)
        self._bound = claims.Bound(now, first_generation)
        self._tells_until: dict[
            int, float
        ] = {}  # session of a holder -> when its inventory must be over, unless it goes on
        self._secret = secret

    def step(self, now: float, event: Event) -> list[Effect]:
        state = self.state
        state.out = []
        match event:
            case FromClient(session, message):
                if session in state.sessions:
                    self._client(now, session, message)
            case FromHolder(session, holder_message):
                if session in state.sessions:
                    self._holder(now, session, holder_message)
            case Ticked():
                self._tick(now)
            case Connected(session, tenant):
                state.sessions[session] = Session(state.tenant(tenant))
            case Disconnected(session):
                self._disconnect(now, session)
        return state.out

    def answer(self, now: float, session: int, message: ClientToMaster) -> Codes | Located | None:
        """The hottest questions without the ceremony of effects: the answer to an ``Exists``, and to a ``Get`` that promotes nothing;
        None for anything else."""
        state = self.state
        owner, kind = state.sessions.get(session), type(message)
        if owner is None:
            return None
        if kind is Get and not state.config.promotion_on_hit:
            return reads.get(state, now, owner.tenant, message.call, message.keys)  # type: ignore[union-attr]
        if kind is Exists:
            return reads.exists(state, now, owner.tenant, message.call, message.keys)  # type: ignore[union-attr]
        return None

    def _client(self, now: float, session: int, message: ClientToMaster) -> None:
        state = self.state
        tenant = state.sessions[session].tenant
        match message:
            case Exists(call, keys):
                state.send(session, reads.exists(state, now, tenant, call, keys))
            case MatchPrefix(call, keys, parts):
                state.send(session, reads.match_prefix(tenant, call, keys, parts))
            case Query(call, keys):
                state.send(session, reads.query(state, now, tenant, call, keys))
            case Get(call, keys):
                state.send(session, reads.get(state, now, tenant, call, keys))
            case PutStart():
                if len(message.keys) == len(message.lengths):
                    puts.start(state, now, session, message)
                else:
                    state.out.append(Close(session, "put_start with unequal lists"))
            case PutEnd():
                if len(message.keys) == len(message.generations) == len(message.written):
                    puts.end(state, now, session, message)
                    puts.retry_waiting(state, now)
                else:
                    state.out.append(Close(session, "put_end with unequal lists"))
            case PutRevoke():
                if len(message.keys) == len(message.generations):
                    puts.revoke(state, session, message)
                    puts.retry_waiting(state, now)
                else:
                    state.out.append(Close(session, "put_revoke with unequal lists"))
            case Remove(call, keys):
                puts.remove(state, now, session, call, keys)
                puts.retry_waiting(state, now)
            case ListKeys(call, prefix, after, limit):
                state.send(session, reads.list_keys(tenant, call, prefix, after, limit))
            case AskStats(call):
                state.send(session, reads.stats(state, call))
            case AskHolders(call):
                state.send(session, reads.holders(state, call))

    def _holder(self, now: float, session: int, message: HolderToMaster) -> None:
        state = self.state
        claimed = claims.highest(message)
        if claimed >= state.next_generation and claimed > self._bound.at(now):
            state.out.append(
                Close(
                    session, f"generation {claimed} is one that no master can have given out by now"
                )
            )
            return
        if isinstance(message, Register | Inventory):
            self._tells_until[session] = membership.tells_until(
                now, self._tells_until.get(session), message
            )
        if isinstance(message, Register):
            if state.sessions[session].holder is not None:
                state.out.append(Close(session, "a holder registers once on a connection"))
                return
            membership.register(state, now, session, message, self._token_key(message, session))
            return
        holder = state.sessions[session].holder
        if holder is None or holder.session != session:
            state.out.append(Close(session, "a holder must register first"))
            return
        membership.heard(holder, now)
        match message:
            case Inventory():
                membership.inventory(state, now, holder, message)
                puts.retry_waiting(state, now)
            case Beat():
                membership.beat(state, now, holder, message)
            case Persisted():
                membership.persisted(state, holder, message)
                puts.retry_waiting(state, now)
            case Dropped():
                membership.dropped(state, holder, message)
            case Buried(op):
                burial.buried(state, holder, op)
            case RegisterPrefetch():
                state.send(session, promotion.register_many(state, now, holder, message))
            case AllocStart():
                state.send(session, promotion.alloc_start(state, now, holder, message))
            case PromotionDone():
                promotion.done(state, now, holder, message)

    def _tick(self, now: float) -> None:
        state = self.state
        membership.open_if_heard(state, now)
        membership.suspect_silent(state, now)
        membership.drop_slow_tellers(state, now, self._tells_until)
        promotion.expire(state, now)
        puts.expire(state, now)
        space.free_drained(state, now)
        if state.waiting:
            puts.retry_waiting(state, now)

    def _disconnect(self, now: float, session: int) -> None:
        state = self.state
        owner = state.sessions.get(session)
        if owner is None:
            return
        puts.writer_lost(state, owner)
        del state.sessions[session]
        self._tells_until.pop(session, None)
        if owner.holder is not None and owner.holder.session == session:
            membership.lost(state, owner.holder)
        puts.retry_waiting(state, now)

    def _token_key(self, register: Register, session: int) -> bytes:
        """Another one for each registration, so a token also proves that its room was given since the last one."""
        named = (
            register.name.encode()
            + b"\0"
            + register.instance.encode()
            + struct.pack("<QQ", self.state.epoch, session)
        )
        return hashlib.blake2b(named, key=self._secret[:64], digest_size=32).digest()
