"""Valkey and Redis behind the engine: real servers that are locked, full, evicting, killed, stopped, lying, or a cluster.

The contract that every backend keeps is in test_backends.py.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.store.address import AddressError, shown
from forebay.store.backend import GetItem, PageStore, PutItem, Status
from forebay.store.backends import StoreURLError, open_store
from forebay.store.backends.guarded import GuardedStore
from forebay.store.backends.redis.resp import Piece, ProtocolError, Reader, ReplyError, encode
from forebay.store.backends.redis.topology import slot_of
from forebay.store.backends.redis.url import RedisUrl
from tests.store.redis_server import Server, free_port, redis_server
from tests.store.store_cluster import wait_for

PAGE = 70_000
T = 10.0
TLS = Path(__file__).parent / "tls"


def put(store: PageStore, key: bytes, value: bytes, group: bytes = b"") -> Status:
    return store.put_from([PutItem(key, value, group)], T)[0]


def get(
    store: PageStore, key: bytes, length: int, group: bytes = b"", timeout_s: float = T
) -> bytes | Status:
    buffer = bytearray(length)
    status = store.get_into([GetItem(key, 0, length, buffer, group)], timeout_s)[0]
    return bytes(buffer) if status is Status.OK else status


def command(server: Server, *words: str, user: str = "") -> bytes:
    """One command by redis-cli's protocol, for what a person would do to the server."""
    pieces: list[Piece] = []
    with socket.create_connection(("127.0.0.1", server.port), T) as link:
        reader = Reader(lambda view: link.recv_into(view))
        if user:
            encode([b"AUTH", user.encode()], pieces)
        encode([word.encode() for word in words], pieces)
        for piece in pieces:
            link.sendall(piece)
        if user:
            assert reader.reply() == b"OK"
        reply = reader.reply()
        assert not isinstance(reply, ReplyError), reply
        return reply if isinstance(reply, bytes) else repr(reply).encode()


@contextlib.contextmanager
def opened(url: str) -> Iterator[PageStore]:
    store = open_store(url)
    assert store is not None
    try:
        yield store
    finally:
        store.close()


# ------------------------------------------------------------------------------------------ the protocol


@given(st.lists(st.lists(st.binary(max_size=9000), min_size=1, max_size=5), max_size=8), st.data())
def test_commands_and_values_survive_any_cut_of_the_stream(
    commands: list[list[bytes]], data: st.DataObject
) -> None:
    """A command is an array of bulk strings, so the reader reads what the writer wrote."""
    pieces: list[Piece] = []
    for one in commands:
        encode(one, pieces)
    stream = b"".join(bytes(piece) for piece in pieces)
    sizes = data.draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=20))
    at, turn = 0, 0

    def receive(view: memoryview) -> int:
        nonlocal at, turn
        count = min(sizes[turn % len(sizes)], len(view), len(stream) - at)
        assert count, "the reader asks beyond the end"
        view[:count] = stream[at : at + count]
        at, turn = at + count, turn + 1
        return count

    reader = Reader(receive)
    assert [reader.reply() for _ in commands] == commands
    assert at <= len(stream)


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b"*99999999\r\n",
        b"$3\r\nabcde\r\n",
        b"x" * 70_000,
        b"*1\r\n" * 20,
    ],
)
def test_what_is_no_protocol_is_said_to_be_none(stream: bytes) -> None:
    rest = bytearray(stream)

    def receive(view: memoryview) -> int:
        count = min(len(view), len(rest))
        if not count:
            raise ConnectionResetError("the end")
        view[:count] = rest[:count]
        del rest[:count]
        return count

    with pytest.raises(ProtocolError):
        Reader(receive).reply()


def test_slots_are_those_of_the_cluster_specification() -> None:
    assert slot_of(b"123456789") == 0x31C3
    assert (
        slot_of(b"{user1000}.following") == slot_of(b"{user1000}.followers") == slot_of(b"user1000")
    )
    assert slot_of(b"foo{}{bar}") != slot_of(b"bar") and slot_of(b"foo{{bar}}zap") == slot_of(
        b"{bar"
    )


# ------------------------------------------------------------------------------------------ addresses


def test_a_url_names_user_password_database_and_options() -> None:
    url = RedisUrl.parse("rediss://me:p%40ss%3A@[::1]:7000/3?ttl=60&connections=2&ca=/etc/ca.pem")
    assert (url.user, url.password, url.db, url.ttl_s, url.connections) == ("me", "p@ss:", 3, 60, 2)
    assert str(url.address) == "[::1]:7000" and url.is_tls and url.ca == Path("/etc/ca.pem")
    assert str(RedisUrl.parse("valkey://host").address) == "host:6379"


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://h:0x1",
        "redis://:secret@h/db",
        "redis://u:secret@h?ttl=-1",
        "redis://u:secret@h?connections=0",
        "redis://u:secret@h?ca=x",
    ],
)
def test_a_bad_url_is_one_line_without_the_password(url: str) -> None:
    with pytest.raises(AddressError) as refused:
        RedisUrl.parse(url)
    said = str(refused.value)
    assert "\n" not in said and "secret" not in said


def test_a_url_is_shown_without_its_password() -> None:
    assert shown("redis://me:secret@h:1/0") == "redis://me:***@h:1/0"
    assert shown("forebay://h:1,h:2") == "forebay://h:1,h:2"


# ------------------------------------------------------------------------------------------ who may come in


def test_password_acl_user_and_database(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "top secret") as server:
        at = f"127.0.0.1:{server.port}"
        command(
            server, "ACL", "SETUSER", "pages", "on", ">pw", "~forebay:*", "+@all", user="top secret"
        )
        with (
            opened(f"redis://:top%20secret@{at}/2") as store,
            opened(f"redis://pages:pw@{at}/2") as other,
        ):
            assert put(store, b"k", b"x" * PAGE) is Status.OK
            assert get(other, b"k", PAGE) == b"x" * PAGE
            with opened(f"valkey://:top%20secret@{at}/3") as elsewhere:
                assert get(elsewhere, b"k", PAGE) is Status.NOT_FOUND
        for url, why in (
            (f"redis://{at}", "NOAUTH"),
            (f"redis://:wrong-one@{at}", "WRONGPASS"),
            (f"redis://:top%20secret@{at}/99", "out of range"),
            (f"redis://127.0.0.1:{free_port()}", "refused"),
        ):
            with pytest.raises(StoreURLError) as refused:
                open_store(url)
            said = str(refused.value)
            assert (
                why in said
                and "\n" not in said
                and "wrong-one" not in said
                and "secret" not in said
            )


def test_a_user_that_may_only_read_gets_pages_and_puts_none(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        command(
            server, "ACL", "SETUSER", "reader", "on", ">pw", "~forebay:*", "+@read", "+@connection"
        )
        with (
            opened(server.url) as writer,
            opened(f"redis://reader:pw@127.0.0.1:{server.port}") as reader,
        ):
            assert put(writer, b"k", b"x" * PAGE) is Status.OK
            assert get(reader, b"k", PAGE) == b"x" * PAGE
            assert put(reader, b"new", b"x" * PAGE) is Status.UNAVAILABLE
            assert reader.health().ok


def test_by_tls_with_a_certificate_of_our_own(tmp_path: Path) -> None:
    port = free_port()
    options = ("--tls-port", str(port), "--tls-cert-file", str(TLS / "localhost.pem"), "--tls-key-file",
               str(TLS / "localhost.key"), "--tls-auth-clients", "no")  # fmt: skip
    with redis_server(tmp_path, *options, port=port):
        with opened(f"valkeys://localhost:{port}?ca={TLS / 'localhost.pem'}") as store:
            value = os.urandom(3 << 20)
            assert put(store, b"k", value) is Status.OK and get(store, b"k", len(value)) == value
        for url in (f"rediss://localhost:{port}", f"redis://127.0.0.1:{port}"):
            with pytest.raises(StoreURLError):
                open_store(url)


def test_what_is_no_redis_is_said_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            link, _ = listener.accept()
            with link:
                link.recv(1000)
                link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StoreURLError, match="RESP2"):
            open_store(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


# ------------------------------------------------------------------------------------------ bad days


def test_a_full_server_refuses_puts_in_words_and_reads_go_on(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server,
        opened(server.url) as store,
    ):
        statuses = [put(store, b"%d" % i, os.urandom(1 << 20)) for i in range(12)]
        assert statuses[0] is Status.OK and statuses[-1] is Status.NO_SPACE
        assert isinstance(get(store, b"0", 1 << 20), bytes)
        assert "noeviction" in store.health().detail


def test_a_server_that_evicts_and_a_stranger_who_deletes_cost_misses_and_nothing_else(
    tmp_path: Path,
) -> None:
    with (
        redis_server(
            tmp_path, "--maxmemory", "16mb", "--maxmemory-policy", "allkeys-random"
        ) as server,
        opened(server.url) as store,
    ):
        chance = random.Random(7)
        seen = set()
        for _ in range(300):
            number = chance.randrange(60)
            value = bytes([number]) * (1 << 19)
            found = get(store, b"%d" % number, 1 << 19, timeout_s=T)
            assert found in (value, Status.NOT_FOUND)
            seen.add(type(found))
            if found is Status.NOT_FOUND:
                assert put(store, b"%d" % number, value) in (Status.OK, Status.EXISTS)
            if chance.random() < 0.1:
                command(server, "DEL", f"forebay:{{}}:{chance.randrange(60)}")
        assert seen == {bytes, Status}


def test_a_killed_server_is_unavailable_at_once_and_an_empty_one_is_used_again(
    tmp_path: Path,
) -> None:
    with redis_server(tmp_path) as server, opened(server.url) as store:
        assert put(store, b"k", b"x" * PAGE) is Status.OK
        server.kill()
        began = time.monotonic()
        assert get(store, b"k", PAGE) is Status.UNAVAILABLE
        assert put(store, b"k", b"x" * PAGE) is Status.UNAVAILABLE
        assert store.match_prefix([b"k"], [], hint=False, timeout_s=T) == 0
        assert not store.health().ok and time.monotonic() - began < 2
        server.start()
        assert get(store, b"k", PAGE) is Status.NOT_FOUND
        assert put(store, b"k", b"x" * PAGE) is Status.OK and get(store, b"k", PAGE) == b"x" * PAGE


def test_a_stopped_server_costs_its_time_out_and_serves_on_later(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.url) as store:
        assert put(store, b"k", b"x" * PAGE) is Status.OK
        assert server.child is not None
        server.child.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert get(store, b"k", PAGE, timeout_s=0.3) is Status.TIMEOUT
        assert store.match_prefix([b"k"], [], hint=False, timeout_s=0.3) == 0
        assert time.monotonic() - began < 2
        server.child.send_signal(signal.SIGCONT)
        assert get(store, b"k", PAGE) == b"x" * PAGE, (
            "late replies of the earlier calls are not taken for this one's"
        )


def test_connections_that_the_server_closes_are_made_anew_without_a_word(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.url) as store:
        for _ in range(5):
            assert put(store, b"k", b"x" * PAGE) in (Status.OK, Status.EXISTS)
            command(server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert get(store, b"k", PAGE) == b"x" * PAGE


def test_a_password_that_is_changed_and_changed_back(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path, "--requirepass", "one") as server,
        opened(f"redis://:one@127.0.0.1:{server.port}") as store,
    ):
        assert put(store, b"k", b"x" * PAGE) is Status.OK
        command(server, "CONFIG", "SET", "requirepass", "two", user="one")
        command(server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", user="two")
        assert get(store, b"k", PAGE) is Status.UNAVAILABLE
        assert "WRONGPASS" in store.health().detail
        command(server, "CONFIG", "SET", "requirepass", "one", user="two")
        assert get(store, b"k", PAGE) == b"x" * PAGE


def test_values_of_others_cut_swapped_or_changed_are_never_a_page(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.url) as store:
        for key in (b"a", b"b"):
            assert put(store, key, key * PAGE) is Status.OK
        command(server, "COPY", "forebay:{}:a", "forebay:{}:b", "REPLACE")
        assert get(store, b"b", PAGE) is Status.CHECKSUM, "the page of another key"
        command(server, "SETRANGE", "forebay:{}:a", "100", "?")
        assert get(store, b"a", PAGE) is Status.CHECKSUM, "a changed byte"
        command(server, "SET", "forebay:{}:a", "x" * PAGE)
        assert get(store, b"a", PAGE) in (Status.CHECKSUM, Status.INVALID), "a stranger's value"
        command(server, "SET", "forebay:{}:a", "x")
        assert get(store, b"a", PAGE) is Status.CHECKSUM, "shorter than a trailer"
        command(server, "DEL", "forebay:{}:a")
        command(server, "LPUSH", "forebay:{}:a", "x")
        assert get(store, b"a", PAGE) is Status.CHECKSUM, "not even a string"
        assert put(store, b"a", b"a" * PAGE) is Status.OK and get(store, b"a", PAGE) == b"a" * PAGE


def test_pages_expire_after_their_time_to_live_and_a_put_renews_it(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.url + "?ttl=100") as store:
        assert put(store, b"k", b"x" * PAGE) is Status.OK
        command(server, "EXPIRE", "forebay:{}:k", "5")
        assert put(store, b"k", b"x" * PAGE) is Status.EXISTS
        assert int(command(server, "TTL", "forebay:{}:k")) > 90
        command(server, "PEXPIRE", "forebay:{}:k", "1")
        wait_for(lambda: get(store, b"k", PAGE) is Status.NOT_FOUND, what="the page to expire")


def test_one_call_of_many_waits_for_a_turn_and_all_come_through(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.url + "?connections=1") as store:
        wrong: list[object] = []

        def work(name: int) -> None:
            value = bytes([name]) * PAGE
            for index in range(10):
                put(store, b"%d-%d" % (name, index), value)
                found = get(store, b"%d-%d" % (name, index), PAGE)
                if found != value:
                    wrong.append(found)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_behind_the_breaker_a_dead_server_is_not_asked_and_a_new_one_is(tmp_path: Path) -> None:
    lines: list[str] = []
    with redis_server(tmp_path) as server:
        store = open_store(server.url)
        assert store is not None
        guarded = GuardedStore(store, lines.append)
        assert put(guarded, b"k", b"x" * PAGE) is Status.OK
        server.kill()
        for _ in range(3):
            get(guarded, b"k", PAGE)
        assert guarded.is_open
        server.start()
        wait_for(lambda: not guarded.is_open, what="the breaker to close")
        assert put(guarded, b"k", b"x" * PAGE) is Status.OK
        assert len(lines) == 2
        guarded.close()


# ------------------------------------------------------------------------------------------ a cluster


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    cli = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if cli is None:
        pytest.skip("neither redis-cli nor valkey-cli is installed")
    with contextlib.ExitStack() as stack:
        root = tmp_path_factory.mktemp("cluster")
        servers = []
        for number in range(3):
            options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
            port = low_port()
            servers.append(
                stack.enter_context(redis_server(root / str(number), *options, port=port))
            )
        names = [f"127.0.0.1:{server.port}" for server in servers]
        create = [cli, "--cluster", "create", *names, "--cluster-yes"]
        subprocess.run(create, check=True, timeout=60, stdout=subprocess.DEVNULL)
        for server in servers:
            wait_for(
                lambda s=server: b"cluster_state:ok" in command(s, "CLUSTER", "INFO"),
                what="the cluster",
            )  # type: ignore[misc]
        yield servers


def low_port() -> int:
    """A cluster's bus has the port + 10000."""
    while (port := free_port()) > 55_000 or port < 2_000:
        pass
    return port


def test_a_cluster_keeps_a_group_in_one_slot_and_all_groups_on_all_nodes(
    nodes: list[Server],
) -> None:
    with opened(nodes[0].url) as store:
        groups = [b"group-%d" % number for number in range(20)]
        items = [
            PutItem(b"page-%d" % n, bytes([n]) * PAGE, group) for group in groups for n in range(4)
        ]
        assert store.put_from(items, T) == [Status.OK] * 80
        buffers = [bytearray(PAGE) for _ in items]
        gets = [GetItem(i.key, 0, PAGE, b, i.group) for i, b in zip(items, buffers, strict=True)]
        assert store.get_into(gets, T) == [Status.OK] * 80
        assert [bytes(b) for b in buffers] == [bytes(i.buffer) for i in items]
        for group in groups:
            keys = [b"page-%d" % n for n in range(5)]
            assert store.match_prefix(keys, [], hint=False, timeout_s=T, group=group) == 4
        assert all(int(command(node, "DBSIZE")) > 0 for node in nodes)
        assert store.use().sizes["objects"] == 80
        assert store.clear([b"-0", b"-1"], T) == 40
        assert store.use().sizes["objects"] == 40


def test_keys_whose_slot_has_moved_are_found_where_they_are_now(nodes: list[Server]) -> None:
    with opened(nodes[0].url) as store:
        group = b"moves"
        slot = slot_of(b"{" + group.hex().encode() + b"}")
        assert put(store, b"k", b"x" * PAGE, group) is Status.OK
        ids = [command(node, "CLUSTER", "MYID").decode() for node in nodes]
        name = f"forebay:{{{group.hex()}}}:k"
        owner = next(
            i
            for i, node in enumerate(nodes)
            if name in command(node, "CLUSTER", "GETKEYSINSLOT", str(slot), "9").decode()
        )
        target = (owner + 1) % 3
        command(nodes[target], "CLUSTER", "SETSLOT", str(slot), "IMPORTING", ids[owner])
        command(nodes[owner], "CLUSTER", "SETSLOT", str(slot), "MIGRATING", ids[target])
        command(nodes[owner], "MIGRATE", "127.0.0.1", str(nodes[target].port), name, "0", "5000")
        for node in (nodes[target], nodes[owner]):
            command(node, "CLUSTER", "SETSLOT", str(slot), "NODE", ids[target])
        assert get(store, b"k", PAGE, group) == b"x" * PAGE
        assert put(store, b"new", b"y" * PAGE, group) is Status.OK


def test_a_node_that_is_away_costs_its_own_groups(nodes: list[Server]) -> None:
    with opened(nodes[0].url) as store:
        groups = [b"away-%d" % number for number in range(12)]
        items = [PutItem(b"k", b"z" * PAGE, group) for group in groups]
        assert set(store.put_from(items, T)) == {Status.OK}
        stopped = nodes[2].child
        assert stopped is not None
        stopped.send_signal(signal.SIGSTOP)
        try:
            gets = [GetItem(b"k", 0, PAGE, bytearray(PAGE), group) for group in groups]
            statuses = store.get_into(gets, 0.5)
            assert set(statuses) == {Status.OK, Status.TIMEOUT}
        finally:
            stopped.send_signal(signal.SIGCONT)
        wait_for(lambda: set(store.get_into(gets, T)) == {Status.OK}, what="the node to come back")


def test_a_master_that_dies_is_succeeded_by_its_replica(
    nodes: list[Server], tmp_path: Path
) -> None:
    cli = shutil.which("redis-cli") or shutil.which("valkey-cli")
    assert cli is not None
    options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
    with (
        redis_server(tmp_path, *options, port=low_port()) as replica,
        opened(nodes[0].url) as store,
    ):
        master_id = command(nodes[2], "CLUSTER", "MYID").decode()
        join = ["--cluster", "add-node", f"127.0.0.1:{replica.port}", f"127.0.0.1:{nodes[0].port}"]
        as_replica = ["--cluster-slave", "--cluster-master-id", master_id]
        subprocess.run([cli, *join, *as_replica], check=True, timeout=60, stdout=subprocess.DEVNULL)
        groups = [b"succeeded-%d" % number for number in range(12)]
        items = [PutItem(b"k", b"z" * PAGE, group) for group in groups]
        assert set(store.put_from(items, T)) == {Status.OK}
        wait_for(
            lambda: command(replica, "DBSIZE") == command(nodes[2], "DBSIZE"),
            what="the replica to have what its master has",
        )
        nodes[2].kill()
        gets = [GetItem(b"k", 0, PAGE, bytearray(PAGE), group) for group in groups]
        assert set(store.get_into(gets, 1.0)) == {Status.OK, Status.UNAVAILABLE}
        command(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
        wait_for(lambda: set(store.get_into(gets, T)) == {Status.OK}, what="the successor")
        wait_for(lambda: store.health().ok, what="the store to be well")
