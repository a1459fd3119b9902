"""Several masters (rule ST5): each has its own slice of every holder, keys keep to their group's master, and a dead master takes
nothing but its own groups with it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.store import Status, StoreClient
from forebay.store.address import Address
from forebay.store.client.one_master import OneMaster
from forebay.store.holder.node import HolderConfig, slices
from forebay.store.wire.messages import Tier
from tests.pace import paced
from tests.store.store_cluster import wait_for
from tests.store.store_process import Farm, Process, farm
from tests.store.store_traffic import RECOVERY_S, value
from tests.store.test_cli_store import run as run_cli

GROUPS = [b"group-%d" % number for number in range(12)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Farm]:
    with farm(tmp_path) as one:
        yield one


def started(nodes: Farm) -> tuple[list[Process], Process, str]:
    """Two masters, a holder of both, and their URL."""
    masters = [nodes.master(), nodes.master()]
    url = "forebay://" + ",".join(master.url.removeprefix("forebay://") for master in masters)
    holder = nodes.run(
        "holder", "--master", url, "--dram", "64MiB", "--ssd", str(nodes.path / "ssd")
    )
    return masters, holder, url


def pages(group: bytes) -> list[bytes]:
    return [group + b"/%d" % index for index in range(4)]


def owner(client: StoreClient, group: bytes, masters: list[Process]) -> Process:
    return masters[client.masters.index(client._master_of(group))]


def filled(client: StoreClient) -> None:
    for group in GROUPS:
        keys = pages(group)
        wait_for(
            lambda keys=keys, group=group: (
                set(client.put_from(keys, [value(key) for key in keys], groups=[group] * 4))  # type: ignore[misc]
                <= {Status.OK, Status.EXISTS}
            )
        )


def test_a_group_stays_together_and_a_dead_master_takes_only_its_own_groups(nodes: Farm) -> None:
    masters, _, url = started(nodes)
    with StoreClient.connect(url, timeout_s=3.0) as client:
        filled(client)
        everything = [key for group in GROUPS for key in pages(group)]
        groups = [group for group in GROUPS for _ in range(4)]
        assert [client.match_prefix(pages(group), group=group) for group in GROUPS] == [4] * len(
            GROUPS
        )
        assert sorted(key for key, _ in client.list()) == sorted(everything)
        assert client.stats().objects == len(everything) and len(client.holders().holders) == 2
        wait_for(
            lambda: all(Tier.SSD in tiers for tiers in client.tiers(everything, groups=groups))
        )
        lost = masters[0]
        hit = [group for group in GROUPS if owner(client, group, masters) is lost]
        well = [group for group in GROUPS if group not in hit]
        assert hit and well, "both have some"
        lost.kill()
        begun = time.monotonic()
        assert [client.match_prefix(pages(group), group=group) for group in GROUPS] == [
            0 if group in hit else 4 for group in GROUPS
        ]
        statuses = client.get_into(everything, [bytearray(10) for _ in everything], groups=groups)
        assert {
            status for status, group in zip(statuses, groups, strict=True) if group in well
        } == {Status.OK}
        assert {status for status, group in zip(statuses, groups, strict=True) if group in hit} == {
            Status.UNAVAILABLE
        }
        assert client.put(b"new", b"v", group=well[0]) is Status.OK
        assert time.monotonic() - begun < paced(3.0), (
            "nobody waits for the dead one again and again"
        )
        with StoreClient.connect(url) as late:
            assert late.get(pages(well[0])[0], group=well[0]) == value(pages(well[0])[0]), (
                "also who comes now"
            )
        nodes.again(lost)
        wait_for(
            lambda: all(client.match_prefix(pages(group), group=group) == 4 for group in GROUPS),
            RECOVERY_S,
            "all is there again",
        )


@pytest.mark.slow
def test_a_restarted_holder_has_each_masters_log_and_order_of_masters_does_not_matter(
    nodes: Farm,
) -> None:
    masters, holder, url = started(nodes)
    everything = [key for group in GROUPS for key in pages(group)]
    groups = [group for group in GROUPS for _ in range(4)]
    with StoreClient.connect(url, timeout_s=3.0) as client:
        filled(client)
        wait_for(
            lambda: all(Tier.SSD in tiers for tiers in client.tiers(everything, groups=groups))
        )
        gone = everything[0]
        assert client.remove([gone], groups=groups[:1]) == [Status.OK]
        holder.kill()
        nodes.again(holder)
    swapped = "forebay://" + ",".join(
        master.url.removeprefix("forebay://") for master in reversed(masters)
    )
    with StoreClient.connect(swapped, timeout_s=3.0, allow_local=False) as client:
        wait_for(
            lambda: (
                client.exists(everything, groups=groups) == [False] + [True] * (len(everything) - 1)
            ),
            RECOVERY_S,
        )
        assert [
            client.get(key, group=group)
            for key, group in zip(everything[1:], groups[1:], strict=True)
        ] == [value(key) for key in everything[1:]]


def test_keys_without_groups_are_spread_and_found_alone_and_as_prefixes(nodes: Farm) -> None:
    masters, _, url = started(nodes)
    with StoreClient.connect(url, timeout_s=3.0) as client:
        keys = [b"key-%d" % number for number in range(20)]
        wholes = [key + part for key in keys for part in (b"a", b"b")]
        wait_for(
            lambda: (
                set(client.put_from(wholes, [value(key) for key in wholes]))
                <= {Status.OK, Status.EXISTS}
            )
        )
        assert [client.get(key) for key in wholes] == [value(key) for key in wholes]
        assert client.match_prefix(keys, [b"a", b"b"]) == 20
        assert client.remove([keys[7] + b"b"]) == [Status.OK]
        assert client.match_prefix(keys, [b"a", b"b"]) == 7
        for one in masters:
            with StoreClient.connect(one.url) as alone:
                assert 0 < alone.stats().objects < len(wholes)


def test_people_find_keys_whatever_group_they_were_put_under(nodes: Farm) -> None:
    _, _, url = started(nodes)
    with StoreClient.connect(url, timeout_s=3.0) as client:
        filled(client)
    for group in GROUPS[:4]:
        key = pages(group)[0]
        assert run_cli("get", url, key.decode()).stdout_bytes == value(key)
        assert run_cli("rm", url, key.decode()).exit_code == 0
        assert run_cli("get", url, key.decode()).exit_code == 1
    assert run_cli("rm", url, "none").exit_code == 1


def test_with_one_master_groups_change_nothing(nodes: Farm) -> None:
    master = nodes.master()
    nodes.holder(master)
    with StoreClient.connect(master.url) as client:
        wait_for(lambda: client.put(b"k", b"v", group=b"some") in (Status.OK, Status.EXISTS))
        assert client.get(b"k") == b"v" and client.exists([b"k"], groups=[b"other"]) == [True]
        with pytest.raises(ValueError, match="1 keys and 2 groups"):
            client.exists([b"k"], groups=[b"a", b"b"])


def test_slices_share_what_there_is_and_one_master_has_the_directory_itself() -> None:
    masters = [Address("a", 1), Address("b", 2)]
    whole = HolderConfig(masters[0], Address("h", 7002), 100, Path("/ssd"), 1000)
    assert slices(whole, masters[:1]) == [whole]
    first, second = slices(whole, masters)
    assert (first.dram, first.ssd_bytes, first.ssd, str(first.listen)) == (
        50,
        500,
        Path("/ssd/a_1"),
        "h:7002",
    )
    assert (second.master, second.ssd, str(second.listen)) == (
        masters[1],
        Path("/ssd/b_2"),
        "h:7003",
    )


def test_groups_move_only_to_a_master_that_is_new() -> None:
    """Rendezvous hashing: with a third master, no group moves between the first two."""
    groups = [b"%d" % number for number in range(300)]
    two, three = (
        StoreClient([Address("h", port) for port in range(1, count + 1)]) for count in (2, 3)
    )

    def place(client: StoreClient, group: bytes) -> int:
        found: OneMaster = client._master_of(group)
        return client.masters.index(found)

    moved = [group for group in groups if place(two, group) != place(three, group)]
    assert {place(three, group) for group in moved} == {2} and 60 < len(moved) < 140
    two.close()
    three.close()
