"""An ideal holder without sockets or files, for the master's tests: it obeys at once and remembers everything it was told."""

from dataclasses import dataclass, field

import msgspec

from forebay.store.master.invariants import check
from forebay.store.master.machine import (
    Connected,
    Disconnected,
    Event,
    FromClient,
    FromHolder,
    Master,
    Ticked,
)
from forebay.store.master.puts import room_token
from forebay.store.master.records import Close, MasterConfig, Send
from forebay.store.wire.messages import (
    Allocated,
    AllocStart,
    Beat,
    Buried,
    Bury,
    ClientToMaster,
    Forget,
    Granted,
    Grave,
    HeldMemory,
    HeldSsd,
    Inventory,
    MasterToClient,
    Peers,
    Persisted,
    Prefetchable,
    Promote,
    PromotionDone,
    Register,
    Registered,
    RegisterPrefetch,
    Retire,
    Serving,
)


@dataclass
class FakeHolder:
    """``acks``: whether burials are confirmed at once, or kept in ``unacked`` until the test says so; ``tells``: whether it sends its
    inventory by itself; ``beats``: whether anything is heard of it when time passes."""

    name: str
    memory_bytes: int = 1 << 20
    ssd_bytes: int = 1 << 30
    instance: str = "a"
    acks: bool = True
    tells: bool = True
    beats: bool = True
    session: int = 0
    number: int = 0
    token_key: bytes = b""
    serving: bool = False
    memory: dict[int, HeldMemory] = field(default_factory=dict)  # by offset
    ssd: dict[tuple[str, bytes, int], HeldSsd] = field(default_factory=dict)
    graves: list[Grave] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    unacked: list[int] = field(default_factory=list)
    promotes: list[Promote] = field(default_factory=list)
    answers: list[Prefetchable | Allocated] = field(default_factory=list)

    def restarted(self) -> None:
        """As after kill -9: memory gone, log kept."""
        self.memory, self.serving, self.instance = {}, False, self.instance + "a"

    def token(self, tenant: str, key: bytes, generation: int, offset: int, length: int) -> bytes:
        """Of rooms that were given since it registered last."""
        return room_token(self.token_key, tenant, key, generation, offset, length)

    def highest(self) -> int:
        seen = [entry.generation for entry in self.ssd.values()] + [
            entry.stamp for entry in self.memory.values()
        ]
        return max([*seen, *(grave.generation for grave in self.graves)], default=0)


class World:
    """A master, its holders and clients; messages between them take no time."""

    def __init__(self, config: MasterConfig | None = None, *, check: bool = True) -> None:
        self.config = config or MasterConfig(settle_s=0.0)
        self.now = 100.0
        self.epoch = 1
        self.checked = check
        self.master = Master(self.config, self.now, epoch=1)
        self.sessions = 0
        self.calls = 0
        self.holders: dict[int, FakeHolder] = {}  # by session
        self.inbox: dict[int, list[MasterToClient]] = {}
        self.closed: list[int] = []

    def step(self, event: Event) -> None:
        for effect in self.master.step(self.now, event):
            if isinstance(effect, Close):
                self.closed.append(effect.session)
                self.holders.pop(effect.session, None)
                self.step(Disconnected(effect.session))
            else:
                self._deliver(effect)
        if self.checked:
            check(self.master.state)

    def later(self, seconds: float) -> None:
        """Time passes, in which holders go on beating."""
        self.now += seconds
        for holder in [one for one in self.holders.values() if one.beats]:
            self.step(
                FromHolder(
                    holder.session,
                    Beat(0, "ok" if holder.ssd_bytes else "none", holder.ssd_bytes > 0),
                )
            )
        self.step(Ticked())

    def client(self, tenant: str = "default") -> int:
        self.sessions += 1
        self.inbox[self.sessions] = []
        self.step(Connected(self.sessions, tenant))
        return self.sessions

    def holder(self, holder: FakeHolder) -> FakeHolder:
        """Connect, register and, being ideal, send the whole inventory."""
        self.sessions += 1
        holder.session, holder.serving = self.sessions, False
        self.holders[holder.session] = holder
        self.step(Connected(holder.session, "@holder"))
        register = Register(
            holder.name,
            holder.instance,
            "127.0.0.1",
            1,
            "",
            "here",
            holder.memory_bytes,
            holder.ssd_bytes,
            holder.highest(),
            list(holder.peers),
        )
        self.step(FromHolder(holder.session, register))
        return holder

    def lose(self, session: int) -> None:
        self.holders.pop(session, None)
        self.step(Disconnected(session))

    def restart_master(self) -> None:
        """kill -9 of the master and a new one: everybody must reconnect."""
        self.epoch += 1
        self.master = Master(
            self.config, self.now, epoch=self.epoch, first_generation=self.epoch * 1_000_000
        )
        self.holders.clear()
        self.inbox.clear()

    def ask(self, session: int, message: ClientToMaster) -> None:
        self.step(FromClient(session, message))

    def call(self, session: int, message: ClientToMaster) -> MasterToClient:
        """The answer, which must have come at once."""
        before = len(self.inbox[session])
        self.ask(session, message)
        assert len(self.inbox[session]) == before + 1, f"no answer to {message}"
        return self.inbox[session][-1]

    def write(
        self,
        granted: Granted,
        index: int,
        tenant: str,
        key: bytes,
        length: int,
        *,
        persist: bool = True,
    ) -> int:
        """The client's data arrives at every holder of the grant, which logs it at once."""
        grant = granted.grants[index]
        for room in grant.rooms:
            for holder in list(self.holders.values()):
                if holder.number == room.holder and room.token == holder.token(
                    tenant, key, grant.generation, room.offset, length
                ):
                    holder.memory[room.offset] = HeldMemory(
                        tenant, key, grant.generation, length, room.offset, grant.generation
                    )
                    if persist:
                        self.persist(holder, tenant, key, grant.generation, length)
        return grant.generation

    def persist(
        self, holder: FakeHolder, tenant: str, key: bytes, generation: int, length: int
    ) -> None:
        if holder.ssd_bytes:
            entry = holder.ssd[tenant, key, generation] = HeldSsd(tenant, key, generation, length)
            self.step(FromHolder(holder.session, Persisted([entry])))

    def promote(self, holder: FakeHolder, tenant: str, key: bytes, hint_s: float = 0.0) -> int:
        """Ask for a prefetch of one key; its code."""
        self.step(FromHolder(holder.session, RegisterPrefetch(1, tenant, [key], hint_s)))
        answer = holder.answers.pop()
        assert isinstance(answer, Prefetchable)
        self.last_task = answer.tasks[0]
        return answer.codes[0]

    def alloc(self, holder: FakeHolder, task: int) -> Allocated:
        self.step(FromHolder(holder.session, AllocStart(2, [task])))
        answer = holder.answers.pop()
        assert isinstance(answer, Allocated)
        return answer

    def finish(
        self,
        holder: FakeHolder,
        task: int,
        tenant: str,
        key: bytes,
        allocated: Allocated,
        ok: bool = True,
    ) -> None:
        spot = allocated.allotments[0]
        if ok:
            holder.memory[spot.offset] = HeldMemory(
                tenant, key, spot.generation, spot.length, spot.offset, spot.stamp
            )
        self.step(FromHolder(holder.session, PromotionDone(task, ok)))

    def _deliver(self, effect: Send) -> None:
        holder = self.holders.get(effect.session)
        if holder is None:
            self.inbox.setdefault(effect.session, []).append(effect.message)  # type: ignore[arg-type]
            return
        match effect.message:
            case Registered(number, _, token_key):
                holder.number, holder.token_key = number, token_key
                if not holder.tells:
                    return
                entries = Inventory(
                    0,
                    list(holder.memory.values()),
                    sorted(holder.ssd.values(), key=lambda entry: entry.generation),
                    list(holder.graves),
                    True,
                )
                self.step(FromHolder(holder.session, entries))
            case Peers(names):
                holder.peers = sorted({*holder.peers, *names} - {holder.name})
            case Serving():
                holder.serving = True
            case Retire(ranges):
                for offset, stamp in ranges:
                    if offset in holder.memory and holder.memory[offset].stamp == stamp:
                        del holder.memory[offset]
            case Bury(op, graves):
                self._bury(holder, op, graves)
            case Forget(behalf):
                holder.graves = [grave for grave in holder.graves if grave.behalf != behalf]
            case Promote():
                holder.promotes.append(effect.message)
            case Prefetchable() | Allocated():
                holder.answers.append(effect.message)

    def _bury(self, holder: FakeHolder, op: int, graves: list[Grave]) -> None:
        for grave in graves:
            if grave.behalf:
                holder.graves.append(grave)
                continue
            for offset, entry in holder.memory.items():
                if _covers(grave, entry):
                    holder.memory[offset] = msgspec.structs.replace(entry, buried=True)
            for place in [place for place, held in holder.ssd.items() if _covers(grave, held)]:
                del holder.ssd[place]
        if not holder.acks:
            holder.unacked.append(op)
        elif op:
            self.step(FromHolder(holder.session, Buried(op)))


def _covers(grave: Grave, entry: HeldMemory | HeldSsd) -> bool:
    same = (grave.tenant, grave.key) == (entry.tenant, entry.key)
    return same and (
        entry.generation == grave.generation
        if grave.exact
        else entry.generation <= grave.generation
    )
