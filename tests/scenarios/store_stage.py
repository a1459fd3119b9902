"""A scenario's store: the real master, real indices of holders' memory, and clients that do what the script says and nothing else.

store [lease_s=5] [replicas=1] ...      begins; `MasterConfig`'s fields by their names (watermarks are 1, quota=TENANT:PLACES)
holder NAME [dram=4] [ssd=no]           connects, registers, tells what it has; `registers` alone: tells nothing yet; DRAM in objects
client NAME [tenant=T]                  connects
put CLIENT KEY... [size=N]              asks for room (objects of 960 bytes take one place of 1,024)
write CLIENT KEY [half]                 its bytes arrive where it has room
end CLIENT KEY... [at=H,H]              revoke CLIENT KEY...       remove CLIENT KEY...
exists | match | query | get CLIENT KEY...
copy CLIENT KEY | copied CLIENT KEY     a read of the place that the last get named begins | ends
logged HOLDER KEY                       what lies in its memory is in its log, and it says so      dropped HOLDER KEY
buried HOLDER                           all that it was told to bury is logged
probe HOLDER KEY...                     prefetch on exist, through its throttle
room HOLDER KEY... | promoted HOLDER KEY [failed]           the steps of a promotion
disk HOLDER fails | mends               and it says so
lost NAME | dies HOLDER                 a connection ends | and with it what was in memory
restart                                 another master, who knows nothing
piece HOLDER N                          a piece of an inventory with that number
wait SECONDS [silent=H,H]               everyone else beats | show
"""

import hashlib
from collections.abc import Callable

from forebay.sim.store_holder import SimSegment
from forebay.store.backend import Status
from forebay.store.holder.memory import Entry, Memory
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
from forebay.store.throttle import PrefetchThrottle, State
from forebay.store.wire.messages import (
    AGAIN,
    Allocated,
    AllocStart,
    Allotment,
    Beat,
    Buried,
    Bury,
    ClientToMaster,
    Codes,
    Count,
    Dropped,
    Exists,
    Forget,
    Get,
    Grant,
    Granted,
    Grave,
    HeldMemory,
    HeldSsd,
    HolderToMaster,
    Inventory,
    Located,
    MasterToClient,
    MasterToHolder,
    MatchPrefix,
    Peers,
    Persisted,
    Place,
    Prefetchable,
    PrefetchCode,
    Promote,
    PromotionDone,
    PutEnd,
    PutRevoke,
    PutStart,
    Query,
    Register,
    Registered,
    RegisterPrefetch,
    Remove,
    Retire,
    Serving,
    Tier,
)
from tests.scenarios.script import ScriptError, listed, options

PLACE_BYTES = 1024
SIZE = 960
NUMBERS = {"replicas": int, "hit_threshold": int, "inflight_promotions": int}
SWITCHES = ("promotion_on_hit", "ssd_prefetch")


class Client:
    def __init__(self, name: str, session: int, tenant: str) -> None:
        self.name, self.session, self.tenant = name, session, tenant
        self.sizes: dict[str, int] = {}
        self.grants: dict[str, Grant] = {}
        self.places: dict[str, Place] = {}
        self.leased_until = 0.0
        self.copying: dict[str, bytes | None] = {}


class Hand:
    """A holder: what it has, and what it was told."""

    def __init__(self, name: str, places: int, ssd: bool) -> None:
        self.name, self.places, self.ssd = name, places, ssd
        self.session = 0
        self.number = 0
        self.instance = 0
        self.token_key = b""
        self.log: dict[tuple[str, bytes, int], int] = {}
        self.burying: list[Bury] = []
        self.kept: list[Grave] = []
        self.peers: list[str] = []
        self.disk_ok = True
        self.tasks: dict[str, int] = {}  # key -> its newest promotion
        self.rooms: dict[str, Allotment] = {}
        self.start()

    def start(self) -> None:
        self.instance += 1
        self.segment = SimSegment(self.places * PLACE_BYTES)
        self.memory = Memory(self.segment)  # type: ignore[arg-type]
        self.throttle = PrefetchThrottle()

    @property
    def highest(self) -> int:
        return max(
            [place[2] for place in self.log] + [entry.stamp for entry in self.memory], default=0
        )


class StoreStage:
    def __init__(self) -> None:
        self._master: Master | None = None
        self._config = MasterConfig()
        self._epoch = 0
        self._now = 0.0
        self._sessions = 0
        self._clients: dict[str, Client] = {}
        self._hands: dict[str, Hand] = {}
        self._calls: dict[int, list[str]] = {}  # what was asked about, for the answer
        self._call = 0

    def play(self, words: list[str]) -> list[str]:
        plain, named = options(words[1:])
        if words[0] == "store":
            return self._begin(named)
        command: Callable[[list[str], dict[str, str]], list[str]] | None = getattr(
            self, f"_do_{words[0]}", None
        )
        if command is None or self._master is None:
            raise ScriptError(f"there is no command {words[0]!r}, or no store yet")
        return command(plain, named)

    @property
    def master(self) -> Master:
        assert self._master is not None
        return self._master

    def _begin(self, named: dict[str, str]) -> list[str]:
        quotas = {
            tenant: int(places) * PLACE_BYTES
            for tenant, _, places in [named.pop("quota", "").partition(":")]
            if tenant
        }
        given = {
            name: value == "yes" if name in SWITCHES else NUMBERS.get(name, float)(value)
            for name, value in named.items()
        }
        self._config = MasterConfig(
            **(
                {"quotas": quotas, "settle_s": 0.0, "high_watermark": 1.0, "low_watermark": 1.0}
                | given
            )
        )  # type: ignore[arg-type]
        return self._do_restart([], {})

    # ------------------------------------------------------------------------------------------ who is there

    def _do_restart(self, plain: list[str], named: dict[str, str]) -> list[str]:
        self._epoch += 1
        self._master = Master(
            self._config,
            self._now,
            epoch=self._epoch,
            first_generation=100 * self._epoch - 99,
            secret=b"s",
        )
        for one in [*self._clients.values(), *self._hands.values()]:
            one.session = 0
        return []

    def _do_client(self, plain: list[str], named: dict[str, str]) -> list[str]:
        tenant = named.get("tenant", "default")
        client = self._clients.setdefault(plain[0], Client(plain[0], 0, tenant))
        client.session = self._session()
        return self._step(Connected(client.session, tenant))

    def _do_holder(self, plain: list[str], named: dict[str, str]) -> list[str]:
        hand = self._hands.get(plain[0])
        if hand is None:
            hand = self._hands[plain[0]] = Hand(
                plain[0], int(named.get("dram", "4")), named.get("ssd") == "yes"
            )
        hand.session = self._session()
        lines = self._step(Connected(hand.session, "@holder"))
        size = hand.segment.capacity
        lines += self._hear_from(
            hand,
            Register(
                hand.name,
                str(hand.instance),
                "h",
                1,
                "",
                "m",
                size,
                hand.ssd << 30,
                hand.highest,
                hand.peers,
            ),
        )
        return lines if "registers" in plain else lines + self._do_inventory([hand.name], {})

    def _do_inventory(self, plain: list[str], named: dict[str, str]) -> list[str]:
        hand = self._hands[plain[0]]
        memory = [
            HeldMemory(
                one.tenant, one.key, one.generation, one.length, one.offset, one.stamp, one.buried
            )
            for one in hand.memory
            if one.live
        ]
        ssd = [HeldSsd(*place, length) for place, length in hand.log.items()]
        return self._hear_from(hand, Inventory(0, memory, ssd, list(hand.kept), True))

    def _do_piece(self, plain: list[str], named: dict[str, str]) -> list[str]:
        return self._hear_from(self._hands[plain[0]], Inventory(int(plain[1]), [], [], [], False))

    def _do_lost(self, plain: list[str], named: dict[str, str]) -> list[str]:
        one = self._clients.get(plain[0]) or self._hands[plain[0]]
        session, one.session = one.session, 0
        return self._step(Disconnected(session))

    def _do_dies(self, plain: list[str], named: dict[str, str]) -> list[str]:
        self._hands[plain[0]].start()
        return self._do_lost(plain, named)

    def _do_wait(self, plain: list[str], named: dict[str, str]) -> list[str]:
        """Time passes in steps of half a second, as beats and ticks do."""
        silent, lines = named.get("silent", "").split(","), []
        left = float(plain[0])
        while left > 0:
            step = min(left, 0.5)
            left -= step
            self._now += step
            for hand in self._hands.values():
                if hand.session and hand.name not in silent:
                    lines += self._beat(hand)
            lines += self._step(Ticked())
        return lines

    def _do_disk(self, plain: list[str], named: dict[str, str]) -> list[str]:
        hand = self._hands[plain[0]]
        hand.disk_ok = plain[1] == "mends"
        return self._beat(hand)

    def _beat(self, hand: Hand) -> list[str]:
        return self._hear_from(
            hand, Beat(0, "ok" if hand.disk_ok else "failing", hand.ssd and hand.disk_ok)
        )

    # ------------------------------------------------------------------------------------------ clients

    def _do_put(self, plain: list[str], named: dict[str, str]) -> list[str]:
        client, keys = self._clients[plain[0]], plain[1:]
        size = int(named.get("size", SIZE))
        client.sizes |= dict.fromkeys(keys, size)
        return self._ask(client, keys, lambda call: PutStart(call, _raw(keys), [size] * len(keys)))

    def _do_write(self, plain: list[str], named: dict[str, str]) -> list[str]:
        client, key = self._clients[plain[0]], plain[1]
        grant, size, lines = client.grants[key], client.sizes[key], []
        value = content(key, size)
        for room in grant.rooms:
            hand = self._numbered(room.holder)
            wanted = room_token(
                hand.token_key, client.tenant, key.encode(), grant.generation, room.offset, size
            )
            if room.token != wanted:
                lines.append(f"{hand.name} refuses {key}: the room was given before it registered")
                continue
            entry = next(
                (
                    one
                    for one in hand.memory.of(client.tenant, key.encode())
                    if one.generation == grant.generation
                ),
                None,
            )
            if entry is None:
                entry = Entry(
                    client.tenant,
                    key.encode(),
                    grant.generation,
                    grant.generation,
                    room.offset,
                    size,
                    crc=0,
                )
                if not hand.memory.begin(entry):
                    lines.append(f"{hand.name} refuses {key}: something newer is there")
                    continue
            hand.segment.write(room.offset, 0, value[: size // 2])
            if "half" not in plain:
                hand.segment.write(room.offset, size // 2, value[size // 2 :])
                hand.memory.publish(entry)
        return lines

    def _do_end(self, plain: list[str], named: dict[str, str]) -> list[str]:
        client, keys = self._clients[plain[0]], plain[1:]
        generations = [client.grants[key].generation for key in keys]
        at = (
            tuple(self._hands[name].number for name in named["at"].split(","))
            if "at" in named
            else ()
        )
        return self._ask(
            client, keys, lambda call: PutEnd(call, _raw(keys), generations, [at] * len(keys))
        )

    def _do_revoke(self, plain: list[str], named: dict[str, str]) -> list[str]:
        client, keys = self._clients[plain[0]], plain[1:]
        generations = [client.grants[key].generation for key in keys]
        return self._ask(client, keys, lambda call: PutRevoke(call, _raw(keys), generations))

    def _do_remove(self, plain: list[str], named: dict[str, str]) -> list[str]:
        return self._ask(
            self._clients[plain[0]], plain[1:], lambda call: Remove(call, _raw(plain[1:]))
        )

    def _do_exists(self, plain: list[str], named: dict[str, str]) -> list[str]:
        return self._ask(
            self._clients[plain[0]], plain[1:], lambda call: Exists(call, _raw(plain[1:]))
        )

    def _do_match(self, plain: list[str], named: dict[str, str]) -> list[str]:
        return self._ask(
            self._clients[plain[0]], plain[1:], lambda call: MatchPrefix(call, _raw(plain[1:]), [])
        )

    def _do_query(self, plain: list[str], named: dict[str, str]) -> list[str]:
        return self._ask(
            self._clients[plain[0]], plain[1:], lambda call: Query(call, _raw(plain[1:]))
        )

    def _do_get(self, plain: list[str], named: dict[str, str]) -> list[str]:
        return self._ask(
            self._clients[plain[0]], plain[1:], lambda call: Get(call, _raw(plain[1:]))
        )

    def _do_copy(self, plain: list[str], named: dict[str, str]) -> list[str]:
        """The first half; nothing if the header says at once that it is something else."""
        client, key = self._clients[plain[0]], plain[1]
        client.copying[key] = self._half(client, key, 0)
        return (
            []
            if client.copying[key] is not None
            else [f"{client.name}: {key} is not there any more"]
        )

    def _do_copied(self, plain: list[str], named: dict[str, str]) -> list[str]:
        client, key = self._clients[plain[0]], plain[1]
        first, still_there = client.copying.pop(key), self._header_good(client, key)
        in_time = self._now <= client.leased_until
        if first is None or not (in_time or still_there):
            return [
                f"{client.name}: what was copied of {key} does not count: the lease is over, and something else is there"
            ]
        size = client.places[key].length
        second = self._half(client, key, 1)
        assert first + (second or b"") == content(key, size), f"{key}: wrong bytes"
        return [
            f"{client.name}: {key} is good"
            + ("" if in_time else ", though the lease is over: it is still there")
        ]

    def _half(self, client: Client, key: str, half: int) -> bytes | None:
        if not self._header_good(client, key):
            return None
        place = client.places[key]
        segment = self._numbered(place.spots[0].holder).segment
        middle = place.length // 2
        return segment.read(place.spots[0].offset, half * middle, place.length if half else middle)

    def _header_good(self, client: Client, key: str) -> bool:
        place = client.places[key]
        spot = place.spots[0]
        header = self._numbered(spot.holder).segment.header(spot.offset)
        return header == (spot.stamp, place.length, 1)

    # ------------------------------------------------------------------------------------------ holders

    def _do_logged(self, plain: list[str], named: dict[str, str]) -> list[str]:
        hand, key = self._hands[plain[0]], plain[1].encode()
        entry = next((one for one in hand.memory if one.key == key and one.live), None)
        if entry is None:
            raise ScriptError(f"{plain[1]} is not in the memory of {hand.name}")
        hand.log[entry.tenant, key, entry.generation] = entry.length
        return self._hear_from(
            hand, Persisted([HeldSsd(entry.tenant, key, entry.generation, entry.length)])
        )

    def _do_dropped(self, plain: list[str], named: dict[str, str]) -> list[str]:
        hand, key = self._hands[plain[0]], plain[1].encode()
        place = next(place for place in hand.log if place[1] == key)
        return self._hear_from(hand, Dropped([HeldSsd(*place, hand.log.pop(place))]))

    def _do_buried(self, plain: list[str], named: dict[str, str]) -> list[str]:
        hand, lines = self._hands[plain[0]], []
        burying, hand.burying = hand.burying, []
        for bury in burying:
            for grave in bury.graves:
                if grave.behalf:
                    hand.kept.append(grave)
                    continue
                for place in [
                    place
                    for place in hand.log
                    if place[:2] == (grave.tenant, grave.key) and _covers(grave, place[2])
                ]:
                    del hand.log[place]
            lines += self._hear_from(hand, Buried(bury.op))
        return lines

    def _do_probe(self, plain: list[str], named: dict[str, str]) -> list[str]:
        hand = self._hands[plain[0]]
        here = [key for key in _raw(plain[1:]) if any(place[1] == key for place in hand.log)]
        admitted = hand.throttle.admit(here, self._now)
        if not admitted:
            return [
                f"{hand.name} does nothing: "
                + ("not on its SSD" if not here else "lately done, or memory was short")
            ]
        self._call += 1
        self._calls[self._call] = [key.decode() for key in admitted]
        return self._hear_from(
            hand, RegisterPrefetch(self._call, named.get("tenant", "default"), admitted, 5.0)
        )

    def _do_room(self, plain: list[str], named: dict[str, str]) -> list[str]:
        hand, keys = self._hands[plain[0]], plain[1:]
        self._call += 1
        self._calls[self._call] = keys
        return self._hear_from(hand, AllocStart(self._call, [hand.tasks[key] for key in keys]))

    def _do_promoted(self, plain: list[str], named: dict[str, str]) -> list[str]:
        hand, key = self._hands[plain[0]], plain[1]
        spot, good = hand.rooms.pop(key, None), "failed" not in plain
        if good and spot is not None:
            entry = Entry(
                "default",
                key.encode(),
                spot.generation,
                spot.stamp,
                spot.offset,
                spot.length,
                crc=0,
            )
            good = hand.memory.begin(entry)
            hand.segment.write(spot.offset, 0, content(key, spot.length))
            hand.memory.publish(entry)
        hand.throttle.move([key.encode()], State.COMPLETED if good else State.FAILED, self._now)
        return self._hear_from(hand, PromotionDone(hand.tasks[key], good))

    # ------------------------------------------------------------------------------------------ the master

    def _session(self) -> int:
        self._sessions += 1
        return self._sessions

    def _numbered(self, number: int) -> Hand:
        return next(hand for hand in self._hands.values() if hand.number == number)

    def _ask(
        self, client: Client, keys: list[str], make: Callable[[int], ClientToMaster]
    ) -> list[str]:
        self._call += 1
        self._calls[self._call] = keys
        return self._step(FromClient(client.session, make(self._call)))

    def _hear_from(self, hand: Hand, message: HolderToMaster) -> list[str]:
        return self._step(FromHolder(hand.session, message))

    def _step(self, event: Event) -> list[str]:
        """One step of the master, and the rules checked after it."""
        effects = self.master.step(self._now, event)
        check(self.master.state)
        lines: list[str] = []
        for effect in effects:
            client = next(
                (one for one in self._clients.values() if one.session == effect.session), None
            )
            hand = next(
                (one for one in self._hands.values() if one.session == effect.session), None
            )
            if isinstance(effect, Close):
                one = client or hand
                lines.append(
                    f"{one.name if one else 'the older connection'} is cut off: {effect.reason}"
                )
                if one:
                    one.session = 0
                lines += self._step(Disconnected(effect.session))
            elif client is not None:
                lines += self._told_client(client, effect)
            elif hand is not None:
                lines += self._told_holder(hand, effect.message)  # type: ignore[arg-type]
        return lines

    # ------------------------------------------------------------------------------------------ what came of it

    def _told_client(self, client: Client, effect: Send) -> list[str]:
        message: MasterToClient = effect.message  # type: ignore[assignment]
        keys = self._calls[message.call]
        match message:
            case Granted(_, grants):
                for key, grant in zip(keys, grants, strict=True):
                    client.grants[key] = grant
                told = [
                    self._told_grant(key, grant) for key, grant in zip(keys, grants, strict=True)
                ]
            case Located(_, lease_s, places):
                for key, place in zip(keys, places, strict=True):
                    client.places[key] = place
                client.leased_until = self._now + lease_s
                told = [
                    self._told_place(key, place) for key, place in zip(keys, places, strict=True)
                ]
            case Codes(_, codes):
                told = [f"{key} {Status(code).name}" for key, code in zip(keys, codes, strict=True)]
            case Count(_, count):
                told = [f"{count} of {len(keys)} match"]
            case _:
                raise ScriptError(f"what is {message}?")
        return [f"{client.name}: {', '.join(told)}"]

    def _told_grant(self, key: str, grant: Grant) -> str:
        if grant.code == AGAIN:
            return f"{key} again later"
        if grant.code != Status.OK:
            return f"{key} {Status(grant.code).name}"
        rooms = listed(
            f"{self._numbered(room.holder).name}@{room.offset // PLACE_BYTES}"
            for room in grant.rooms
        )
        return f"{key} may go to {rooms} as generation {grant.generation}"

    def _told_place(self, key: str, place: Place) -> str:
        if place.code != Status.OK:
            return f"{key} {Status(place.code).name}"
        spots = [
            f"{self._numbered(spot.holder).name}'s SSD"
            if spot.tier is Tier.SSD
            else f"{self._numbered(spot.holder).name}@{spot.offset // PLACE_BYTES}"
            for spot in place.spots
        ]
        return f"{key} at {' and '.join(spots)}"

    def _told_holder(self, hand: Hand, message: MasterToHolder) -> list[str]:
        match message:
            case Registered(number, _, token_key, _):
                hand.number, hand.token_key = number, token_key
            case Peers(names):
                hand.peers = sorted({*names, *hand.peers} - {hand.name})
            case Serving(adopted):
                return [f"{hand.name} serves" + (f", {adopted} found in memory" if adopted else "")]
            case Retire(ranges):
                for offset, stamp in ranges:
                    hand.memory.retire(offset, stamp)
                return [
                    f"{hand.name} frees {listed(offset // PLACE_BYTES for offset, _ in ranges)}"
                ]
            case Bury(_, graves):
                hand.burying.append(message)
                for grave in () if any(grave.behalf for grave in graves) else graves:
                    for entry in hand.memory.of(grave.tenant, grave.key):
                        entry.buried |= _covers(grave, entry.generation)
                return [f"{hand.name} is to bury {listed(map(_told_grave, graves))}"]
            case Forget(behalf):
                hand.kept = [grave for grave in hand.kept if grave.behalf != behalf]
                return [f"{hand.name} need keep nothing more for {behalf}"]
            case Promote(task, _, key):
                hand.tasks[key.decode()] = task
                return [f"{hand.name} is to promote {key.decode()}"]
            case Prefetchable():
                return self._told_prefetch(hand, message)
            case Allocated():
                return self._told_rooms(hand, message)
        return []

    def _told_prefetch(self, hand: Hand, answer: Prefetchable) -> list[str]:
        lines = []
        for key, code, task in zip(
            self._calls[answer.call], answer.codes, answer.tasks, strict=True
        ):
            good = code == PrefetchCode.OK
            state = (
                State.ALREADY_RESIDENT
                if code == PrefetchCode.PROMOTION_ALREADY_EXISTS
                else State.FAILED
            )
            hand.throttle.move([key.encode()], State.IN_FLIGHT if good else state, self._now)
            if good:
                hand.tasks[key] = task
            lines.append(
                f"{hand.name} may prefetch {key}"
                if good
                else f"{hand.name}: {key} {PrefetchCode(code).name}"
            )
        return lines

    def _told_rooms(self, hand: Hand, answer: Allocated) -> list[str]:
        lines = []
        for key, spot in zip(self._calls[answer.call], answer.allotments, strict=True):
            if spot.code is PrefetchCode.OK:
                hand.rooms[key] = spot
                lines.append(f"{hand.name}: {key} gets place {spot.offset // PLACE_BYTES}")
                continue
            if spot.code is PrefetchCode.NO_AVAILABLE_HANDLE:
                hand.throttle.open_cooldown(self._now)
            hand.throttle.move([key.encode()], State.FAILED, self._now)
            lines.append(f"{hand.name}: {key} {spot.code.name}")
        return lines

    def _do_show(self, plain: list[str], named: dict[str, str]) -> list[str]:
        state = self.master.state
        lines = []
        for name, tenant in state.tenants.items():
            for key, found in tenant.objects.items():
                lease = ", leased" if found.memory and found.lease_until > self._now else ""
                at = [
                    f"{one.holder.register.name}@{one.offset // PLACE_BYTES}"
                    for one in found.memory
                ]
                at += [f"{copy.holder.register.name}'s SSD" for copy in found.ssd]
                away = "" if found.readable() else ", which is away"
                owner = f" of {name}" if name != "default" else ""
                lines.append(f"{key.decode()}{owner}: {' and '.join(at)}{away}{lease}")
            lines += [f"{key.decode()}: being put" for key in tenant.pending]
        lines += [f"{task.object.key.decode()}: being promoted" for task in state.tasks.values()]
        if state.waiting:
            lines.append(f"waiting puts: {len(state.waiting)}")
        return lines or ["nothing"]


def content(key: str, length: int) -> bytes:
    """Keys name their content."""
    unit = hashlib.sha256(b"%s %d" % (key.encode(), length)).digest()
    return (unit * (length // len(unit) + 1))[:length]


def _raw(keys: list[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _covers(grave: Grave, generation: int) -> bool:
    return generation == grave.generation if grave.exact else generation <= grave.generation


def _told_grave(grave: Grave) -> str:
    what = (
        f"generation {grave.generation}" if grave.exact else f"up to generation {grave.generation}"
    )
    return f"{grave.key.decode()} ({what}{f', kept for {grave.behalf}' if grave.behalf else ''})"
