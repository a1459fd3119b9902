"""Clients that are slow, endless or speak no HTTP, on real sockets: each gets its answer and is let go."""

import json
import select
import socket
from collections.abc import Callable
from typing import Any

import pytest

from forebay.frontend import connection, limits
from forebay.frontend import server as server_module
from forebay.frontend.connection import HEAD_BYTES_MAX
from forebay.settings import Settings
from tests.frontend.fake_planner import DEADLINE_S
from tests.frontend.served import Server, says, wait_ready

LARGE = 40 << 20
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), DEADLINE_S)


@pytest.fixture(scope="module")
def keyed_server(start_server: Callable[..., Server]) -> Server:
    return wait_ready(start_server(Settings(api_key="a key")))


@pytest.fixture(scope="module")
def brisk_server(start_server: Callable[..., Server]) -> Server:
    """Its connections are let go after a second."""
    return wait_ready(start_server(Settings(keep_alive_s=1, store="none")))


def read_to_end(client: socket.socket) -> bytes:
    """All that comes until the server closes; a reset counts as the end."""
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        parts.append(b"(reset)")
    return b"".join(parts)


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"content-type: application/json" in head and b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def trickle(client: socket.socket, piece: bytes) -> bytes:
    """Send ``piece`` again and again until the server has had enough; what it says."""
    while not select.select([client], [], [], 0.01)[0]:
        client.sendall(piece)
    return read_to_end(client)


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnothing like a length\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_told_so_in_the_apis_own_form(server: Server, sent: bytes) -> None:
    with connect(server) as client:
        client.sendall(sent)
        assert "not valid HTTP" in error_of(read_to_end(client), 400)["message"]
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        HEALTH + b"X: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n",
        HEALTH + b"X: x\r\n" * (HEAD_BYTES_MAX // 2) + b"\r\n",
        b"GET /" + b"x" * HEAD_BYTES_MAX + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_a_head_that_is_too_large(server: Server, head: bytes) -> None:
    with connect(server) as client:
        client.sendall(head)
        assert str(HEAD_BYTES_MAX) in error_of(read_to_end(client), 431)["message"]


def test_a_head_without_end_is_not_kept(server: Server) -> None:
    with connect(server) as client:
        client.sendall(HEALTH + b"X: ")
        assert str(HEAD_BYTES_MAX) in error_of(trickle(client, b"x" * 1000), 431)["message"]


def test_a_head_just_within_the_limit(server: Server) -> None:
    with connect(server) as client:
        client.sendall(
            HEALTH + b"Connection: close\r\nX: " + b"x" * (HEAD_BYTES_MAX - 200) + b"\r\n\r\n"
        )
        assert read_to_end(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("before", [b"", HEALTH + b"\r\n"], ids=["first request", "second request"])
def test_a_head_that_does_not_come_to_its_end(
    server: Server, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    with connect(server) as client:
        client.sendall(before)
        if before:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        client.sendall(HEALTH)
        assert "did not arrive" in error_of(trickle(client, b"X: x\r\n"), 408)["message"]


@pytest.mark.parametrize("before", [b"", HEALTH + b"\r\n"], ids=["first request", "second request"])
def test_empty_lines_are_no_request(
    server: Server, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser skips them, and says nothing of them."""
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    with connect(server) as client:
        client.sendall(before)
        if before:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        error_of(trickle(client, b"\r\n"), 408)


@pytest.mark.parametrize("before", [b"", HEALTH + b"\r\n"], ids=["first", "after an answer"])
def test_a_connection_that_says_nothing_is_closed_after_the_time_that_is_set(
    brisk_server: Server, before: bytes
) -> None:
    with connect(brisk_server) as client:
        client.sendall(before)
        assert read_to_end(client).count(b"HTTP/1.1 200 ") == bool(before)


def test_a_body_that_does_not_come_to_its_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.3)
    with connect(server) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{"
        )
        assert b" 408 " in trickle(client, b" ").splitlines()[0]


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
@pytest.mark.parametrize(
    "length",
    [b"Content-Length: %d" % LARGE, b"Transfer-Encoding: chunked"],
    ids=["announced", "not announced"],
)
def test_a_body_far_above_the_limit_gets_its_answer(
    server: Server, length: bytes, more: bytes
) -> None:
    with connect(server) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + more + length + b"\r\n\r\n"
        )
        client.sendall(b"%x\r\n" % LARGE if b"chunked" in length else b"")
        client.sendall(bytes(LARGE))
        assert "bytes" in error_of(read_to_end(client), 413)["message"]


@pytest.mark.parametrize("method", [b"POST", b"DELETE"], ids=["no key", "no such method"])
def test_a_large_body_does_not_hide_another_refusal(keyed_server: Server, method: bytes) -> None:
    with connect(keyed_server) as client:
        path = b"/v1/completions" if method == b"POST" else b"/health"
        head = b"%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (
            method,
            path,
            LARGE,
        )
        client.sendall(head + bytes(LARGE))
        error_of(read_to_end(client), 401 if method == b"POST" else 405)


def test_a_body_that_goes_on_and_on_after_its_refusal(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DROP_S", 0.3)
    with connect(server) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
        )
        error_of(read_to_end(client), 413)  # half closed
        with pytest.raises(ConnectionError):
            while True:
                client.sendall(bytes(1 << 16))


def test_a_body_that_nobody_reads_has_a_time_to_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DROP_S", 0.3)
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert trickle(client, b" ") in (b"", b"(reset)")


def test_the_second_of_two_requests_may_wait_for_the_answer_to_the_first(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a head that came too early must not end an answer that takes longer than a head may."""
    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    server.planner.hold()
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()
    with connect(server) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
            + HEALTH
        )
        server.planner.wait_for(lambda: len(server.planner.submits) == 1)
        with connect(server) as other:  # its time is over after that of the half head
            other.sendall(HEALTH)
            error_of(read_to_end(other), 408)
        server.planner.allow(None)
        answer = b""
        while b"[DONE]" not in answer:
            part = client.recv(1 << 16)
            assert part, answer
            answer += part


def test_an_answer_is_whole_though_what_follows_is_no_http(server: Server) -> None:
    server.planner.script = says("x" * 20)
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 9}).encode()
    with connect(server) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        server.planner.wait_for(lambda: len(server.planner.submits) == 1)
        client.sendall(b"\x00\x01\x02\r\n\r\n")
        answer = read_to_end(client)
    if answer.startswith(b"HTTP/1.1 200 "):  # it was there before the rest came, and is whole
        head, _, body = answer.partition(b"\r\n\r\n")
        length = next(
            int(line.split()[1]) for line in head.splitlines() if line.startswith(b"content-length")
        )
        answer = body[length:]
        assert json.loads(body[:length])["choices"][0]["text"] == "x" * 9
    if answer not in (b"", b"(reset)"):
        error_of(answer.removesuffix(b"(reset)"), 400)


def test_the_kernel_gives_up_a_client_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_MS", 500)
    with (
        server_module.listen_all("127.0.0.1", 0)[0] as listening,
        socket.create_connection(listening.getsockname()),
    ):
        accepted, _ = listening.accept()
        with accepted:
            accepted.settimeout(DEADLINE_S)
            with pytest.raises(OSError) as error:
                while True:
                    accepted.sendall(bytes(1 << 16))
            assert not isinstance(error.value, TimeoutError) or error.value.errno is not None, (
                "the kernel's, not this test's"
            )
