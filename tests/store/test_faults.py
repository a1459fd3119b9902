"""Real processes that are killed, stopped and started again while clients are at work.

In each story: never a wrong byte, nothing lost that was acknowledged and durable, no removed key returns, and the store is whole
again within 5 s of the cause going away.
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.store import Status, StoreClient
from forebay.store.master import server as master_server
from forebay.store.master.records import MasterConfig
from tests.pace import paced
from tests.store.store_cluster import cluster, wait_for
from tests.store.store_process import Farm, farm
from tests.store.store_traffic import (
    RECOVERY_S,
    SIZE,
    Traffic,
    all_usable,
    assert_whole,
    durable,
    logged_everywhere,
    value,
)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Farm]:
    with farm(tmp_path) as one:
        yield one


def test_a_killed_holder_comes_back_with_all_that_was_durable(nodes: Farm) -> None:
    master = nodes.master()
    holder = nodes.holder(master)
    with StoreClient.connect(master.url) as client, Traffic(master.url) as traffic:
        wait_for(lambda: len(traffic.removed) > 2)
        safe = durable(client, traffic.stored)
        assert len(safe) > 10
        holder.kill()
        wait_for(
            lambda: not any(client.exists(sorted(safe))), RECOVERY_S, "the loss is seen at once"
        )
        nodes.again(holder)
        wait_for(traffic.progress(), RECOVERY_S, "traffic goes on by itself")
    with StoreClient.connect(master.url) as client:
        assert_whole(client, safe & traffic.stored, traffic.removed)
    assert traffic.wrong == []


def test_a_killed_master_forgets_nothing(nodes: Farm) -> None:
    master = nodes.master()
    nodes.holder(master)
    with Traffic(master.url) as traffic:
        wait_for(lambda: len(traffic.removed) > 2)
        master.kill()
        safe = set(traffic.stored)
        again = nodes.again(master)
        assert again.url == master.url
        wait_for(traffic.progress(), RECOVERY_S, "traffic goes on by itself")
    with StoreClient.connect(again.url) as client:
        assert len(safe & traffic.stored) > 10
        assert_whole(client, safe & traffic.stored, traffic.removed)
    assert traffic.wrong == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.slow
def test_everything_restarts_in_either_order(nodes: Farm, order: tuple[int, ...]) -> None:
    restart_all(nodes, [order])


@pytest.mark.slow
def test_everything_restarts_in_any_order(nodes: Farm) -> None:
    restart_all(nodes, list(itertools.permutations(range(3))))


def restart_all(nodes: Farm, orders: list[tuple[int, ...]]) -> None:
    master = nodes.master("--replicas", "2")
    holders = [nodes.holder(master, "h1"), nodes.holder(master, "h2")]
    with StoreClient.connect(master.url, timeout_s=2.0) as client:
        wait_for(lambda: all_usable(client, 2))
        keys = {b"key-%d" % index for index in range(12)}
        for key in keys:
            assert client.put(key, value(key)) is Status.OK
        wait_for(lambda: logged_everywhere(client, len(keys)))
        assert client.remove([b"key-0", b"key-1"]) == [Status.OK] * 2
        keys -= {b"key-0", b"key-1"}
        for order in orders:
            everyone = [master, *holders]
            for place in order:
                everyone[place].kill()
            fresh = {place: nodes.again(everyone[place]) for place in reversed(order)}
            master, holders = fresh[0], [fresh[1], fresh[2]]
            assert_whole(client, keys, {b"key-0", b"key-1"})


@pytest.mark.slow
def test_a_key_removed_while_a_holder_is_down_stays_removed_when_it_returns(nodes: Farm) -> None:
    master = nodes.master("--replicas", "2")
    away, live = nodes.holder(master, "h1"), nodes.holder(master, "h2")
    with StoreClient.connect(master.url, timeout_s=2.0) as client:
        wait_for(lambda: all_usable(client, 2))
        keys = {b"key-%d" % index for index in range(6)}
        for key in keys:
            assert client.put(key, value(key)) is Status.OK
        wait_for(lambda: logged_everywhere(client, len(keys)))
        away.kill()
        wait_for(lambda: client.remove([b"key-0"]) == [Status.OK], RECOVERY_S)
        master.kill()
        live.kill()
        master = nodes.again(master)
        nodes.again(live)
        wait_for(lambda: client.exists([b"key-1"]) == [True], RECOVERY_S)
        nodes.again(away)
        assert_whole(client, keys - {b"key-0"}, {b"key-0"})


def test_a_holder_stopped_for_longer_than_a_lease_serves_nothing_old_when_it_goes_on(
    nodes: Farm,
) -> None:
    master = nodes.master()
    holder = nodes.holder(master, "h", "16MiB")
    with StoreClient.connect(master.url, timeout_s=1.0) as client, Traffic(master.url) as traffic:
        holder.stop()
        wait_for(lambda: client.holders().holders[0].usable is False, RECOVERY_S, "it is suspected")
        stopped = time.monotonic()
        wait_for(lambda: time.monotonic() - stopped > 2.0, what="two leases have passed")
        holder.resume()
        wait_for(traffic.progress(), RECOVERY_S, "traffic goes on by itself")
    with StoreClient.connect(master.url) as client:
        assert_whole(client, durable(client, traffic.stored), traffic.removed)
    assert traffic.wrong == []


@pytest.mark.slow
def test_a_removal_does_not_wait_for_a_stopped_holder_for_ever_and_lasts_when_it_goes_on(
    nodes: Farm,
) -> None:
    master = nodes.master()
    stopped = nodes.holder(master, "h1")
    with StoreClient.connect(master.url, timeout_s=2.0) as client:
        wait_for(lambda: client.put(b"gone", value(b"gone")) in (Status.OK, Status.EXISTS))
        wait_for(lambda: logged_everywhere(client, 1))
        nodes.holder(master, "h2")
        wait_for(lambda: all_usable(client, 2))
        stopped.stop()
        assert client.remove([b"gone"]) == [Status.TIMEOUT]
        wait_for(
            lambda: client.stats().counters.get("holder_lost") == 1, 30.0, "it is taken for gone"
        )
        stopped.resume()
        assert_whole(client, set(), {b"gone"})
        wait_for(lambda: all_usable(client, 2), RECOVERY_S)
        stopped.kill()
        nodes.again(stopped)
        wait_for(lambda: all_usable(client, 2), RECOVERY_S)
        assert_whole(client, set(), {b"gone"})


DYING_WRITER = """
import os, signal, sys, time
from forebay.store import StoreClient
from forebay.store.client import puts
real = puts.Putter._end
def die(self, granted, results):
    assert all(results.values()), results
    os.kill(os.getpid(), signal.SIGKILL)
puts.Putter._end = die
StoreClient.connect(sys.argv[1], allow_local=sys.argv[2] == "local").put(b"key", b"half" * 1000)
"""

DYING_READER = """
import os, signal, sys, threading, time
from forebay.store import StoreClient
from forebay.store.client import channel
received = channel.Channel.receive_into
def die(self, target, *rest):
    received(self, target[:1000], *rest)
    os.kill(os.getpid(), signal.SIGKILL)
client = StoreClient.connect(sys.argv[1], allow_local=False)
client.exists([b"key"])
channel.Channel.receive_into = die
client.get(b"key")
"""


def run_dying(code: str, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, timeout=paced(60)
    )
    assert done.returncode == -9, done.stderr.decode()


@pytest.mark.parametrize("way", ["local", "tcp"])
def test_a_writer_killed_between_data_and_end_leaves_nothing_and_blocks_nobody(
    nodes: Farm, way: str
) -> None:
    master = nodes.master()
    nodes.holder(master)
    with StoreClient.connect(master.url) as client:
        wait_for(lambda: client.put(b"warm", b"up") in (Status.OK, Status.EXISTS))
        run_dying(DYING_WRITER, master.url, way)
        assert client.get(b"key") is None
        wait_for(lambda: client.stats().counters.get("puts_revoked") == 1, RECOVERY_S)
        assert client.put(b"key", value(b"key")) is Status.OK
        assert client.get(b"key") == value(b"key")
        wait_for(lambda: client.stats().memory_used < SIZE + 1000, what="its room is free")


@pytest.mark.slow
def test_a_reader_killed_in_mid_transfer_harms_nobody(nodes: Farm) -> None:
    master = nodes.master()
    nodes.holder(master)
    with StoreClient.connect(master.url, allow_local=False) as client:
        wait_for(lambda: client.put(b"key", bytes(8 << 20)) in (Status.OK, Status.EXISTS))
        for _ in range(3):
            run_dying(DYING_READER, master.url)
        assert client.get(b"key") == bytes(8 << 20)
        assert client.remove([b"key"]) == [Status.OK]
        wait_for(lambda: client.stats().memory_used == 0, what="nothing is held for the dead")


@pytest.mark.slow
def test_a_terminated_holder_writes_what_its_log_has_not_got_yet(nodes: Farm) -> None:
    master = nodes.master()
    holder = nodes.holder(master, "h", "64MiB", "--fsync", "never")
    with StoreClient.connect(master.url) as client:
        wait_for(lambda: client.put(b"warm", b"up") in (Status.OK, Status.EXISTS))
        keys = {b"key-%d" % index for index in range(100)}
        assert set(client.put_from(sorted(keys), [value(key) for key in sorted(keys)])) == {
            Status.OK
        }
        holder.end()
        nodes.again(holder)
        assert_whole(client, keys, set())


def test_a_wall_clock_that_jumps_back_by_years_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases run on monotonic clocks, and generations rise above every inventory's whatever the wall clock says."""
    with cluster(MasterConfig(settle_s=0.0)) as nodes:
        nodes.holder(16 << 20, tmp_path)
        client = nodes.client()
        assert client.put(b"old", value(b"old")) is Status.OK and client.remove([b"old"]) == [
            Status.OK
        ]
        assert client.put(b"k", b"first") is Status.OK
        assert nodes.master is not None
        before = nodes.master.machine.state.next_generation
        nodes.stop_master()
        real = time.time_ns
        monkeypatch.setattr(
            master_server.time, "time_ns", lambda: real() - 10 * 365 * 86400 * 10**9
        )
        nodes.start_master()
        wait_for(lambda: client.get(b"k") == b"first")
        assert client.put(b"k", b"second") is Status.OK
        assert nodes.master.machine.state.next_generation > before > 0
        for _ in range(2):
            nodes.stop_holder(nodes.holders[0])
            nodes.holder(16 << 20, tmp_path)
            wait_for(lambda: client.exists([b"k"]) == [True])
            assert client.get(b"k") == b"second" and client.exists([b"old"]) == [False]


def test_a_start_that_was_cut_off_before_the_log_had_a_name_is_made_up_for(nodes: Farm) -> None:
    (nodes.path / "h").mkdir()
    (nodes.path / "h" / "name").touch()
    master = nodes.master()
    holder = nodes.holder(master)
    with StoreClient.connect(master.url) as client:
        wait_for(lambda: all_usable(client, 1))
        (name,) = [entry.name for entry in client.holders().holders]
        holder.kill()
        nodes.again(holder)
        wait_for(lambda: all_usable(client, 1))
        assert [entry.name for entry in client.holders().holders] == [name]


def test_kill_leaves_no_shared_memory_behind(nodes: Farm) -> None:
    master = nodes.master()
    holder = nodes.holder(master)
    holder.kill()
    assert not [name for name in os.listdir("/dev/shm") if "forebay" in name]
