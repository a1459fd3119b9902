"""Random histories of the master against a dumb twin: a dictionary of what was acknowledged and not removed.

After each step all invariants hold; a removed key is never readable; an acknowledged key that reached a log is readable whenever all
holders are there; no range under a lease is handed out, not even by a master that has just restarted.
"""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from forebay.store.backend import Status
from forebay.store.master import burial, reads
from forebay.store.master.extents import footprint
from forebay.store.master.machine import FromHolder
from forebay.store.master.records import HEADER_BYTES, MasterConfig
from forebay.store.wire.messages import (
    Codes,
    Dropped,
    Exists,
    Get,
    Granted,
    Located,
    PrefetchCode,
    PutEnd,
    PutRevoke,
    PutStart,
    Remove,
    Room,
    Tier,
)
from tests.store.store_fakes import FakeHolder, World

LENGTHS = (1000, 5000)
KEYS = [b"k%d" % index for index in range(8)]
LEASE_S = 5.0


class MasterTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        config = MasterConfig(
            settle_s=0.0,
            lease_s=LEASE_S,
            ssd_prefetch=True,
            promotion_on_hit=True,
            replicas=2,
            prefetch_share=0.4,
        )
        self.world = World(config)
        self.twin: dict[bytes, tuple[int, bool]] = {}  # key -> (length, logged somewhere)
        self.removed: set[bytes] = set()
        self.partial = (
            False  # the master restarted while holders were away, and they are not all back
        )
        self.open: dict[bytes, tuple[int, int]] = {}  # key -> (generation, length)
        self.leases: list[tuple[int, int, int, float]] = []  # holder, start, end, until
        self.holders: list[FakeHolder] = []
        self.away: list[FakeHolder] = []

    @initialize(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        self.holders = [
            self.world.holder(FakeHolder(f"h{index}", memory_bytes=11_000))
            for index in range(count)
        ]
        self.client = self.world.client()

    def _no_lease_covers(self, holder: int, offset: int, length: int) -> None:
        end = offset + footprint(length, HEADER_BYTES)
        for other, begin, stop, until in self.leases:
            if other == holder and until > self.world.now:
                assert end <= begin or stop <= offset, (
                    f"[{offset}, {end}) of holder {holder} is leased until {until}"
                )

    def _answers(self) -> int:
        return len(self.world.inbox[self.client])

    @rule(key=st.sampled_from(KEYS), length=st.sampled_from(LENGTHS))
    def put_start(self, key: bytes, length: int) -> None:
        if key in self.open:
            return
        before = self._answers()
        self.world.ask(self.client, PutStart(1, [key], [length]))
        if self._answers() == before:
            self.world.later(2.5)  # it waits for room; then it is refused or granted
        granted = self.world.inbox[self.client][-1]
        assert isinstance(granted, Granted)
        grant = granted.grants[0]
        if grant.code == Status.EXISTS and not self._may_be_back(key):
            assert self.twin.get(key, (0, False))[0] == length
        if grant.code == Status.OK:
            self.open[key] = (grant.generation, length)
            self.granted = granted
            for room in grant.rooms:
                self._no_lease_covers(room.holder, room.offset, length)
            self.rooms = {**getattr(self, "rooms", {}), key: granted}

    @rule(key=st.sampled_from(KEYS), persist=st.booleans())
    def put_end(self, key: bytes, persist: bool) -> None:
        if key not in self.open:
            return
        generation, length = self.open.pop(key)
        self.world.write(self.rooms[key], 0, "default", key, length, persist=persist)
        written = tuple(
            room.holder
            for room in self.rooms[key].grants[0].rooms
            if self._has_written(room, generation)
        )
        if not written:  # the rooms were given before their holders registered again
            self.world.call(self.client, PutRevoke(2, [key], [generation]))
            return
        answer = self.world.call(self.client, PutEnd(2, [key], [generation], [written]))
        assert isinstance(answer, Codes)
        if answer.codes[0] == Status.OK:
            logged = persist and any(holder.number in written for holder in self.holders)
            self.twin[key] = (length, logged)
            self.removed.discard(key)

    def _has_written(self, room: Room, generation: int) -> bool:
        found = [
            holder.memory.get(room.offset)
            for holder in self.holders
            if holder.number == room.holder
        ]
        return any(entry is not None and entry.generation == generation for entry in found)

    @rule(key=st.sampled_from(KEYS), length=st.sampled_from(LENGTHS), read=st.booleans())
    def put_whole(self, key: bytes, length: int, read: bool) -> None:
        self.put_start(key, length)
        self.put_end(key, True)
        if read:
            self.get(key)

    @rule(key=st.sampled_from(KEYS))
    def put_revoke(self, key: bytes) -> None:
        if key in self.open:
            generation, _ = self.open.pop(key)
            self.world.call(self.client, PutRevoke(2, [key], [generation]))

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: bytes) -> None:
        answer = self.world.call(self.client, Get(3, [key]))
        assert isinstance(answer, Located)
        place = answer.places[0]
        if place.code != Status.OK:
            return
        if self._may_be_back(key):
            return
        assert key not in self.removed, "a removed key came back"
        assert key in self.twin and place.length == self.twin[key][0], (
            "an acknowledged length, or none"
        )
        for spot in place.spots:
            holder = next(one for one in self.holders if one.number == spot.holder)
            if spot.tier is Tier.MEMORY:
                entry = holder.memory[spot.offset]
                assert (entry.key, entry.stamp, entry.length) == (key, spot.stamp, place.length)
                end = spot.offset + footprint(place.length, HEADER_BYTES)
                self.leases.append((spot.holder, spot.offset, end, self.world.now + LEASE_S))
            else:
                assert ("default", key, place.generation) in holder.ssd

    def _may_be_back(self, key: bytes) -> bool:
        """The keeper of its removal and the master went, and only who missed it is back."""
        return key in self.removed and self.partial and bool(self.away)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True))
    def remove(self, keys: list[bytes]) -> None:
        before = self._exist(keys)
        answer = self.world.call(self.client, Remove(4, keys))
        assert isinstance(answer, Codes)
        for key, code, was, now in zip(keys, answer.codes, before, self._exist(keys), strict=True):
            if code == Status.UNAVAILABLE:
                assert now == was, "refused, and yet something was done"
            if code == Status.OK:
                self.twin.pop(key, None)
                self.removed.add(key)

    def _exist(self, keys: list[bytes]) -> bytes:
        answer = self.world.call(self.client, Exists(9, keys))
        assert isinstance(answer, Codes)
        return answer.codes

    @rule(data=st.data())
    def log_later(self, data: st.DataObject) -> None:
        holders = [holder for holder in self.holders if holder.memory]
        if not holders:
            return
        holder = data.draw(st.sampled_from(holders))
        entry = data.draw(
            st.sampled_from(sorted(holder.memory.values(), key=lambda one: one.offset))
        )
        self.world.persist(holder, entry.tenant, entry.key, entry.generation, entry.length)

    @rule(data=st.data())
    def file_evicted(self, data: st.DataObject) -> None:
        holders = [holder for holder in self.holders if holder.ssd]
        if not holders:
            return
        holder = data.draw(st.sampled_from(holders))
        entry = holder.ssd.pop(data.draw(st.sampled_from(sorted(holder.ssd))))
        self.world.step(FromHolder(holder.session, Dropped([entry])))
        known = self.twin.get(entry.key)
        if known is not None:
            self.twin[entry.key] = (known[0], False)

    @rule(data=st.data(), key=st.sampled_from(KEYS), ok=st.booleans())
    def prefetch(self, data: st.DataObject, key: bytes, ok: bool) -> None:
        if not self.holders:
            return
        holder = data.draw(st.sampled_from(self.holders))
        if self.world.promote(holder, "default", key) != PrefetchCode.OK:
            return
        task = self.world.last_task
        allotted = self.world.alloc(holder, task)
        if allotted.allotments[0].code is PrefetchCode.OK:
            self._no_lease_covers(
                holder.number, allotted.allotments[0].offset, allotted.allotments[0].length
            )
            self.world.finish(holder, task, "default", key, allotted, ok=ok)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.world.later(seconds)

    @rule(data=st.data(), killed=st.booleans())
    def holder_goes(self, data: st.DataObject, killed: bool) -> None:
        if not self.holders:
            return
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.away.append(holder)
        self.world.lose(holder.session)
        if killed:
            holder.restarted()
            self.leases = [lease for lease in self.leases if lease[0] != holder.number]

    @rule(data=st.data())
    def holder_returns(self, data: st.DataObject) -> None:
        if self.away:
            holder = data.draw(st.sampled_from(self.away))
            self.away.remove(holder)
            self.holders.append(self.world.holder(holder))

    @rule(data=st.data(), key=st.sampled_from(KEYS), killed=st.booleans())
    def removed_while_away(self, data: st.DataObject, key: bytes, killed: bool) -> None:
        """What tombstones are for. By chance alone not every thousand histories had it, with a holder that has the key."""
        self.put_whole(key, LENGTHS[0], False)
        if len(self.holders) > 1:
            self.holder_goes(data, killed)
            self.remove([key])
            self.holder_returns(data)

    @rule()
    def writer_lost(self) -> None:
        self.world.lose(self.client)
        self.open.clear()
        self.client = self.world.client()

    @rule()
    def master_restarts(self) -> None:
        """Holders come back in another order, so their numbers change; leases held by readers do not."""
        named = {holder.number: holder for holder in self.holders + self.away}
        leases = [
            (named[number], begin, end, until)
            for number, begin, end, until in self.leases
            if number in named
        ]
        self.world.restart_master()
        self.partial = bool(self.away)
        self.open.clear()
        self.holders = [self.world.holder(holder) for holder in reversed(self.holders)]
        self.leases = [(holder.number, *rest) for holder, *rest in leases if holder in self.holders]  # type: ignore[misc]
        self.client = self.world.client()

    @invariant()
    def logged_keys_are_readable_when_everyone_is_here(self) -> None:
        if self.away or not self.holders:
            return
        keys = [
            key
            for key, (_, logged) in self.twin.items()
            if logged and any(place[1] == key for holder in self.holders for place in holder.ssd)
        ]
        answer = self.world.call(self.client, Exists(9, keys))
        assert isinstance(answer, Codes)
        assert all(code == Status.OK for code in answer.codes), dict(
            zip(keys, answer.codes, strict=True)
        )

    @invariant()
    def removed_keys_are_not_readable(self) -> None:
        """Not even for a moment, but for one case: the keeper of a removal and the master went, and only who missed it is back."""
        self.partial = self.partial and bool(self.away)
        keys = sorted(self.removed)
        if keys and not self.partial and hasattr(self, "client"):
            answer = self.world.call(self.client, Exists(9, keys))
            assert isinstance(answer, Codes) and all(code != Status.OK for code in answer.codes), (
                keys
            )


TestMasterTwin = MasterTwin.TestCase
TestMasterTwin.settings = settings(max_examples=80, stateful_step_count=40)


HUNT = settings(
    max_examples=1000,
    stateful_step_count=40,
    derandomize=True,
    phases=[Phase.generate],
    database=None,
)


def test_canary_a_master_that_forgets_tombstones_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(burial.Deaths, "of", lambda *_: None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(MasterTwin, settings=HUNT)


def test_canary_a_master_that_evicts_under_leases_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reads, "LEASE_SLACK_S", -LEASE_S)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(MasterTwin, settings=HUNT)
