"""TLS: the same store inside it, and nobody gets in or is believed who should not. The keys beside this file protect nothing."""

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forebay.store import Status, StoreClient
from forebay.store.address import AddressError, StoreUrl
from forebay.store.holder.node import Holder, HolderConfig, HolderError
from forebay.store.wire import auth
from forebay.store.wire import connection as connections
from forebay.store.wire.frames import decode_holder_to_client, encode
from forebay.store.wire.messages import ReadMemory, Slice
from forebay.store.wire.tls import TlsError, client_context, server_context
from tests.pace import paced
from tests.store.store_cluster import CERTIFICATE, KEY, LOCALHOST, Cluster, cluster, wait_for
from tests.store.store_process import farm
from tests.store.test_cli_store import run as run_cli

ELSEWHERE = CERTIFICATE.with_name("elsewhere.pem")
SECRETS = auth.Secrets({"default": b"s", "@holder": b"h"})


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(secrets=SECRETS, tls=True) as one:
        one.holder(4 << 20, tmp_path)
        yield one


def test_everything_works_inside_tls_from_memory_and_from_the_log(nodes: Cluster) -> None:
    client = nodes.client(secret="s", allow_local=False, timeout_s=10.0)
    values = {b"%d" % number: bytes([number]) * 500_000 for number in range(16)}  # twice the memory
    assert set(client.put_from(list(values), list(values.values()))) == {Status.OK}
    assert {key: client.get(key) for key in values} == values
    buffers = [bytearray(1000) for _ in values]
    assert set(client.get_into(list(values), buffers, [7] * len(values))) == {Status.OK}
    assert buffers == [bytearray(value[7:1007]) for value in values.values()]
    assert client.get(b"0") == nodes.client(secret="s").get(b"0"), "and on this machine past it"


def test_a_large_answer_is_encrypted_as_the_peer_takes_it(tmp_path: Path) -> None:
    """All of it at once took several times as long as its parts one by one (docs/LOG.md)."""
    size, count = 1 << 20, 48
    with cluster(secrets=SECRETS, tls=True) as one:
        holder = one.holder(64 << 20)
        client = one.client(secret="s", allow_local=False, timeout_s=20.0)
        values = {b"%d" % number: bytes([number]) * size for number in range(count)}
        assert set(client.put_from(list(values), list(values.values()))) == {Status.OK}
        peer = next(iter(client.masters[0]._holders._peers.values()))
        with peer.pool.lease(time.monotonic() + 20) as channel:
            entries = [holder.memory.of("default", key)[0] for key in values]
            slices = [Slice(entry.offset, entry.stamp, 0, size) for entry in entries]
            channel.send(encode(ReadMemory(channel.new_call(), slices)), (), time.monotonic() + 20)
            busy = wait_for(
                lambda: [known for known in holder._connections.values() if known.unsent_bytes()]
            )
            assert [
                known._transport.get_write_buffer_size() < 2 * connections.TLS_HIGH_BYTES
                for known in busy
                if known._transport
            ] == [True]
            answer, prefix = channel.receive(decode_holder_to_client, time.monotonic() + 20)
            assert answer.codes == bytes(count) and prefix.payload_bytes == count * size  # type: ignore[union-attr]
            target = np.zeros(count * size, np.uint8)
            channel.receive_into(target, time.monotonic() + 20)
        assert target.tobytes() == b"".join(values.values())
        wait_for(lambda: not busy[0].unsent_bytes())


def test_a_connection_that_idles_is_used_again_and_one_that_died_is_not(nodes: Cluster) -> None:
    client = nodes.client(secret="s", allow_local=False)
    assert client.put(b"k", b"v") is Status.OK
    idle = list(client.masters[0]._master._idle)
    assert client.exists([b"k"]) == [True]
    assert client.masters[0]._master._idle == idle and not idle[0].is_stale()
    nodes.stop_master()
    wait_for(idle[0].is_stale)
    nodes.start_master()
    wait_for(lambda: client.get(b"k") == b"v")


def test_a_call_that_gets_no_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of TLS connections are not the kernel's."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        begun = time.monotonic()
        with pytest.raises(ConnectionError):
            StoreClient.connect(f"forebay+tls://127.0.0.1:{port}?ca={CERTIFICATE}", timeout_s=0.3)
        assert time.monotonic() - begun < paced(5.0)


@pytest.mark.parametrize(
    "url", ["forebay://{}", "forebay+tls://{}?ca=" + str(ELSEWHERE), "forebay+tls://{}"]
)
def test_a_client_without_tls_or_trust_is_not_served(nodes: Cluster, url: str) -> None:
    with pytest.raises(ConnectionError):
        StoreClient.connect(url.format(nodes.address), secret="s", timeout_s=1.0)
    assert nodes.client(secret="s").put(b"still", b"served") is Status.OK


def test_a_certificate_of_another_name_is_refused_although_it_is_trusted() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    context = server_context(ELSEWHERE, ELSEWHERE.with_suffix(".key"))
    with listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        far.settimeout(5)
        near.settimeout(5)
        wrapped = context.wrap_socket(far, server_side=True, do_handshake_on_connect=False)
        trusting = client_context(ELSEWHERE).wrap_socket(
            near, server_hostname="127.0.0.1", do_handshake_on_connect=False
        )
        with pytest.raises(ssl.SSLCertVerificationError, match=r"127\.0\.0\.1"):
            shake(trusting, wrapped)
        wrapped.close()


def shake(client: ssl.SSLSocket, server: ssl.SSLSocket) -> None:
    """Both hands in turn, in one thread."""
    for side in (client, server):
        side.setblocking(False)
    for _ in range(1000):
        for side in (client, server):
            try:
                side.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue


def test_the_secret_is_asked_for_inside_tls_too(nodes: Cluster) -> None:
    with pytest.raises(ConnectionError, match="wrong tenant or secret"):
        StoreClient.connect(nodes.url, secret="guess", timeout_s=2.0)


def test_strangers_at_the_door_of_tls_are_dropped_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Garbage, an opening in plain text, and one who says nothing."""
    monkeypatch.setattr(connections, "OPENING_S", 0.3)
    with cluster(tls=True) as nodes:
        nodes.holder()
        for port in (nodes.address.port, nodes.holders[0].address.port):
            for data in (b"\xff" * 200, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", b""):
                stranger = socket.create_connection(("127.0.0.1", port), 5)
                stranger.sendall(data)
                try:
                    while stranger.recv(4096):
                        pass
                except ConnectionError:
                    pass
                stranger.close()
        assert nodes.client(allow_local=False).put(b"k", b"v") is Status.OK


def test_a_holder_with_half_of_tls_does_not_start(nodes: Cluster) -> None:
    holder = Holder(
        HolderConfig(nodes.address, LOCALHOST, 1 << 20, tls=server_context(CERTIFICATE, KEY)),
        SECRETS,
    )
    with pytest.raises(HolderError, match="--tls-cert"):
        nodes.do(holder.start())


def test_urls() -> None:
    assert StoreUrl.parse("forebay+tls://h:1?ca=/x.pem").ca == Path("/x.pem")
    for bad in (
        "forebay://h:1?ca=/x.pem",
        "forebay+tls://h:1?cert=x",
        "tls://h:1",
        "forebay+tls://h",
        "forebay://h:1,h:1",
    ):
        with pytest.raises(AddressError):
            StoreUrl.parse(bad)
    with pytest.raises(TlsError, match="/nowhere"):
        client_context(Path("/nowhere"))


def test_from_the_command_line(tmp_path: Path) -> None:
    with farm(tmp_path) as processes:
        tls = ["--tls-cert", str(CERTIFICATE), "--tls-key", str(KEY)]
        up = processes.run("up", "--listen", "127.0.0.1:0", "--dram", "4MiB", *tls)
        assert up.url.startswith("forebay+tls://")
        with StoreClient.connect(f"{up.url}?ca={CERTIFICATE}", allow_local=False) as client:
            wait_for(lambda: client.put(b"k", b"v") in (Status.OK, Status.EXISTS))
            assert client.get(b"k") == b"v"
    for args in (["--tls-cert", str(CERTIFICATE)], ["--tls-cert", str(KEY), "--tls-key", str(KEY)]):
        done = run_cli("up", "--listen", "127.0.0.1:0", *args)
        assert done.exit_code == 2 and "--tls-" in done.output, done.output
