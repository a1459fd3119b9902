"""The whole store over real sockets, in one process: what users of the client meet, tier by tier and fault by fault."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.store import AsyncStoreClient, Status, StoreClient
from forebay.store.client.holders import LocalChannel
from forebay.store.client.lent import Lent, lendable
from forebay.store.client.prefetcher import PrefetchOptions
from forebay.store.holder import node
from forebay.store.holder.log.files import Directory, write_whole
from forebay.store.holder.writer import Fsync
from forebay.store.master.records import MasterConfig
from forebay.store.wire import auth
from forebay.store.wire.messages import Tier
from tests.pace import paced
from tests.store.store_cluster import Cluster, cluster, wait_for
from tests.store.test_log import FailingFiles

MIB = 1 << 20
MEMORY, SSD = Tier.MEMORY, Tier.SSD


def quick(**changes: object) -> MasterConfig:
    return MasterConfig(settle_s=0.0, **changes)  # type: ignore[arg-type]


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with cluster() as one:
        yield one


@pytest.fixture(params=[True, False], ids=["local", "tcp"])
def local(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def value(name: bytes, size: int = MIB) -> bytes:
    return (name * (size // len(name) + 1))[:size]


def fill(client: StoreClient, count: int, size: int = MIB, prefix: bytes = b"k") -> list[bytes]:
    keys = [b"%s-%d" % (prefix, index) for index in range(count)]
    assert client.put_from(keys, [value(key, size) for key in keys]) == [Status.OK] * count
    return keys


def wrong(client: StoreClient, keys: list[bytes], size: int = MIB) -> list[tuple[bytes, Status]]:
    """Keys that are not read back as they were written."""
    buffers = [bytearray(size) for _ in keys]
    statuses = client.get_into(keys, buffers)
    return [
        (key, status)
        for key, buffer, status in zip(keys, buffers, statuses, strict=True)
        if status is not Status.OK or buffer != value(key, size)
    ]


def test_200_puts_of_1_mib_into_64_mib_with_ssd_are_all_stored_and_all_readable(
    nodes: Cluster, tmp_path: Path, local: bool
) -> None:
    nodes.holder(64 * MIB, tmp_path)
    client = nodes.client(allow_local=local, timeout_s=30.0)
    keys = fill(client, 200)
    tiers = client.tiers(keys)
    assert all(tiers) and sum(SSD in tier and MEMORY not in tier for tier in tiers) > 100
    assert wrong(client, keys) == []
    assert [bytes(client.get(key) or b"")[:3] for key in keys[:3]] == [b"k-0", b"k-1", b"k-2"]


def test_single_forms_raise_nothing(nodes: Cluster) -> None:
    nodes.holder()
    client = nodes.client()
    assert client.put(b"k", b"v") is Status.OK and client.put(b"k", b"v") is Status.EXISTS
    assert client.get(b"k") == b"v" and client.get(b"none") is None and client.get(b"") is None
    assert client.put(b"big", bytes(9 * MIB)) is Status.NO_SPACE
    assert client.put(b"k", object()) is Status.INVALID  # type: ignore[arg-type]
    assert (
        client.remove([b"k", b"none"]) == [Status.OK, Status.NOT_FOUND] and client.get(b"k") is None
    )
    assert list(client.list()) == []


def test_list_pages_through_everything_in_order(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.store.client.one_master.LIST_PAGE", 7)
    nodes.holder()
    client = nodes.client()
    keys = fill(client, 40, size=100)
    assert list(client.list(b"k-1")) == [
        (key, 100) for key in sorted(keys) if key.startswith(b"k-1")
    ]
    assert [key for key, _ in client.list()] == sorted(keys)


def test_a_client_on_this_machine_copies_out_of_the_holders_memory_but_cannot_write_there(
    nodes: Cluster,
) -> None:
    import mmap

    holder = nodes.holder()
    client = nodes.client()
    client.put(b"k", b"value")
    sent = holder.data.bytes_out
    assert client.get(b"k") == b"value" and holder.data.bytes_out == sent, (
        "no byte went through a socket"
    )
    with pytest.raises(PermissionError):
        mmap.mmap(holder.segment.fd, holder.segment.capacity)


def test_a_restarted_holder_has_its_log_and_a_restarted_master_everything(
    tmp_path: Path, local: bool
) -> None:
    with cluster(quick(lease_s=1.0)) as nodes:
        holder = nodes.holder(32 * MIB, tmp_path)
        client = nodes.client(allow_local=local)
        keys = fill(client, 10)
        assert client.remove(keys[:2]) == [Status.OK] * 2
        nodes.stop_master()
        nodes.start_master()
        wait_for(
            lambda: client.exists(keys) == [False] * 2 + [True] * 8,
            what="the master has it all again",
        )
        assert all(MEMORY in tier for tier in client.tiers(keys[2:]))
        assert wrong(client, keys[2:]) == []
        nodes.stop_holder(holder)
        assert client.exists(keys[2:]) == [False] * 8
        nodes.holder(32 * MIB, tmp_path)
        wait_for(lambda: all(client.exists(keys[2:])), what="the holder has its log again")
        assert wrong(client, keys[2:]) == [] and client.exists(keys[:2]) == [False, False]
        assert client.put(b"new", b"x") is Status.OK


def test_a_replaced_key_never_serves_old_bytes_again(nodes: Cluster, tmp_path: Path) -> None:
    holder = nodes.holder(8 * MIB, tmp_path)
    client = nodes.client()
    assert client.put(b"k", b"old" * 1000) is Status.OK
    wait_for(lambda: SSD in client.tiers([b"k"])[0])
    assert client.put(b"k", b"new" * 2000) is Status.OK
    for _ in range(2):
        assert client.get(b"k") == b"new" * 2000
        nodes.stop_holder(holder)
        holder = nodes.holder(8 * MIB, tmp_path)
        wait_for(lambda: client.exists([b"k"])[0])


def test_with_two_replicas_a_dead_holder_costs_nothing(tmp_path: Path, local: bool) -> None:
    with cluster(quick(replicas=2)) as nodes:
        first = nodes.holder(16 * MIB, tmp_path / "1")
        nodes.holder(16 * MIB, tmp_path / "2")
        client = nodes.client(allow_local=local)
        keys = fill(client, 5)
        nodes.stop_holder(first)
        assert wrong(client, keys) == []
        assert client.put(b"still", b"works") is Status.OK


def test_a_holder_that_does_not_answer_is_passed_over_within_250_ms(nodes: Cluster) -> None:
    """Rule ST6. The silent holder is a real one whose data connections are accepted by nobody: its loop is kept busy."""
    nodes.master and setattr(nodes.master.machine.state, "config", quick(replicas=2))
    silent, _ = nodes.holder(), nodes.holder()
    client = nodes.client(allow_local=False)
    keys = fill(client, 4)
    assert wrong(client, keys) == []
    port = silent.address.port

    import socket

    trap = socket.create_server(("127.0.0.1", 0))
    for peer in client.masters[0]._holders._peers.values():
        if peer.entry.port == port:
            peer.pool.close()
            trap_port = trap.getsockname()[1]
            import msgspec

            peer.entry = msgspec.structs.replace(peer.entry, port=trap_port)
            peer.pool = type(peer.pool)(peer._connect)
    begun = time.monotonic()
    assert wrong(client, keys) == []
    assert time.monotonic() - begun < paced(2.0)
    trap.close()


def test_a_flipped_bit_on_disk_is_a_miss_and_never_a_wrong_byte(
    tmp_path: Path, local: bool
) -> None:
    with cluster(quick(lease_s=1.0)) as nodes:
        nodes.holder(4 * MIB, tmp_path)
        client = nodes.client(allow_local=local, timeout_s=10.0)
        keys = fill(client, 12)
        cold = [key for key, tier in zip(keys, client.tiers(keys), strict=True) if tier == {SSD}]
        assert len(cold) > 5
        file = next(tmp_path.glob("*.log"))
        data = bytearray(file.read_bytes())
        at = data.index(value(cold[0])[:64]) + 500_000
        data[at] ^= 1
        with file.open("r+b") as log:
            log.seek(at)
            log.write(data[at : at + 1])
        assert wrong(client, keys) == [(cold[0], Status.NOT_FOUND)]
        assert client.exists([cold[0]]) == [False], "and exists does not claim it any more"
        assert client.put(cold[0], value(cold[0])) in (Status.OK, Status.EXISTS)


class Hiccup(Directory):
    """Reads fail while it is ill."""

    ill = False

    def read(self, fd: int, into: memoryview, at: int) -> int:
        if self.ill:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(fd, into, at)


def test_what_could_not_be_read_for_a_moment_does_not_come_back_after_a_restart(
    tmp_path: Path,
) -> None:
    """Nobody has it any more, so nobody will tell the log of its removal."""
    files = Hiccup(tmp_path)
    with cluster(quick()) as nodes:
        nodes.holder(4 * MIB, tmp_path)
        client = nodes.client(allow_local=False)
        assert client.put(b"k", b"old bytes") is Status.OK
        nodes.stop_holder(nodes.holders[0])
        nodes.holder(4 * MIB, tmp_path, files=files)
        files.ill = True
        assert client.get(b"k", timeout_s=1.0) is None
        wait_for(lambda: client.exists([b"k"]) == [False])
        files.ill = False
        assert client.remove([b"k"]) == [Status.NOT_FOUND]
        nodes.stop_holder(nodes.holders[0])
        nodes.holder(4 * MIB, tmp_path)
        assert client.exists([b"k"]) == [False] and client.get(b"k") is None


def test_what_could_not_be_read_for_a_moment_is_logged_anew_while_memory_has_it(
    tmp_path: Path,
) -> None:
    files = Hiccup(tmp_path)
    with cluster(quick()) as nodes:
        holder = nodes.holder(4 * MIB, tmp_path, files=files)
        client = nodes.client(allow_local=False)
        assert client.put(b"k", b"bytes") is Status.OK
        wait_for(lambda: client.tiers([b"k"]) == [{MEMORY, SSD}])
        assert holder.log is not None and holder._reads is not None
        (held,) = holder.log.entries()
        files.ill = True
        assert nodes.do(holder._reads.read(held.tenant, held.key, held.generation)) is None
        files.ill = False
        wait_for(
            lambda: (
                holder.log is not None and holder.log.has(held.tenant, held.key, held.generation)
            )
        )
        wait_for(lambda: client.tiers([b"k"]) == [{MEMORY, SSD}])
        nodes.stop_holder(holder)
        nodes.holder(4 * MIB, tmp_path)
        assert client.get(b"k") == b"bytes"


def test_a_full_disk_leaves_a_memory_store_that_says_so_and_recovers(tmp_path: Path) -> None:
    files = FailingFiles(tmp_path)
    with cluster(quick(put_wait_s=0.5)) as nodes:
        holder = nodes.holder(8 * MIB, tmp_path, files=files)
        client = nodes.client(timeout_s=10.0)
        fill(client, 3, prefix=b"before")
        wait_for(
            lambda: all(
                SSD in tier for tier in client.tiers([b"before-0", b"before-1", b"before-2"])
            )
        )
        files.error = 28
        state = lambda: client.holders().holders[0].ssd_state  # noqa: E731
        client.put(b"during", value(b"during"))
        wait_for(lambda: state().startswith("DRAM only: No space"), what="a clear status")
        assert client.get(b"during") == value(b"during")
        assert fill(client, 20, prefix=b"more"), "a plain cache meanwhile"
        files.error = 0
        wait_for(lambda: state() == "ok", what="recovered")
        keys = fill(client, 3, prefix=b"after")
        wait_for(lambda: all(SSD in tier for tier in client.tiers(keys)), what="logged again")
        assert holder.log is not None


def test_a_holder_on_a_full_disk_meets_a_new_one_and_remembers_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path, text: str) -> None:
        if file.name == "peers":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(file, text)

    with cluster(quick()) as nodes:
        first = nodes.holder(4 * MIB, tmp_path / "first")
        client = nodes.client()
        with monkeypatch.context() as full:
            full.setattr(node, "write_whole", refuse)
            second = nodes.holder(4 * MIB, tmp_path / "second")
            wait_for(lambda: second.name in first.peers)
            assert first.serving and client.put(b"k", b"v") is Status.OK
            assert not (tmp_path / "first" / "peers").exists()
        wait_for(
            lambda: (
                (tmp_path / "first" / "peers").exists()
                and (tmp_path / "first" / "peers").read_text().split() == [second.name]
            )
        )


def test_fsync_always_answers_a_put_only_when_it_is_in_the_log(
    nodes: Cluster, tmp_path: Path, local: bool
) -> None:
    holder = nodes.holder(8 * MIB, tmp_path, fsync=Fsync.ALWAYS)
    client = nodes.client(allow_local=local)
    for index in range(5):
        assert client.put(b"%d" % index, b"v" * 1000) is Status.OK
        assert holder.log is not None and holder.log.newest_length("default", b"%d" % index) == 1000


def test_fsync_always_refuses_a_put_that_the_disk_refuses(nodes: Cluster, tmp_path: Path) -> None:
    files = FailingFiles(tmp_path)
    nodes.holder(8 * MIB, tmp_path, fsync=Fsync.ALWAYS, files=files)
    client = nodes.client()
    files.error = 5
    assert client.put(b"k", b"v") is Status.UNAVAILABLE and client.get(b"k") is None


def test_tenants_are_bound_to_their_secret_and_see_only_their_own(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text("# tenants\nalice wonder\nbob builder\n@holder inside\n")
    secrets = auth.Secrets.read(file)
    with cluster(secrets=secrets) as nodes:
        nodes.holder()
        alice, bob = nodes.client("alice", "wonder"), nodes.client("bob", "builder")
        assert alice.put(b"k", b"alice's") is Status.OK and bob.put(b"k", b"bob's...") is Status.OK
        assert alice.get(b"k") == b"alice's" and bob.get(b"k") == b"bob's..."
        assert bob.remove([b"k"]) == [Status.OK] and alice.get(b"k") == b"alice's"
        assert alice.masters[0]._holders.known(1).segment is None, (
            "several tenants: nobody gets the segment"
        )  # type: ignore[union-attr]
        for tenant, secret in (
            ("alice", "builder"),
            ("carol", "wonder"),
            ("alice", ""),
            ("@holder", "inside"),
        ):
            with pytest.raises(ConnectionError):
                StoreClient.connect(nodes.url, tenant, secret, timeout_s=1.0)


def test_one_client_serves_many_threads(nodes: Cluster, tmp_path: Path, local: bool) -> None:
    nodes.holder(32 * MIB, tmp_path)
    client = nodes.client(allow_local=local, timeout_s=20.0)
    bad: list[object] = []

    def work(name: int) -> None:
        keys = fill(client, 8, 200_000, prefix=b"t%d" % name)
        for _ in range(5):
            bad.extend(wrong(client, keys, 200_000))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == []


def test_the_async_client_has_the_same_methods(nodes: Cluster) -> None:
    nodes.holder()

    async def story() -> None:
        async with await AsyncStoreClient.connect(nodes.url) as client:
            assert await client.put(b"k", b"value") is Status.OK
            assert await client.get(b"k") == b"value"
            buffer = bytearray(3)
            assert await client.get_into([b"k"], [buffer], [2]) == [Status.OK] and buffer == b"lue"
            assert await client.exists([b"k", b"x"]) == [True, False]
            assert await client.match_prefix([b"k", b"x"]) == 1
            assert [entry async for entry in client.list()] == [(b"k", 5)]
            assert (await client.stats()).objects == 1
            assert await client.put_from([b"a"], [b"b"]) == [Status.OK]
            assert await client.remove([b"k"]) == [Status.OK]
            assert await client.prefetch([b"k"]) == 1

    asyncio.run(story())


def test_nothing_is_left_behind() -> None:
    def open_files() -> list[str]:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return sorted(link for link in links if "memfd:forebay" in link or "socket" in link)

    before = open_files()
    with cluster() as nodes:
        nodes.holder()
        client = nodes.client()
        client.put(b"k", b"v")
        assert client.get(b"k") == b"v" and open_files() != before
    wait_for(lambda: open_files() == before, what=f"descriptors {open_files()} as before {before}")
    assert not [name for name in os.listdir("/dev/shm") if "forebay" in name]


# ---------------------------------------------------------------------------------------------- prefetch on exist


def prefetching(share: float = 0.5) -> MasterConfig:
    return quick(ssd_prefetch=True, prefetch_share=share, lease_s=1.0)


def cold_keys(nodes: Cluster, client: StoreClient, path: Path) -> list[bytes]:
    """Keys that are on SSD only, in a memory that is otherwise full."""
    nodes.holder(16 * MIB, path)
    keys = fill(client, 30)
    wait_for(lambda: all(SSD in tier for tier in client.tiers(keys)), what="all logged")
    cold = [key for key, tier in zip(keys, client.tiers(keys), strict=True) if tier == {SSD}]
    assert len(cold) > 10
    return cold[:6]


def test_prefetch_on_exist_brings_keys_to_memory_between_probe_and_read(
    tmp_path: Path, local: bool
) -> None:
    with cluster(prefetching()) as nodes:
        client = nodes.client(
            allow_local=local, prefetch=PrefetchOptions(enabled=True), timeout_s=20.0
        )
        cold = cold_keys(nodes, client, tmp_path)
        assert client.exists(cold, prefetch=True) == [True] * len(cold)
        wait_for(lambda: all(MEMORY in tier for tier in client.tiers(cold)), what="promoted")
        assert wrong(client, cold) == []
        assert client.stats().counters["promoted_prefetch"] == len(cold)


@pytest.mark.parametrize(
    "hint, enabled, master_on", [(False, True, True), (True, False, True), (True, True, False)]
)
def test_negative_control_without_the_hint_or_the_switches_nothing_moves(
    tmp_path: Path, hint: bool, enabled: bool, master_on: bool
) -> None:
    """The same story with one thing missing. That nothing moved is known once a later, forced promotion of another key has."""
    with cluster(prefetching() if master_on else quick(lease_s=1.0)) as nodes:
        client = nodes.client(prefetch=PrefetchOptions(enabled=enabled), timeout_s=20.0)
        cold = cold_keys(nodes, client, tmp_path)
        for _ in range(3):
            client.exists(cold[:-1], prefetch=hint)
            assert wrong(client, cold[:-1]) == [], "a read from SSD"
        if master_on:
            client.prefetch(cold[-1:])
            wait_for(lambda: MEMORY in client.tiers(cold[-1:])[0])
        assert client.tiers(cold[:-1]) == [frozenset({SSD})] * (len(cold) - 1)
        assert client.stats().counters.get("promoted_prefetch", 0) == int(master_on)


def test_a_thousand_probes_promote_once(tmp_path: Path) -> None:
    with cluster(prefetching()) as nodes:
        client = nodes.client(prefetch=PrefetchOptions(enabled=True), timeout_s=20.0)
        cold = cold_keys(nodes, client, tmp_path)
        for _ in range(1000):
            client.exists(cold, prefetch=True)
        wait_for(lambda: all(MEMORY in tier for tier in client.tiers(cold)))
        assert client.prefetched.sent == len(cold)


def test_a_get_waits_for_its_promotion_when_it_may(tmp_path: Path) -> None:
    with cluster(prefetching()) as nodes:
        client = nodes.client(
            prefetch=PrefetchOptions(enabled=True, get_wait_ms=5000.0), timeout_s=20.0
        )
        cold = cold_keys(nodes, client, tmp_path)
        assert wrong(client, cold[:3]) == []
        assert all(MEMORY in tier for tier in client.tiers(cold[:3])), (
            "it asked for them itself, and waited"
        )


def test_promotion_on_hit_admits_what_is_read_again(tmp_path: Path) -> None:
    with cluster(quick(promotion_on_hit=True, lease_s=1.0)) as nodes:
        client = nodes.client(timeout_s=20.0)
        cold = cold_keys(nodes, client, tmp_path)
        client.remove([key for key, _ in client.list() if key not in cold])
        wait_for(lambda: client.stats().memory_used < 8 * MIB)
        assert (
            wrong(client, cold[:1]) == [] and client.stats().counters.get("promoted_hit", 0) == 0
        ), "once is not enough"
        assert wrong(client, cold[:1]) == []
        wait_for(lambda: MEMORY in client.tiers(cold[:1])[0])
        assert wrong(client, cold[:1]) == []


def test_lent_memory_is_read_by_the_holder_itself(nodes: Cluster) -> None:
    nodes.holder(dram=64 * MIB)
    lent, memory = lendable("test", 32 * MIB)
    pages = [
        memoryview(memory)[index * MIB : (index + 1) * MIB] for index in range(20)
    ]  # more than are pointed out at a time
    keys = [b"lent-%d" % index for index in range(len(pages))]
    for key, page in zip(keys, pages, strict=True):
        page[:] = value(key)
    with StoreClient.connect(nodes.url, lent=lent) as client:
        assert client.put_from(keys, pages) == [Status.OK] * len(keys)
        assert not wrong(client, keys)
        (peer,) = client.masters[0]._holders._peers.values()
        (channel,) = peer.pool._idle
        assert isinstance(channel, LocalChannel) and not channel.staging.any(), (
            "nothing went through the memory between them"
        )
        assert client.put_from([b"x", b"y"], [pages[0], value(b"y")]) == [Status.OK] * 2, (
            "one of them is not lent"
        )
        assert client.get(b"x") == value(keys[0]) and client.get(b"y") == value(b"y")
    os.close(lent.fd)


def test_memory_that_may_shrink_is_not_taken(nodes: Cluster) -> None:
    nodes.holder()
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    with StoreClient.connect(nodes.url, lent=Lent(fd, 0, MIB)) as client:
        keys = fill(client, 2)
        assert not wrong(client, keys)
        (peer,) = client.masters[0]._holders._peers.values()
        assert peer.segment is None, "the holder did not let it in, so it went by TCP"
    os.close(fd)
