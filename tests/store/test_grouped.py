"""Stores of several masters side by side: a group keeps to one of them, and one that is ill takes no other with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.store.backend import GetItem, PutItem, Status
from forebay.store.backends.grouped import GroupedStore
from forebay.store.backends.guarded import GuardedStore
from forebay.store.rendezvous import place_of
from tests.store.test_breaker import BadStore

T = 10.0
GROUPS = [b"group-%d" % number for number in range(12)]
NAMES = ("h:1", "h:2")


def place(group: bytes) -> int:
    return place_of([name.encode() for name in NAMES], group)


@pytest.fixture
def bad(tmp_path: Path) -> list[BadStore]:
    return [BadStore(tmp_path / name) for name in NAMES]


@pytest.fixture
def store(bad: list[BadStore]) -> Iterator[GroupedStore]:
    made = GroupedStore(
        {name: GuardedStore(one, print) for name, one in zip(NAMES, bad, strict=True)}
    )
    items = [PutItem(group + b"/%d" % page, group, group) for page in range(3) for group in GROUPS]
    assert made.put_from(items, T) == [Status.OK] * len(items)
    yield made
    made.close()


def get(store: GroupedStore) -> list[Status]:
    """Of the first page of every group; what came is right."""
    buffers = [bytearray(len(group)) for group in GROUPS]
    items = [
        GetItem(group + b"/0", 0, len(group), buffer, group)
        for group, buffer in zip(GROUPS, buffers, strict=True)
    ]
    statuses = store.get_into(items, T)
    assert all(
        bytes(b) == g
        for g, b, status in zip(GROUPS, buffers, statuses, strict=True)
        if status is Status.OK
    )
    return statuses


def prefix(store: GroupedStore, group: bytes) -> int:
    return store.match_prefix(
        [group + b"/%d" % page for page in range(3)], [b""], hint=False, timeout_s=T, group=group
    )


def test_each_has_its_own_groups_whole_and_answers_come_in_the_order_of_the_items(
    store: GroupedStore, bad: list[BadStore]
) -> None:
    assert {place(group) for group in GROUPS} == {0, 1}
    assert get(store) == [Status.OK] * len(GROUPS)
    assert [prefix(store, group) for group in GROUPS] == [3] * len(GROUPS)
    for group in GROUPS:
        keys = [group + b"/%d" % page for page in range(3)]
        there = [one.good.match_prefix(keys, [b""], hint=False, timeout_s=T) for one in bad]
        assert there[place(group)] == 3 and sum(there) == 3
    assert store.clear([b"/0", b"/1", b"/2"], T) == 3 * len(GROUPS), "of all of them"


def test_one_that_is_given_up_takes_its_own_groups_and_no_others(
    store: GroupedStore, bad: list[BadStore]
) -> None:
    bad[1].day = lambda count: [Status.TIMEOUT] * count
    bad[1].is_well = False
    get(store)  # its breaker opens
    expected = [Status.OK if place(group) == 0 else Status.UNAVAILABLE for group in GROUPS]
    calls = bad[1].calls
    for _ in range(5):  # more than the failures in a row that would open the other's
        assert get(store) == expected
    assert [prefix(store, group) for group in GROUPS] == [
        3 if place(group) == 0 else 0 for group in GROUPS
    ]
    assert bad[1].calls == calls, "the one that is ill is not asked"
    assert (
        not store.is_open
        and store.figures.state == "open"
        and store.figures.detail.startswith("1 of 2 masters: h:2: ")
    )
    assert store.health().ok, "there is somebody"


def test_with_none_left_it_is_open(store: GroupedStore, bad: list[BadStore]) -> None:
    for one in bad:
        one.day = lambda count: [Status.TIMEOUT] * count
        one.is_well = False
    get(store)
    assert store.is_open and store.figures.openings == 2 and not store.health().ok
    assert get(store) == [Status.UNAVAILABLE] * len(GROUPS)
