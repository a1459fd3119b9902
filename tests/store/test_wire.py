"""The wire: golden bytes, limits, and hostile peers, who harm nobody but themselves."""

import contextlib
import random
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.store import Status, StoreClient
from forebay.store.wire import auth, connection, frames, listener
from forebay.store.wire.frames import PREFIX, BodyDecoder, FrameError, encode, read_prefix
from forebay.store.wire.messages import (
    MAX_KEYS,
    Beat,
    Bury,
    Challenge,
    Codes,
    Exists,
    Get,
    Grave,
    Hello,
    Inventory,
    Located,
    Message,
    Piece,
    Place,
    PutStart,
    ReadMemory,
    Refused,
    Register,
    Role,
    Slice,
    Spot,
    Tier,
    Touched,
    Write,
)
from forebay.store.wire.tls import client_context
from tests.store.fuzz_frames import ListTransport
from tests.store.store_cluster import CERTIFICATE, Cluster, cluster, wait_for
from tests.store.store_process import farm

GOLDEN: list[tuple[Message, str]] = [
    (Exists(1, [b"k"]), "010000000d000000000000000000000093a64578697374730191c4016b"),
    (Codes(2, b"\0\2"), "010000000c000000000000000000000093a5436f64657302c4020002"),
    (Get(3, [b"k"]), "010000000a000000000000000000000093a34765740391c4016b"),
    (
        Located(4, 5.0, [Place(0, 9, 7, (Spot(1, Tier.MEMORY, 64, 7),))]),
        "010000001e000000000000000000000094a74c6f636174656404cb40140000000000009194000907919401004007",
    ),
    (
        PutStart(5, [b"k"], [10]),
        "0100000011000000000000000000000094a850757453746172740591c4016b910a",
    ),
    (
        Bury(6, [Grave("t", b"k", 7, True, "h")]),
        "0100000012000000000000000000000093a442757279069195a174c4016b07c3a168",
    ),
    (
        Write(7, [Piece(b"k", 9, 64, 10, 0xDEADBEEF, b"12345678")]),
        "010000001f000000000000000000000093a55772697465079196c4016b09400acedeadbeefc4083132333435363738",
    ),
    (
        Register("n", "i", "h", 1, "u", "m", 2, 3, 4),
        "010000001900000000000000000000009ba85265676973746572a16ea169a16801a175a16d02030490",
    ),
    (
        Touched([(b"k", 9)], 100),
        "0100000012000000000000000000000095a7546f75636865649192c4016b09640000",
    ),
    (
        Challenge(b"n" * 16),
        "010000001d000000000000000000000092a94368616c6c656e6765c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e",
    ),
]


@pytest.mark.parametrize(
    "message, golden",
    GOLDEN,
    ids=lambda one: type(one).__name__ if not isinstance(one, str) else "",
)
def test_golden_bytes(message: Message, golden: str) -> None:
    assert encode(message).hex() == golden


def test_what_an_older_side_says_without_the_fields_added_since() -> None:
    told = bytes.fromhex("93a7546f75636865649192c4016b0964")
    assert frames.decode_client_to_holder(told) == Touched([(b"k", 9)], 100, 0, 0)
    assert frames.decode_holder_to_master(bytes.fromhex("94a44265617407a26f6bc3")) == Beat(
        7, "ok", True, 0, 0
    )


def test_a_prefix_is_refused_for_its_version_and_its_lengths() -> None:
    for version, zero, body, payload in (
        (2, 0, 1, 0),
        (1, 1, 1, 0),
        (1, 0, 0, 0),
        (1, 0, 2**32 - 1, 0),
        (1, 0, 1, 2**63),
    ):
        with pytest.raises(FrameError):
            read_prefix(PREFIX.pack(version, 0, zero, body, payload))


DECODERS = [
    frames.decode_client_to_master,
    frames.decode_holder_to_master,
    frames.decode_client_to_holder,
    frames.decode_master_to_client,
    frames.decode_master_to_holder,
    frames.decode_holder_to_client,
    frames.decode_opening,
]


@settings(max_examples=300)
@given(st.binary(max_size=200), st.sampled_from(DECODERS))
def test_any_bytes_are_a_message_or_a_frame_error(body: bytes, decode: BodyDecoder[object]) -> None:
    with contextlib.suppress(FrameError):
        decode(body)


@settings(max_examples=300)
@given(st.data())
def test_any_damage_to_a_message_is_a_message_or_a_frame_error(data: st.DataObject) -> None:
    message, _ = data.draw(st.sampled_from(GOLDEN))
    body = bytearray(encode(message)[PREFIX.size :])
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    for decode in DECODERS:
        with contextlib.suppress(FrameError):
            decode(bytes(body[: data.draw(st.integers(0, len(body)))]))


def test_too_many_or_too_long_keys_are_a_frame_error() -> None:
    for keys in ([b"k"] * (MAX_KEYS + 1), [b"k", b"k" * 5000]):
        with pytest.raises(FrameError):
            frames.decode_client_to_master(encode(Exists(1, keys))[PREFIX.size :])


# ---------------------------------------------------------------------------------------------- who may talk


def test_the_challenge_binds_tenant_role_and_both_nonces() -> None:
    known = auth.Secrets({"a": b"secret", "b": b"other", "@holder": b"in"})
    given_, other = auth.challenge(), auth.challenge()
    good = auth.hello(given_, Role.CLIENT, "a", b"secret")
    auth.verify_hello(given_, good, known)
    bad = [
        (other, good),
        (given_, Hello(Role.CLIENT, "b", good.nonce, good.mac)),
        (given_, Hello(Role.CLIENT, "a", bytes(16), good.mac)),
        (given_, Hello(Role.HOLDER, "a", good.nonce, good.mac)),
        (given_, auth.hello(given_, Role.CLIENT, "nobody", b"secret")),
        (given_, auth.hello(given_, Role.CLIENT, "@holder", b"in")),
        (given_, auth.hello(given_, Role.HOLDER, "a", b"secret")),
        (given_, Hello(Role.CLIENT, "", good.nonce, good.mac)),
    ]
    for challenge, hello in bad:
        with pytest.raises(auth.AuthError):
            auth.verify_hello(challenge, hello, known)
    welcome = auth.welcome(given_, good, known, epoch=1)
    auth.verify_welcome(given_, good, welcome, b"secret")
    with pytest.raises(auth.AuthError):
        auth.verify_welcome(given_, good, welcome, b"imposter's")


# ---------------------------------------------------------------------------------------------- hostile peers


@pytest.fixture(scope="module", params=["tcp", "tls"])
def nodes(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    patch = pytest.MonkeyPatch()
    patch.setattr(connection, "OPENING_S", 0.5)
    patch.setattr(connection, "FRAME_S", 0.5)
    patch.setattr(connection, "FRAME_BYTES_PER_S", 1 << 40)
    with cluster(tls=request.param == "tls") as one:
        one.holder()
        yield one
    patch.undo()


@pytest.fixture(params=["master", "holder"])
def port(request: pytest.FixtureRequest, nodes: Cluster) -> int:
    return nodes.address.port if request.param == "master" else nodes.holders[0].address.port


def connected(nodes: Cluster, port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), 5)
    return (
        client_context(CERTIFICATE).wrap_socket(sock, server_hostname="127.0.0.1")
        if nodes.tls
        else sock
    )


def opened(nodes: Cluster, port: int) -> socket.socket:
    """A connection that has introduced itself well."""
    sock = connected(nodes, port)
    challenge = _next(sock)
    assert isinstance(challenge, Challenge)
    sock.sendall(encode(auth.hello(challenge, Role.CLIENT, "default", b"")))
    _next(sock)
    return sock


def _next(sock: socket.socket) -> object:
    prefix = read_prefix(_exactly(sock, PREFIX.size))
    return frames.decode_opening(_exactly(sock, prefix.body_bytes))


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += sock.recv(count - len(data)) or pytest.fail("closed early")  # type: ignore[operator]
    return data


def is_dropped(sock: socket.socket, timeout_s: float = 10.0) -> bool:
    sock.settimeout(timeout_s)
    try:
        while sock.recv(4096):
            pass
        return True
    except (ConnectionError, ssl.SSLError):
        return True
    except TimeoutError:
        return False
    finally:
        sock.close()


HOSTILE = {
    "huge body": PREFIX.pack(1, 0, 0, 2**32 - 1, 0),
    "huge payload": PREFIX.pack(1, 0, 0, 10, 2**64 - 1),
    "payload without write": encode(Exists(1, [b"k"]), 1 << 30),
    "other version": PREFIX.pack(9, 0, 0, 10, 0),
    "garbage": b"\xff" * 100,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "wrong channel": encode(Inventory(0, [], [], [], True)),
    "deep nesting": PREFIX.pack(1, 0, 0, 20000, 0) + b"\x91" * 20000,
    "unequal lists": encode(PutStart(1, [b"k"], [1, 2])),
    "payload shorter than pieces": encode(Write(1, []), 7),
    "negative slice": PREFIX.pack(1, 0, 0, 3, 0) + b"\x93\xa1",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_frame_drops_that_peer_and_nothing_else(
    nodes: Cluster, port: int, name: str
) -> None:
    good = nodes.client(allow_local=False)
    assert good.put(name.encode(), b"value") in (Status.OK, Status.EXISTS)
    sock = opened(nodes, port)
    sock.sendall(HOSTILE[name])
    sock.settimeout(5)
    assert is_dropped(sock)
    assert good.get(name.encode()) == b"value"


def test_bytes_before_the_opening_are_refused(nodes: Cluster, port: int) -> None:
    for data in (encode(Exists(1, [b"k"])), PREFIX.pack(1, 0, 0, 5000, 0), b"\0" * 64):
        sock = connected(nodes, port)
        sock.sendall(data)
        assert is_dropped(sock)


def test_slow_peers_are_dropped_at_every_stage(nodes: Cluster, port: int) -> None:
    """Slow-loris: one byte now and then does not buy more time."""
    silent = connected(nodes, port)
    slow = opened(nodes, port)
    slow.settimeout(0.1)
    begun = time.monotonic()
    with contextlib.suppress(ConnectionError):
        for byte in encode(Exists(1, [b"k" * 100])):
            slow.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                slow.recv(4096)
                break  # it was told why, or cut off
    assert time.monotonic() - begun < 11.0, "it would have taken 12 s to send"
    assert is_dropped(slow) and is_dropped(silent)


@pytest.mark.parametrize("tls", [False, True])
def test_a_crowd_of_strangers_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch, tls: bool) -> None:
    """Of too many that do not say who they are the oldest go, at once, and peers stay."""
    monkeypatch.setattr(listener, "MAX_STRANGERS", 8)
    monkeypatch.setattr(connection, "OPENING_S", 600.0)
    with cluster(tls=tls) as nodes:
        nodes.holder()
        early = nodes.client(allow_local=False)
        assert early.put(b"k", b"value") is Status.OK
        for port in (nodes.address.port, nodes.holders[0].address.port):
            silent = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(40)]
            late = nodes.client(allow_local=False)
            assert late.get(b"k") == early.get(b"k") == b"value"
            assert all(is_dropped(sock) for sock in silent[:32])
            assert not is_dropped(silent[-1], 0.05)
            for sock in silent:
                sock.close()


def test_at_most_so_many_connections_are_served_and_more_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with cluster() as nodes:
        monkeypatch.setattr(listener, "MAX_CONNECTIONS", 3)
        peers = [opened(nodes, nodes.address.port) for _ in range(3)]
        too_many = connected(nodes, nodes.address.port)
        assert _next(too_many) == Refused("more than 3 connections") and is_dropped(too_many)
        peers.pop().close()
        wait_for(lambda: nodes.master is not None and len(nodes.master._connections) == 2)
        peers.append(opened(nodes, nodes.address.port))
        for sock in peers:
            sock.close()


def test_descriptors_that_run_out_are_taken_from_strangers(tmp_path: Path) -> None:
    with farm(tmp_path) as nodes:
        nodes.prelude = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
        port = int(
            nodes.run("up", "--listen", "127.0.0.1:0", "--dram", "8MiB").url.rpartition(":")[2]
        )
        silent = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(150)]
        with StoreClient.connect(f"forebay://127.0.0.1:{port}", timeout_s=10.0) as client:
            assert client.put(b"k", b"value") is Status.OK and client.get(b"k") == b"value"
        for sock in silent:
            sock.close()


class StuckTransport(ListTransport):
    """The peer takes nothing, so that closing does not come to an end."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


class Nobody:
    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"{name} of a server that nobody talks to")


@pytest.mark.parametrize("linger_s, aborted", [(-1.0, True), (60.0, False)])
def test_a_dropped_peer_that_does_not_read_why_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, linger_s: float, aborted: bool
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", linger_s)
    registry: dict[int, connection.Connection] = {}
    transport, peer = StuckTransport(), connection.Connection(Nobody(), 1, registry)
    peer.connection_made(transport)
    peer.drop("it is a test")
    assert transport.is_closing() and not transport.aborted
    if reason := peer.overdue(time.monotonic()):
        peer.drop(reason)
    assert transport.aborted is aborted


def test_a_writer_that_stops_half_way_is_dropped_and_its_range_is_not_readable(
    nodes: Cluster,
) -> None:
    holder = nodes.holders[0]
    client = nodes.client(allow_local=False)
    channel_pool = client.masters[0]._master
    with channel_pool.lease(time.monotonic() + 5) as master:
        granted = master.ask(
            PutStart(master.new_call(), [b"half"], [1000]),
            frames.decode_master_to_client,
            time.monotonic() + 5,
        )
        room = granted.grants[0].rooms[0]  # type: ignore[union-attr]
        sock = opened(nodes, holder.address.port)
        piece = Piece(b"half", granted.grants[0].generation, room.offset, 1000, 0, room.token)  # type: ignore[union-attr]
        sock.sendall(encode(Write(1, [piece]), 1000) + b"x" * 500)
        wait_for(lambda: holder.memory.of("default", b"half"))
        assert is_dropped(sock)
        wait_for(lambda: not holder.memory.of("default", b"half"))
    assert client.get(b"half") is None


def test_a_payload_that_stands_still_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, nodes: Cluster
) -> None:
    """However much time so many bytes may take."""
    monkeypatch.setattr(connection, "FRAME_BYTES_PER_S", 1)
    piece = Piece(b"endless", 1, 0, 1 << 40, 0, b"12345678")
    sock = opened(nodes, nodes.holders[0].address.port)
    sock.sendall(encode(Write(1, [piece]), 1 << 40) + b"x" * 500)
    assert is_dropped(sock)


def test_a_stranger_cannot_write_without_the_masters_token_nor_read_what_is_not_its_own(
    nodes: Cluster,
) -> None:
    holder = nodes.holders[0]
    client = nodes.client("victim", allow_local=False)
    client.put(b"secret", b"s" * 1000)
    entry = holder.memory.of("victim", b"secret")[0]
    sock = opened(nodes, holder.address.port)
    piece = Piece(b"secret", entry.generation + 1, entry.offset, 1000, 0, b"12345678")
    sock.sendall(encode(Write(1, [piece]), 1000) + b"x" * 1000)
    prefix = read_prefix(_exactly(sock, PREFIX.size))
    assert frames.decode_holder_to_client(_exactly(sock, prefix.body_bytes)) == Codes(
        1, bytes([Status.UNAVAILABLE])
    )
    sock.sendall(encode(ReadMemory(2, [Slice(entry.offset, entry.stamp, 0, 1000)])))
    prefix = read_prefix(_exactly(sock, PREFIX.size))
    assert prefix.payload_bytes == 0
    assert frames.decode_holder_to_client(_exactly(sock, prefix.body_bytes)) == Codes(
        2, bytes([Status.NOT_FOUND])
    )
    sock.close()
    assert client.get(b"secret") == b"s" * 1000


def test_an_optional_frame_of_the_future_is_skipped(nodes: Cluster) -> None:
    sock = opened(nodes, nodes.holders[0].address.port)
    body = b"\x92\xa6Future\x01"
    sock.sendall(
        PREFIX.pack(1, frames.OPTIONAL, 0, len(body), 0) + body + encode(ReadMemory(3, []))
    )
    prefix = read_prefix(_exactly(sock, PREFIX.size))
    assert frames.decode_holder_to_client(_exactly(sock, prefix.body_bytes)) == Codes(3, b"")
    sock.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_streams_harm_nobody(nodes: Cluster, port: int, seed: int) -> None:
    random_ = random.Random(seed)
    good = nodes.client(allow_local=False)
    assert good.put(b"still", b"here") in (Status.OK, Status.EXISTS)
    base = [encode(message) for message, _ in GOLDEN]
    for _ in range(60):
        sock = opened(nodes, port)
        data = bytearray(b"".join(random_.choices(base, k=3)))
        for _ in range(random_.randrange(6)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        with contextlib.suppress(OSError):
            sock.sendall(data)
        sock.close()
    assert good.get(b"still") == b"here"
