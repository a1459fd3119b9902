"""The master's rules, told as short stories against the sans-IO machine (rules ST1 to ST7)."""

import pytest

from forebay.store.backend import Status
from forebay.store.master import membership, puts
from forebay.store.master.machine import FromHolder, Ticked
from forebay.store.master.records import Holder, MasterConfig, State
from forebay.store.master.space import evict
from forebay.store.master.transitions import Cause, IllegalTransition, ReplicaState, move
from forebay.store.wire.messages import (
    AGAIN,
    AskStats,
    Beat,
    Buried,
    Bury,
    ClientToMaster,
    Codes,
    Count,
    Dropped,
    Exists,
    Get,
    Grant,
    Granted,
    HeldSsd,
    Inventory,
    KeyPage,
    ListKeys,
    Located,
    MatchPrefix,
    PrefetchCode,
    PutEnd,
    PutRevoke,
    PutStart,
    Query,
    Register,
    Remove,
    StoreStats,
    Tier,
)
from tests.store.store_fakes import FakeHolder, World

PAGE = 1 << 10
OK, EXISTS, NOT_FOUND, UNAVAILABLE = Status.OK, Status.EXISTS, Status.NOT_FOUND, Status.UNAVAILABLE


def quiet(**changes: object) -> MasterConfig:
    return MasterConfig(settle_s=0.0, **changes)  # type: ignore[arg-type]


def put(
    world: World,
    session: int,
    key: bytes,
    length: int = PAGE,
    tenant: str = "default",
    persist: bool = True,
) -> int:
    """A whole put; its code."""
    granted = world.call(session, PutStart(1, [key], [length]))
    assert isinstance(granted, Granted)
    if granted.grants[0].code != OK:
        return granted.grants[0].code
    generation = world.write(granted, 0, tenant, key, length, persist=persist)
    ended = world.call(session, PutEnd(2, [key], [generation], [()]))
    assert isinstance(ended, Codes)
    return ended.codes[0]


def exists(world: World, session: int, *keys: bytes) -> list[int]:
    answer = world.call(session, Exists(3, list(keys)))
    assert isinstance(answer, Codes)
    return list(answer.codes)


def get(world: World, session: int, key: bytes) -> Located:
    answer = world.call(session, Get(4, [key]))
    assert isinstance(answer, Located)
    return answer


def fill(world: World, session: int, count: int, tenant: str = "default") -> list[bytes]:
    keys = [b"%s-%d" % (tenant.encode(), index) for index in range(count)]
    assert [put(world, session, key, tenant=tenant) for key in keys] == [OK] * count
    return keys


def test_a_put_is_invisible_until_its_end_and_then_found_with_a_lease() -> None:
    world = World()
    holder, client = world.holder(FakeHolder("h")), world.client()
    granted = world.call(client, PutStart(1, [b"k"], [PAGE]))
    assert isinstance(granted, Granted)
    assert exists(world, client, b"k") == [NOT_FOUND]
    generation = world.write(granted, 0, "default", b"k", PAGE)
    assert exists(world, client, b"k") == [NOT_FOUND], "logged, but not ended"
    world.call(client, PutEnd(2, [b"k"], [generation], [()]))
    place = get(world, client, b"k").places[0]
    assert (place.code, place.length, place.generation) == (OK, PAGE, generation)
    assert [spot.tier for spot in place.spots] == [Tier.MEMORY, Tier.SSD]
    assert place.spots[0].holder == holder.number


@pytest.mark.parametrize("promotes", [False, True])
def test_what_is_answered_without_a_step_is_what_a_step_answers(promotes: bool) -> None:
    world = World(MasterConfig(settle_s=0.0, promotion_on_hit=promotes))
    world.holder(FakeHolder("h"))
    client = world.client()
    put(world, client, b"k")
    for message in (Get(7, [b"k", b"other"]), Exists(7, [b"k", b"other"])):
        stepped, counted = world.call(client, message), dict(world.master.state.counters)
        quick = world.master.answer(world.now, client, message)
        if promotes and isinstance(message, Get):
            assert quick is None, "it may have effects"
        else:
            assert quick == stepped
        counts = world.master.state.counters
        assert isinstance(message, Exists) or counts["get_found"] == counted["get_found"] + (
            quick is not None
        )
    assert world.master.answer(world.now, client, Query(7, [b"k"])) is None
    assert world.master.answer(world.now, client + 1, Get(7, [b"k"])) is None, "nobody"


def test_an_equal_put_is_success_and_a_different_length_replaces_with_a_higher_generation() -> None:
    world = World()
    holder, client = world.holder(FakeHolder("h")), world.client()
    assert put(world, client, b"k") == OK
    first = get(world, client, b"k").places[0].generation
    assert put(world, client, b"k") == EXISTS
    assert put(world, client, b"k", PAGE * 2) == OK
    place = get(world, client, b"k").places[0]
    assert place.generation > first and place.length == 2 * PAGE
    assert list(holder.ssd) == [("default", b"k", place.generation)]


def test_the_loser_of_two_concurrent_puts_waits_and_finds_the_winners_bytes() -> None:
    """Field report H2: never partial state."""
    world = World()
    world.holder(FakeHolder("h"))
    winner, loser = world.client(), world.client()
    granted = world.call(winner, PutStart(1, [b"k"], [PAGE]))
    world.ask(loser, PutStart(7, [b"k"], [PAGE]))
    assert world.inbox[loser] == []
    assert isinstance(granted, Granted)
    world.call(winner, PutEnd(2, [b"k"], [world.write(granted, 0, "default", b"k", PAGE)], [()]))
    answer = world.inbox[loser][-1]
    assert isinstance(answer, Granted) and answer.grants[0].code == EXISTS


def test_a_stale_end_or_revoke_of_an_earlier_put_does_not_touch_the_newer_one() -> None:
    """Field report E3: operations carry a generation."""
    world = World()
    world.holder(FakeHolder("h"))
    client = world.client()
    first = world.call(client, PutStart(1, [b"k"], [PAGE]))
    assert isinstance(first, Granted)
    stale = first.grants[0].generation
    world.call(client, PutRevoke(2, [b"k"], [stale]))
    second = world.call(client, PutStart(3, [b"k"], [PAGE]))
    assert isinstance(second, Granted)
    for message in (PutEnd(4, [b"k"], [stale], [()]), PutRevoke(5, [b"k"], [stale])):
        answer = world.call(client, message)
        assert isinstance(answer, Codes) and answer.codes[0] == NOT_FOUND
    generation = world.write(second, 0, "default", b"k", PAGE)
    answer = world.call(client, PutEnd(6, [b"k"], [generation], [()]))
    assert isinstance(answer, Codes) and answer.codes[0] == OK


def test_a_lost_writers_put_is_revoked_at_once_and_its_key_is_free() -> None:
    """Field report H1: not after 30 seconds."""
    world = World()
    holder = world.holder(FakeHolder("h"))
    writer, other = world.client(), world.client()
    granted = world.call(writer, PutStart(1, [b"k"], [PAGE]))
    assert isinstance(granted, Granted)
    world.write(granted, 0, "default", b"k", PAGE)
    world.lose(writer)
    assert holder.memory == {} and holder.ssd == {}, "what had arrived is forgotten in both tiers"
    assert put(world, other, b"k") == OK


def test_exists_neither_leases_nor_counts_as_use() -> None:
    world = World(quiet(high_watermark=1.0, low_watermark=1.0))
    world.holder(FakeHolder("h", memory_bytes=4 * (PAGE + 64)))
    client = world.client()
    keys = fill(world, client, 4)
    for _ in range(50):
        assert exists(world, client, keys[0]) == [OK]
    assert put(world, client, b"new") == OK, "probing must not block eviction"
    query = world.call(client, Query(1, keys))
    assert isinstance(query, Located) and query.ttl_s == 0
    tiers = [[spot.tier for spot in place.spots] for place in query.places]
    assert tiers == [[Tier.SSD]] + [[Tier.MEMORY, Tier.SSD]] * 3, (
        "the probed key is still the oldest"
    )


def test_a_leased_object_is_passed_over_and_its_range_is_not_reused_before_the_lease_ends() -> None:
    world = World(quiet(high_watermark=1.0, low_watermark=1.0, lease_s=5.0, put_wait_s=60.0))
    world.holder(FakeHolder("h", memory_bytes=2 * (PAGE + 64)))
    client = world.client()
    fill(world, client, 2)
    offsets = {
        get(world, client, b"default-%d" % index).places[0].spots[0].offset for index in range(2)
    }
    world.ask(client, PutStart(9, [b"new"], [PAGE]))
    assert not isinstance(world.inbox[client][-1], Granted), "both are leased: the put waits"
    world.later(5.0)
    assert not isinstance(world.inbox[client][-1], Granted), (
        "the master counts 100 ms more than it promised (rule ST1)"
    )
    world.later(0.2)
    granted = world.inbox[client][-1]
    assert isinstance(granted, Granted) and granted.grants[0].code == OK
    assert granted.grants[0].rooms[0].offset in offsets


def test_a_removed_object_is_missing_at_once_but_its_leased_range_drains_first() -> None:
    world = World(quiet(high_watermark=1.0, low_watermark=1.0))
    holder = world.holder(FakeHolder("h", memory_bytes=PAGE + 64))
    client = world.client()
    fill(world, client, 1)
    get(world, client, b"default-0")
    world.call(client, Remove(5, [b"default-0"]))
    assert exists(world, client, b"default-0") == [NOT_FOUND] and holder.ssd == {}
    world.ask(client, PutStart(6, [b"new"], [PAGE]))
    waiting = len(world.inbox[client])
    world.later(1.0)
    assert len(world.inbox[client]) == waiting
    assert len(holder.memory) == 1, "not retired while someone may read it"
    world.later(4.2)
    assert holder.memory == {}


def test_eviction_takes_durable_objects_by_last_use_from_the_high_to_the_low_watermark() -> None:
    size = PAGE + 64
    world = World(quiet(high_watermark=0.9, low_watermark=0.5, lease_s=0.0))
    world.holder(FakeHolder("h", memory_bytes=10 * size))
    client = world.client()
    keys = fill(world, client, 9)
    world.later(1)
    get(world, client, keys[0])
    world.later(1)
    assert put(world, client, b"tenth") == OK
    answer = world.call(client, Query(1, keys))
    assert isinstance(answer, Located)
    kept = [
        key
        for key, place in zip(keys, answer.places, strict=True)
        if place.spots[0].tier is Tier.MEMORY
    ]
    assert kept == [keys[0], *keys[6:]], (
        "the read one stays, the oldest go, and 5 of 10 places are used afterwards"
    )
    assert all(place.code == OK for place in answer.places), "all are still readable from SSD"


def test_what_is_not_yet_durable_is_not_evicted_and_the_put_waits_for_the_log() -> None:
    """Rule ST7: 200 puts into a small store all succeed, since puts wait for the SSD instead of failing."""
    world = World(quiet(high_watermark=1.0, low_watermark=1.0))
    holder = world.holder(FakeHolder("h", memory_bytes=2 * (PAGE + 64)))
    client = world.client()
    for key in (b"a", b"b"):
        assert put(world, client, key, persist=False) == OK
    world.ask(client, PutStart(1, [b"c"], [PAGE]))
    assert isinstance(world.inbox[client][-1], Codes)
    generation = next(entry.generation for entry in holder.memory.values() if entry.key == b"a")
    world.persist(holder, "default", b"a", generation, PAGE)
    granted = world.inbox[client][-1]
    assert isinstance(granted, Granted) and granted.grants[0].code == OK


def test_a_put_that_finds_no_room_is_refused_after_put_wait_and_not_before() -> None:
    world = World(quiet(high_watermark=1.0, low_watermark=1.0, put_wait_s=2.0))
    world.holder(FakeHolder("h", memory_bytes=PAGE + 64))
    client = world.client()
    assert put(world, client, b"a", persist=False) == OK
    answers = len(world.inbox[client])
    world.ask(client, PutStart(1, [b"b"], [PAGE]))
    world.later(1.9)
    assert len(world.inbox[client]) == answers
    world.later(0.2)
    granted = world.inbox[client][-1]
    assert isinstance(granted, Granted) and granted.grants[0].code == Status.NO_SPACE


def test_only_so_many_keys_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the master's memory meanwhile. Whoever comes on top is told at once, and may wait when others have done so."""
    monkeypatch.setattr(puts, "MAX_WAITING_KEYS", 10)
    world = World(quiet(put_wait_s=2.0))
    world.holder(FakeHolder("h", memory_bytes=1 << 16))
    first, second = world.client(), world.client()
    assert put(world, first, b"on its way to the log", 40_000, persist=False) == OK
    six = PutStart(1, [b"k-%d" % number for number in range(6)], [1 << 15] * 6)
    refused = Granted(1, [Grant(Status.NO_SPACE)] * 6)
    world.ask(first, six)
    assert world.call(second, six) == refused and len(world.master.state.waiting) == 1
    world.later(2.1)
    assert world.inbox[first][-1] == refused and not world.master.state.waiting
    before = len(world.inbox[second])
    world.ask(second, six)
    assert len(world.inbox[second]) == before and len(world.master.state.waiting) == 1


def test_a_batch_larger_than_the_room_is_granted_in_part_and_never_waits_while_holding_room() -> (
    None
):
    world = World(quiet(high_watermark=1.0, low_watermark=1.0))
    world.holder(FakeHolder("h", memory_bytes=2 * (PAGE + 64)))
    client = world.client()
    granted = world.call(client, PutStart(1, [b"a", b"b", b"c"], [PAGE] * 3))
    assert isinstance(granted, Granted)
    assert [grant.code for grant in granted.grants] == [OK, OK, AGAIN]


def test_a_holder_with_a_broken_ssd_evicts_as_a_plain_cache() -> None:
    world = World(quiet(high_watermark=1.0, low_watermark=1.0))
    holder = world.holder(FakeHolder("h", memory_bytes=PAGE + 64))
    client = world.client()
    assert put(world, client, b"a", persist=False) == OK
    world.step(FromHolder(holder.session, Beat(0, "no space left on device", False)))
    assert put(world, client, b"b", persist=False) == OK
    assert exists(world, client, b"a", b"b") == [NOT_FOUND, OK]


def test_over_quota_the_tenants_own_oldest_durable_objects_go_and_nobody_elses() -> None:
    size = PAGE + 64
    world = World(quiet(quotas={"small": 2 * size}))
    holder = world.holder(FakeHolder("h", memory_bytes=100 * size))
    small, big = world.client("small"), world.client("big")
    others = fill(world, big, 5, "big")
    for key in (b"a", b"b", b"c"):
        assert put(world, small, key, tenant="small") == OK
    answer = world.call(small, Query(1, [b"a", b"b", b"c"]))
    assert isinstance(answer, Located)
    assert [place.spots[0].tier for place in answer.places] == [Tier.SSD, Tier.MEMORY, Tier.MEMORY]
    assert exists(world, big, *others) == [OK] * 5
    assert holder.number
    assert put(world, small, b"x", tenant="small", persist=False) == OK
    assert put(world, small, b"y", tenant="small", persist=False) == OK
    assert put(world, small, b"z", tenant="small", persist=False) == Status.QUOTA_EXCEEDED


def test_equal_keys_of_two_tenants_are_two_objects() -> None:
    world = World()
    world.holder(FakeHolder("h"))
    ours, theirs = world.client("ours"), world.client("theirs")
    assert put(world, ours, b"k", tenant="ours") == OK
    assert exists(world, theirs, b"k") == [NOT_FOUND]
    world.call(theirs, Remove(1, [b"k"]))
    assert exists(world, ours, b"k") == [OK]
    page = world.call(theirs, ListKeys(1, b"", b"", 10))
    assert isinstance(page, KeyPage) and page.keys == []


def test_match_prefix_counts_leading_keys_of_which_every_part_is_there() -> None:
    world = World()
    world.holder(FakeHolder("h"))
    client = world.client()
    for key in (b"1a", b"1b", b"2a", b"2b", b"3a", b"4a", b"4b"):
        put(world, client, key)
    answer = world.call(client, MatchPrefix(1, [b"1", b"2", b"3", b"4"], [b"a", b"b"]))
    assert isinstance(answer, Count) and answer.count == 2
    answer = world.call(client, MatchPrefix(1, [b"1a", b"1b", b"x"], []))
    assert isinstance(answer, Count) and answer.count == 2


def test_remove_is_answered_only_when_the_holder_has_logged_it() -> None:
    world = World()
    holder = world.holder(FakeHolder("h", acks=False))
    client = world.client()
    put(world, client, b"k")
    answers = len(world.inbox[client])
    world.ask(client, Remove(9, [b"k"]))
    assert len(world.inbox[client]) == answers and exists(world, client, b"k") == [NOT_FOUND]
    world.step(FromHolder(holder.session, Buried(holder.unacked[-1])))
    assert world.inbox[client][-1] == Codes(9, bytes([OK]))


def test_a_live_holder_keeps_the_tombstone_for_an_absent_one_even_over_a_master_restart() -> None:
    """Rule ST3: a removed key never comes back, whoever was away and whoever restarted meanwhile."""
    world = World(quiet(replicas=2))
    away, live = world.holder(FakeHolder("away")), world.holder(FakeHolder("live"))
    client = world.client()
    assert put(world, client, b"k") == OK and len(away.ssd) == len(live.ssd) == 1
    world.lose(away.session)
    removed = world.call(client, Remove(1, [b"k"]))
    assert isinstance(removed, Codes) and removed.codes[0] == OK
    assert [grave.behalf for grave in live.graves] == ["away"]
    world.restart_master()
    world.holder(live)
    away.restarted()
    world.holder(away)
    assert exists(world, world.client(), b"k") == [NOT_FOUND]
    assert away.ssd == {}, "it was told to bury its record"
    assert live.graves == [], "and the grave is no longer kept"


def test_a_holder_that_a_restarted_master_never_saw_is_told_of_removals_too() -> None:
    """Found by the random histories: it was away when the master restarted, so the master did not know it had a copy."""
    world = World(quiet(replicas=2))
    away, live = world.holder(FakeHolder("away")), world.holder(FakeHolder("live"))
    put(world, world.client(), b"k")
    world.lose(away.session)
    world.restart_master()
    world.holder(live)
    client = world.client()
    removed = world.call(client, Remove(1, [b"k"]))
    assert (
        isinstance(removed, Codes)
        and removed.codes[0] == OK
        and [grave.behalf for grave in live.graves] == ["away"]
    )
    world.holder(away)
    assert exists(world, client, b"k") == [NOT_FOUND] and away.ssd == {} and live.graves == []


def test_a_put_that_was_given_up_while_its_holder_was_away_does_not_take_the_older_object_with_it() -> (
    None
):
    """Found by the simulator: the returned holder was told to bury everything up to that put."""
    world = World()
    holder, _ = world.holder(FakeHolder("h")), world.holder(FakeHolder("keeper", memory_bytes=64))
    client = world.client()
    assert put(world, client, b"k") == OK
    (older,) = holder.ssd
    granted = world.call(client, PutStart(1, [b"k"], [2 * PAGE]))
    assert isinstance(granted, Granted)
    generation = world.write(granted, 0, "default", b"k", 2 * PAGE)
    world.lose(holder.session)
    ended = world.call(client, PutEnd(2, [b"k"], [generation], [()]))
    assert isinstance(ended, Codes) and ended.codes[0] == UNAVAILABLE
    world.holder(holder)
    assert exists(world, client, b"k") == [OK] and get(world, client, b"k").places[0].length == PAGE
    assert list(holder.ssd) == [older]


def test_a_put_that_failed_at_one_holder_stays_at_the_others_when_that_one_returns() -> None:
    """Found by the simulator: what was kept against the returned holder's replica took the object everywhere."""
    world = World(quiet(replicas=2))
    left, _ = world.holder(FakeHolder("left")), world.holder(FakeHolder("right"))
    client = world.client()
    granted = world.call(client, PutStart(1, [b"k"], [PAGE]))
    assert isinstance(granted, Granted) and len(granted.grants[0].rooms) == 2
    lost = left.number
    world.lose(left.session)
    generation = world.write(granted, 0, "default", b"k", PAGE)
    kept = tuple(room.holder for room in granted.grants[0].rooms if room.holder != lost)
    ended = world.call(client, PutEnd(2, [b"k"], [generation], [kept]))
    assert isinstance(ended, Codes) and ended.codes[0] == OK
    world.holder(left)
    assert exists(world, client, b"k") == [OK]


def test_a_removal_between_a_holders_registration_and_its_inventory_counts_against_that_inventory() -> (
    None
):
    """Found by the simulator: the inventory was sent before the removal arrived, and brought the key back; a put then said EXISTS."""
    world = World()
    holder, client = world.holder(FakeHolder("h")), world.client()
    assert put(world, client, b"k") == OK
    memory, ssd = list(holder.memory.values()), list(holder.ssd.values())
    world.lose(holder.session)
    session = world.client("@holder")
    world.step(
        FromHolder(session, Register("h", "a", "127.0.0.1", 1, "", "here", 1 << 20, 1 << 30, 1, []))
    )
    world.ask(client, Remove(1, [b"k"]))
    (bury,) = (message for message in world.inbox[session] if isinstance(message, Bury))
    world.step(FromHolder(session, Inventory(0, memory, ssd, [], True)))
    assert exists(world, client, b"k") == [NOT_FOUND]
    world.step(FromHolder(session, Buried(bury.op)))
    granted = world.call(client, PutStart(2, [b"k"], [PAGE]))
    assert isinstance(granted, Granted) and granted.grants[0].code == OK, "not EXISTS: it is gone"


def test_remove_with_nobody_to_keep_the_tombstone_removes_nothing() -> None:
    world = World()
    holder, client = world.holder(FakeHolder("h")), world.client()
    put(world, client, b"k")
    world.lose(holder.session)
    answer = world.call(client, Remove(1, [b"k", b"none"]))
    assert isinstance(answer, Codes) and list(answer.codes) == [UNAVAILABLE, NOT_FOUND]
    world.holder(holder)
    assert exists(world, client, b"k") == [OK], "it is as if nobody had asked"
    assert world.call(client, Remove(2, [b"k"])) == Codes(2, bytes([OK]))


def test_remove_waits_for_a_holder_that_a_restarted_master_has_not_heard_and_no_other_can_stand_in_for() -> (
    None
):
    world = World(quiet(replicas=2))
    away, live = world.holder(FakeHolder("away")), world.holder(FakeHolder("live"))
    put(world, world.client(), b"k")
    for holder in (away, live):
        world.lose(holder.session)
    world.restart_master()
    session = world.client("@holder")
    world.step(
        FromHolder(
            session,
            Register("live", "a", "127.0.0.1", 1, "", "here", 1 << 20, 1 << 30, 1, ["away"]),
        )
    )
    world.step(FromHolder(session, Inventory(0, list(live.memory.values()), [], [], False)))
    client = world.client()
    assert world.call(client, Remove(1, [b"k"])) == Codes(1, bytes([UNAVAILABLE])), (
        "'live' may have more of it, and is alone"
    )


def test_a_removal_whose_keeper_goes_before_it_is_logged_may_or_may_not_have_happened() -> None:
    world = World()
    holder, keeper = (
        world.holder(FakeHolder("h")),
        world.holder(FakeHolder("keeper", memory_bytes=64, acks=False)),
    )
    client = world.client()
    put(world, client, b"k")
    world.lose(holder.session)
    world.ask(client, Remove(1, [b"k", b"none"]))
    world.lose(keeper.session)
    assert world.inbox[client][-1] == Codes(1, bytes([Status.TIMEOUT, NOT_FOUND]))
    world.holder(holder)
    assert exists(world, client, b"k") == [NOT_FOUND], "the master still knew"


def test_a_lost_holders_keys_are_unavailable_and_come_back_with_its_inventory() -> None:
    world = World()
    holder, client = world.holder(FakeHolder("h")), world.client()
    put(world, client, b"k")
    world.lose(holder.session)
    assert exists(world, client, b"k") == [UNAVAILABLE]
    holder.restarted()
    world.holder(holder)
    place = get(world, client, b"k").places[0]
    assert [spot.tier for spot in place.spots] == [Tier.SSD]


def test_a_restarted_master_has_everything_again_and_reuses_no_range_that_may_be_leased() -> None:
    """Rule ST4 and field report H3: memory in use is not free, and generations rise."""
    world = World(quiet(high_watermark=1.0, low_watermark=1.0))
    holder, client = world.holder(FakeHolder("h", memory_bytes=2 * (PAGE + 64))), world.client()
    fill(world, client, 2)
    before = get(world, client, b"default-1").places[0].generation
    world.restart_master()
    client = world.client()
    assert exists(world, client, b"default-0") == [UNAVAILABLE], (
        "not 'missing' before anyone was heard"
    )
    world.holder(holder)
    assert exists(world, client, b"default-0", b"default-1") == [OK, OK]
    world.ask(client, PutStart(1, [b"new"], [PAGE]))
    assert isinstance(world.inbox[client][-1], Codes), "ranges are kept for ttl + 1 s"
    world.later(6.1)
    world.ask(client, PutStart(2, [b"new"], [PAGE]))
    granted = world.inbox[client][-1]
    assert isinstance(granted, Granted) and granted.grants[0].generation > before


def test_an_inventory_with_a_hole_in_its_sequence_ends_the_connection() -> None:
    from forebay.store.wire.messages import Inventory

    world = World()
    holder = world.holder(FakeHolder("h"))
    world.step(FromHolder(holder.session, Inventory(5, [], [], [], True)))
    assert world.closed == [holder.session]


def test_silence_makes_a_holder_suspect_within_two_seconds_and_any_word_ends_it() -> None:
    world = World()
    holder, client = world.holder(FakeHolder("h")), world.client()
    put(world, client, b"k")
    world.now += 2.1
    world.step(Ticked())
    assert exists(world, client, b"k") == [UNAVAILABLE]
    world.step(FromHolder(holder.session, Beat(0, "ok", True)))
    assert exists(world, client, b"k") == [OK]


def test_what_waits_for_a_silent_holder_does_not_wait_for_ever() -> None:
    """Its machine vanished: no connection ends. Another one keeps the removal for it."""
    world = World(quiet())
    gone, client = world.holder(FakeHolder("gone")), world.client()
    put(world, client, b"k")
    keeper = world.holder(FakeHolder("keeper"))
    gone.acks = gone.beats = False
    world.ask(client, Remove(9, [b"k"]))
    before = len(world.inbox[client])
    for _ in range(13):
        assert world.closed == [] and len(world.inbox[client]) == before
        world.later(1.0)
    world.later(1.0)
    assert world.closed == [gone.session]
    assert world.inbox[client][before:] == [Codes(9, bytes([OK]))] and [
        grave.behalf for grave in keeper.graves
    ] == ["gone"]


def test_a_writer_that_does_not_go_on_loses_its_put_and_nobody_waits_for_it() -> None:
    world = World(quiet())
    world.holder(FakeHolder("h"))
    idler, client = world.client(), world.client()
    granted = world.call(idler, PutStart(1, [b"k"], [PAGE]))
    assert isinstance(granted, Granted)
    for _ in range(59):
        world.later(1.0)
    assert world.master.state.tenants["default"].pending
    for _ in range(3):
        world.later(1.0)
    assert world.master.state.counters["puts_expired"] == 1 and put(world, client, b"k") == OK
    assert world.call(idler, PutEnd(3, [b"k"], [granted.grants[0].generation], [()])) == Codes(
        3, bytes([NOT_FOUND])
    )
    assert exists(world, client, b"k") == [OK]


def test_an_object_whose_file_was_evicted_is_gone_and_list_agrees_with_exists() -> None:
    """Field reports N4 and N5."""
    world = World(quiet(high_watermark=1.0, low_watermark=1.0))
    holder, client = world.holder(FakeHolder("h", memory_bytes=PAGE + 64)), world.client()
    put(world, client, b"old")
    put(world, client, b"new")
    generation = get(world, client, b"old").places[0].generation
    world.step(FromHolder(holder.session, Dropped([HeldSsd("default", b"old", generation, PAGE)])))
    assert exists(world, client, b"old", b"new") == [NOT_FOUND, OK]
    page = world.call(client, ListKeys(1, b"", b"", 10))
    assert isinstance(page, KeyPage) and page.keys == [(b"new", PAGE)]


def test_what_was_evicted_from_the_ssd_may_be_evicted_from_memory_too() -> None:
    """Found in review: it counted as not yet durable for ever, and a memory full of such objects took no put any more."""
    world = World(quiet(high_watermark=1.0, low_watermark=1.0))
    holder, client = world.holder(FakeHolder("h", memory_bytes=PAGE + 64)), world.client()
    put(world, client, b"old")
    entry = next(iter(holder.ssd.values()))
    holder.ssd.clear()
    world.step(FromHolder(holder.session, Dropped([entry])))
    assert exists(world, client, b"old") == [OK]
    assert put(world, client, b"new") == OK
    assert exists(world, client, b"old", b"new") == [NOT_FOUND, OK]


def test_what_no_log_will_ever_take_is_a_plain_cache_entry() -> None:
    world = World(quiet(high_watermark=1.0, low_watermark=1.0))
    holder, client = world.holder(FakeHolder("h", memory_bytes=PAGE + 64)), world.client()
    granted = world.call(client, PutStart(1, [b"k"], [PAGE]))
    assert isinstance(granted, Granted)
    generation = world.write(granted, 0, "default", b"k", PAGE, persist=False)
    world.step(FromHolder(holder.session, Dropped([HeldSsd("default", b"k", generation, PAGE)])))
    world.call(client, PutEnd(2, [b"k"], [generation], [()]))
    assert put(world, client, b"next", persist=False) == OK


def test_a_record_that_left_the_log_before_its_puts_end_makes_nothing_durable() -> None:
    world = World(quiet())
    holder, client = world.holder(FakeHolder("h")), world.client()
    granted = world.call(client, PutStart(1, [b"k"], [PAGE]))
    assert isinstance(granted, Granted)
    generation = world.write(granted, 0, "default", b"k", PAGE)
    world.step(FromHolder(holder.session, Dropped([HeldSsd("default", b"k", generation, PAGE)])))
    world.call(client, PutEnd(2, [b"k"], [generation], [()]))
    assert [spot.tier for spot in get(world, client, b"k").places[0].spots] == [Tier.MEMORY]


def test_a_holder_that_registers_twice_on_a_connection_loses_it() -> None:
    """Found by fuzzing: the name it had first stayed present for ever, and that name's return ended the master."""
    world = World(quiet())
    holder, client = world.holder(FakeHolder("first")), world.client()
    again = Register("second", "a", "127.0.0.1", 1, "", "here", 1 << 20, 0, 0, [])
    world.step(FromHolder(holder.session, again))
    assert holder.session in world.closed and "second" not in world.master.state.by_name
    world.holder(FakeHolder("first"))
    assert put(world, client, b"k") == OK


def test_replicas_go_to_different_holders_and_losing_one_leaves_the_key_readable() -> None:
    world = World(quiet(replicas=2))
    first = world.holder(FakeHolder("1"))
    world.holder(FakeHolder("2"))
    client = world.client()
    assert put(world, client, b"k", persist=False) == OK
    assert len({spot.holder for spot in get(world, client, b"k").places[0].spots}) == 2
    world.lose(first.session)
    assert [spot.holder for spot in get(world, client, b"k").places[0].spots] == [2]


def test_an_illegal_transition_raises_and_changes_nothing() -> None:
    class Replica:
        state = ReplicaState.WRITING

    replica = Replica()
    with pytest.raises(IllegalTransition):
        move(replica, Cause.FREE)
    assert replica.state is ReplicaState.WRITING


# ---------------------------------------------------------------------------------------------- promotion


def on_ssd_only(world: World, client: int, holder: FakeHolder, key: bytes = b"k") -> None:
    """``key`` is stored, then pushed out of a memory of two places."""
    assert put(world, client, key) == OK
    for index in range(2):
        assert put(world, client, b"%s-filler-%d" % (key, index)) == OK
    answer = world.call(client, Query(1, [key]))
    assert isinstance(answer, Located) and [spot.tier for spot in answer.places[0].spots] == [
        Tier.SSD
    ]


def prefetching(**changes: object) -> tuple[World, FakeHolder, int]:
    defaults: dict[str, object] = {
        "ssd_prefetch": True,
        "prefetch_share": 0.5,
        "high_watermark": 1.0,
        "low_watermark": 1.0,
    }
    world = World(quiet(**(defaults | changes)))
    return world, world.holder(FakeHolder("h", memory_bytes=2 * (PAGE + 64))), world.client()


def test_register_prefetch_refuses_in_the_documented_order() -> None:
    world, holder, client = prefetching(inflight_promotions=1)
    assert world.promote(holder, "default", b"k") == PrefetchCode.OBJECT_NOT_FOUND
    granted = world.call(client, PutStart(1, [b"k"], [PAGE]))
    assert world.promote(holder, "default", b"k") == PrefetchCode.REPLICA_IS_NOT_READY, (
        "put in flight"
    )
    assert isinstance(granted, Granted)
    world.call(client, PutEnd(2, [b"k"], [world.write(granted, 0, "default", b"k", PAGE)], [()]))
    assert world.promote(holder, "default", b"k") == PrefetchCode.PROMOTION_ALREADY_EXISTS, (
        "a MEMORY replica"
    )
    world.call(client, Remove(3, [b"k"]))
    on_ssd_only(world, client, holder)
    stranger = world.holder(FakeHolder("other", memory_bytes=PAGE))
    assert world.promote(stranger, "default", b"k") == PrefetchCode.INVALID_PARAMS
    assert world.promote(holder, "default", b"k") == PrefetchCode.OK
    assert world.promote(holder, "default", b"k") == PrefetchCode.PROMOTION_ALREADY_EXISTS, "a task"
    on_ssd_only(world, client, holder, b"k2")
    assert world.promote(holder, "default", b"k2") == PrefetchCode.KEYS_ULTRA_LIMIT


def test_promotions_keep_within_the_tenants_quota_and_push_nothing_of_it_out() -> None:
    world = World(
        quiet(
            promotion_on_hit=True,
            ssd_prefetch=True,
            prefetch_share=0.5,
            quotas={"default": 2 * (PAGE + 64)},
        )
    )
    holder, client = world.holder(FakeHolder("h", memory_bytes=8 * (PAGE + 64))), world.client()
    on_ssd_only(world, client, holder)
    assert world.promote(holder, "default", b"k") == PrefetchCode.KEYS_ULTRA_LIMIT
    for _ in range(3):
        get(world, client, b"k")
    assert holder.promotes == [] and world.master.state.counters["promotion_over_quota"] == 2
    assert exists(world, client, b"k-filler-0", b"k-filler-1") == [OK, OK]
    world.call(client, Remove(1, [b"k-filler-0"]))
    assert world.promote(holder, "default", b"k") == PrefetchCode.OK
    task = world.last_task
    assert put(world, client, b"meanwhile", persist=False) == OK
    assert world.alloc(holder, task).allotments[0].code == PrefetchCode.KEYS_ULTRA_LIMIT, (
        "looked at again when memory is taken"
    )
    assert world.master.state.tenants["default"].memory_bytes == 2 * (PAGE + 64)


def test_register_prefetch_is_unavailable_while_off_or_not_serving() -> None:
    world = World()
    holder, client = world.holder(FakeHolder("h")), world.client()
    put(world, client, b"k")
    assert world.promote(holder, "default", b"k") == PrefetchCode.UNAVAILABLE_IN_CURRENT_STATUS


def test_the_read_lease_of_a_prefetch_is_granted_at_commit_and_a_failed_one_leaves_none() -> None:
    world, holder, client = prefetching()
    on_ssd_only(world, client, holder)
    world.promote(holder, "default", b"k", hint_s=8.0)
    world.finish(
        holder, world.last_task, "default", b"k", world.alloc(holder, world.last_task), ok=False
    )
    found = world.master.state.tenants["default"].objects[b"k"]
    assert found.lease_until == 0 and found.task is None and found.memory == ()
    world.later(60)
    world.promote(holder, "default", b"k", hint_s=8.0)
    world.finish(holder, world.last_task, "default", b"k", world.alloc(holder, world.last_task))
    assert len(found.memory) == 1 and found.lease_until == pytest.approx(world.now + 8.1)


def test_the_commit_lease_is_at_most_thirty_seconds_whatever_the_hint() -> None:
    world, holder, client = prefetching()
    on_ssd_only(world, client, holder)
    world.promote(holder, "default", b"k", hint_s=1e9)
    world.finish(holder, world.last_task, "default", b"k", world.alloc(holder, world.last_task))
    assert world.master.state.tenants["default"].objects[b"k"].lease_until == pytest.approx(
        world.now + 30.1
    )


def test_prefetched_objects_keep_to_their_share_replace_only_their_kind_and_leave_it_on_first_get() -> (
    None
):
    world, holder, client = prefetching(lease_s=1.0)
    for key in (b"k1", b"k2", b"k3"):
        on_ssd_only(world, client, holder, key)
    world.promote(holder, "default", b"k1")
    world.finish(holder, world.last_task, "default", b"k1", world.alloc(holder, world.last_task))
    world.promote(holder, "default", b"k2")
    refused = world.alloc(holder, world.last_task)
    assert refused.allotments[0].code is PrefetchCode.NO_AVAILABLE_HANDLE, (
        "one of two places is the share, and it is leased"
    )
    world.later(1.2)
    world.promote(holder, "default", b"k2")
    world.finish(holder, world.last_task, "default", b"k2", world.alloc(holder, world.last_task))
    objects = world.master.state.tenants["default"].objects
    assert objects[b"k1"].memory == (), "its own kind was replaced once unleased"
    get(world, client, b"k2")
    assert world.master.state.holders[holder.number].prefetched_bytes() == 0, (
        "read: no longer merely prefetched"
    )


def test_a_stray_put_end_does_not_complete_a_promotion() -> None:
    """Field report N8."""
    world, holder, client = prefetching()
    on_ssd_only(world, client, holder)
    world.promote(holder, "default", b"k")
    spot = world.alloc(holder, world.last_task).allotments[0]
    answer = world.call(client, PutEnd(1, [b"k"], [spot.stamp], [()]))
    assert isinstance(answer, Codes) and answer.codes[0] == NOT_FOUND
    assert len(world.master.state.tasks) == 1


def test_a_key_removed_during_its_promotion_stays_removed() -> None:
    world, holder, client = prefetching()
    on_ssd_only(world, client, holder)
    world.promote(holder, "default", b"k")
    allocated = world.alloc(holder, world.last_task)
    world.call(client, Remove(1, [b"k"]))
    world.finish(holder, world.last_task, "default", b"k", allocated)
    assert exists(world, client, b"k") == [NOT_FOUND] and world.master.state.tasks == {}


def test_a_promotion_nobody_finishes_is_given_up() -> None:
    world, holder, client = prefetching(task_timeout_s=10.0)
    on_ssd_only(world, client, holder)
    world.promote(holder, "default", b"k")
    world.alloc(holder, world.last_task)
    world.later(10.1)
    assert world.master.state.tasks == {} and exists(world, client, b"k") == [OK]


def test_promotion_on_hit_wants_repeated_gets_and_room_and_is_off_by_default() -> None:
    """Field report N9: off = no change; one get below the threshold = none; watermark gate."""
    for on, gets, high, expected in (
        (False, 9, 1.0, 0),
        (True, 1, 1.0, 0),
        (True, 2, 1.0, 1),
        (True, 2, 0.4, 0),
    ):
        world = World(quiet(promotion_on_hit=on, high_watermark=1.0, low_watermark=1.0))
        holder, client = world.holder(FakeHolder("h", memory_bytes=2 * (PAGE + 64))), world.client()
        on_ssd_only(world, client, holder)
        world.call(client, Remove(1, [b"k-filler-0"]))
        world.master.state.config = quiet(
            promotion_on_hit=on, high_watermark=high, low_watermark=high
        )
        for _ in range(gets):
            get(world, client, b"k")
        assert len(holder.promotes) == expected, (on, gets, high)


KEYS = [b"k", b"k-filler-0", b"k-filler-1"]
READ_ONLY = [
    Query(1, KEYS),
    Exists(1, KEYS),
    MatchPrefix(1, KEYS, []),
    ListKeys(1, b"", b"", 100),
    AskStats(1),
]


@pytest.mark.parametrize("question", READ_ONLY, ids=lambda one: type(one).__name__)
def test_a_read_only_query_gives_no_lease_no_recency_no_promotion_and_counts_nothing(
    question: ClientToMaster,
) -> None:
    world, holder, client = prefetching(promotion_on_hit=True)
    on_ssd_only(world, client, holder)
    state = world.master.state
    leases = [state.tenants["default"].objects[key].lease_until for key in KEYS]
    counters, tick = dict(state.counters), state.tick
    for _ in range(20):
        world.call(client, question)
    assert leases == [state.tenants["default"].objects[key].lease_until for key in KEYS], "no lease"
    assert tick == state.tick, "no recency"
    assert holder.promotes == [] and state.sketch.estimate(b"default\0k") == 0, (
        "no promotion, not even a count towards one"
    )
    assert counters == state.counters, "no metrics"


def test_the_same_with_a_get_moves_all_of_it() -> None:
    """The control: what the test above looks at does change when something is read."""
    world, holder, client = prefetching(promotion_on_hit=True)
    on_ssd_only(world, client, holder)
    state = world.master.state
    counters, tick = dict(state.counters), state.tick
    for _ in range(2):
        world.call(client, Get(1, KEYS))
    assert (
        state.tick > tick
        and state.counters != counters
        and state.sketch.estimate(b"default\0k") == 2
    )
    assert any(found.lease_until > world.now for found in state.tenants["default"].objects.values())


def test_stats_add_up() -> None:
    world = World()
    world.holder(FakeHolder("h"))
    client = world.client()
    fill(world, client, 3)
    stats = world.call(client, AskStats(1))
    assert isinstance(stats, StoreStats)
    assert (stats.objects, stats.memory_used, stats.holders_usable) == (3, 3 * (PAGE + 64), 1)
    assert stats.counters["put"] == 3 and stats.tenants["default"] == stats.memory_used


def returned(world: World, holder: FakeHolder) -> None:
    """kill -9 of a holder, and it is back with its log."""
    world.lose(holder.session)
    holder.restarted()
    world.holder(holder)


def logged_by_two(world: World) -> tuple[list[FakeHolder], int, int]:
    """A put of which both holders have logged the bytes, and that has not ended."""
    holders = [world.holder(FakeHolder(name)) for name in ("h0", "h1")]
    client = world.client()
    granted = world.call(client, PutStart(1, [b"k"], [PAGE]))
    assert isinstance(granted, Granted)
    return holders, client, world.write(granted, 0, "default", b"k", PAGE)


def test_what_a_holder_logged_of_a_put_before_it_was_killed_goes_with_a_removal() -> None:
    world = World(quiet(replicas=2))
    holders, client, generation = logged_by_two(world)
    returned(world, holders[1])
    assert world.call(client, PutEnd(2, [b"k"], [generation], [()])) == Codes(2, bytes([OK]))
    assert world.call(client, Remove(3, [b"k"])) == Codes(3, bytes([OK]))
    assert not holders[0].ssd and not holders[1].ssd
    world.restart_master()
    for holder in holders:
        world.holder(holder)
    assert exists(world, world.client(), b"k") == [NOT_FOUND]


@pytest.mark.parametrize("ending", ["end", "revoke", "lost"])
def test_what_killed_holders_logged_of_a_put_that_came_to_nothing_is_buried(ending: str) -> None:
    world = World(quiet(replicas=2))
    holders, client, generation = logged_by_two(world)
    for holder in holders:
        returned(world, holder)
    if ending == "end":
        assert world.call(client, PutEnd(2, [b"k"], [generation], [()])) == Codes(
            2, bytes([UNAVAILABLE])
        )
    elif ending == "revoke":
        world.call(client, PutRevoke(2, [b"k"], [generation]))
    else:
        world.lose(client)
    assert not holders[0].ssd and not holders[1].ssd


def test_what_a_writer_did_not_write_is_buried_at_a_holder_that_was_killed_since() -> None:
    world = World(quiet(replicas=2))
    holders, client, generation = logged_by_two(world)
    returned(world, holders[1])
    world.call(client, PutEnd(2, [b"k"], [generation], [(holders[0].number,)]))
    assert holders[0].ssd and not holders[1].ssd


def stored_by_two(world: World) -> tuple[list[FakeHolder], int, int]:
    """A put that is stored in the memory of both holders, and of which neither has said that it is logged."""
    holders = [world.holder(FakeHolder(name)) for name in ("h0", "h1")]
    client = world.client()
    granted = world.call(client, PutStart(1, [b"k"], [PAGE]))
    assert isinstance(granted, Granted)
    generation = world.write(granted, 0, "default", b"k", PAGE, persist=False)
    assert world.call(client, PutEnd(2, [b"k"], [generation], [()])) == Codes(2, bytes([OK]))
    return holders, client, generation


def test_what_a_holder_logged_and_could_not_say_before_its_memory_was_evicted_goes_with_a_removal() -> (
    None
):
    """Both log it and one is heard, so its memory may go everywhere; the other is killed before it can say that it has logged it."""
    world = World(quiet(replicas=2))
    holders, client, generation = stored_by_two(world)
    world.persist(holders[1], "default", b"k", generation, PAGE)
    for replica in world.master.state.tenants["default"].objects[b"k"].memory:
        evict(world.master.state, replica)
    holders[0].ssd["default", b"k", generation] = HeldSsd("default", b"k", generation, PAGE)
    world.lose(holders[0].session)
    assert world.call(client, Remove(3, [b"k"])) == Codes(3, bytes([OK]))
    holders[0].restarted()
    world.holder(holders[0])
    assert exists(world, client, b"k") == [NOT_FOUND]
    assert not holders[0].ssd and not holders[1].ssd


def test_a_removal_reaches_a_log_that_is_back_and_has_yet_to_say_what_it_has() -> None:
    """Logged, killed before it could say so, and back: between its registration and its inventory the key is removed."""
    world = World(quiet(replicas=2))
    holders, client, generation = stored_by_two(world)
    holders[0].ssd["default", b"k", generation] = HeldSsd("default", b"k", generation, PAGE)
    world.lose(holders[0].session)
    holders[0].restarted()
    entries = list(holders[0].ssd.values())
    holders[0].tells = holders[0].acks = False
    world.holder(holders[0])
    world.ask(client, Remove(3, [b"k"]))
    world.step(
        FromHolder(holders[0].session, Inventory(0, [], entries, [], True))
    )  # on its way when the removal came
    for bury in holders[0].unacked:
        world.step(FromHolder(holders[0].session, Buried(bury)))
    assert world.inbox[client][-1] == Codes(3, bytes([OK]))
    assert exists(world, client, b"k") == [NOT_FOUND]
    assert not holders[0].ssd


def test_who_has_said_what_its_log_has_is_not_asked_again() -> None:
    world = World(quiet(replicas=2))
    holders = [world.holder(FakeHolder(name)) for name in ("h0", "h1")]
    assert put(world, world.client(), b"k") == OK
    known = world.master.state.tenants["default"].objects[b"k"]
    for replica in known.memory:
        evict(world.master.state, replica)
    assert known.unheard == (), "both had said so"
    entry = HeldSsd("default", b"k", known.generation, PAGE)
    world.step(FromHolder(holders[0].session, Dropped([entry])))
    assert [copy.holder.number for copy in known.ssd] == [holders[1].number] and known.unheard == ()


def test_a_holder_that_is_new_to_a_master_costs_it_no_look_at_all_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a master's restart they all are."""
    looks: list[str] = []
    real = membership._drop_unconfirmed

    def looked(state: State, holder: Holder) -> None:
        looks.append(holder.register.name)
        real(state, holder)

    monkeypatch.setattr(membership, "_drop_unconfirmed", looked)
    world = World(quiet())
    first, second = world.holder(FakeHolder("first")), world.holder(FakeHolder("second"))
    put(world, world.client(), b"k")
    world.restart_master()
    for holder in (first, second):
        world.holder(holder)
    assert looks == [] and exists(world, world.client(), b"k") == [OK]
    world.lose(first.session)
    world.holder(first)
    assert looks == ["first"] and exists(world, world.client(), b"k") == [OK]


def test_a_log_that_came_back_without_a_record_is_not_believed_to_have_it() -> None:
    world = World(quiet(replicas=2))
    holders, client, generation = logged_by_two(world)
    world.lose(holders[1].session)
    holders[1].restarted()
    holders[1].ssd.clear()  # its file was torn
    world.holder(holders[1])
    world.call(client, PutEnd(2, [b"k"], [generation], [()]))
    known = world.master.state.tenants["default"].objects[b"k"]
    assert [copy.holder.number for copy in known.ssd] == [holders[0].number]
