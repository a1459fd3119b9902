"""HTTP as the world speaks it: upgrades, old versions, other methods, framings that two servers may read differently."""

import gzip
import json
import re
import socket
import zlib
from collections.abc import Callable

import pytest

from forebay.frontend.limits import body_limit
from forebay.frontend.server import ListenError, listen_all
from forebay.settings import Settings
from tests.frontend.fake_planner import DEADLINE_S
from tests.frontend.served import Server, wait_ready
from tests.frontend.tiny_text import CONTEXT

BODY = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 9}).encode()
STREAM = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 9, "stream": True}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
HIDDEN = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = (
    b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
)
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def talk(server: Server, *packets: bytes) -> bytes:
    """All that comes back until the server closes; each packet goes out once the one before it has been taken."""
    got = b""
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for packet in packets:
            client.sendall(packet)
        while part := client.recv(1 << 16):
            got += part
    return got


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


def sized(head: bytes, body: bytes) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def chunked(head: bytes, body: bytes) -> bytes:
    return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("framed", [sized, chunked])
def test_an_offered_upgrade_changes_nothing_however_it_is_cut(
    server: Server, offer: bytes, framed: Callable[[bytes, bytes], bytes]
) -> None:
    request = framed(POST + offer, BODY)
    for cut in (
        0,
        20,
        request.index(b"\r\n\r\n") + 2,
        request.index(b"\r\n\r\n") + 4,
        len(request) - 3,
    ):
        answer = talk(server, request[:cut], request[cut:] + request + LAST)
        assert statuses(answer) == [200, 200, 200], answer
        assert answer.count(b'"text":"hello"') == 2


@pytest.mark.parametrize("offer", [b"", H2C, WEBSOCKET], ids=["none", "h2c", "websocket"])
@pytest.mark.parametrize("framed", [sized, chunked])
def test_a_request_that_is_written_in_a_body_is_no_request(
    server: Server, offer: bytes, framed: Callable[[bytes, bytes], bytes]
) -> None:
    answer = talk(server, framed(POST + offer, HIDDEN) + LAST)
    assert statuses(answer) == [400, 200]
    assert b'"version"' not in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST + b"Content-Length: 0\r\nContent-Length: 36\r\n\r\n" + HIDDEN,
        POST + b"Content-Length: 0, 36\r\n\r\n" + HIDDEN,
        POST + b"Content-Length: +36\r\n\r\n" + HIDDEN,
        POST + b"Content-Length: 0x24\r\n\r\n" + HIDDEN,
        POST + b"Content-Length : 36\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST
        + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        + HIDDEN,
        POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST + b"X: y\r\n Content-Length: 36\r\n\r\n" + HIDDEN,
        POST + b"X: y\rContent-Length: 36\r\n\r\n" + HIDDEN,
        POST + b"X: y\nContent-Length: 36\r\n\r\n" + HIDDEN,
        POST + b"Host: y\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: chunked\r\n\r\n5;\r\nhello\r\n-1\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n\r\n" + HIDDEN,
        b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        b"POST /v1/completions HTTP/1.1 \r\nHost: x\r\n\r\n" + HIDDEN,
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,
    ],
)
def test_what_two_servers_may_read_differently_ends_the_connection(
    server: Server, request_bytes: bytes
) -> None:
    answer = talk(server, request_bytes)
    assert b'"version"' not in answer
    assert statuses(answer)[-1:] == [400], answer
    assert server.http.get("/health").status_code == 200


def test_what_is_wrong_with_a_later_request_is_said_in_its_place(server: Server) -> None:
    answer = talk(server, sized(POST, BODY) + b"\x00\r\n\r\n")
    assert statuses(answer) == [200, 400]
    assert answer.index(b'"text":"hello"') < answer.index(b"not valid HTTP")


def test_nothing_after_a_last_request_is_one(server: Server) -> None:
    assert statuses(talk(server, LAST + HIDDEN)) == [200]


def test_a_last_answer_is_not_lost_to_what_comes_after_it(server: Server) -> None:
    """Closing with bytes unread would reset the connection, and the client's kernel would drop the answer."""
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as client:
        client.sendall(LAST)
        assert client.recv(1) == b"H"
        for _ in range(100):
            client.sendall(HIDDEN)
        got = b"H"
        while part := client.recv(1 << 16):
            got += part
    assert statuses(got) == [200]


def test_many_requests_at_once_are_answered_in_their_order(server: Server) -> None:
    paths = [b"/version", b"/health", b"/nowhere", b"/v1/models"] * 50
    sent = b"".join(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in paths)
    assert statuses(talk(server, sent + LAST)) == [200, 200, 404, 200] * 50 + [200]


@pytest.mark.parametrize("more", [b"", b"Connection: keep-alive\r\n"])
def test_http_1_0_gets_a_stream_without_chunks(server: Server, more: bytes) -> None:
    answer = talk(server, sized(b"POST /v1/completions HTTP/1.0\r\n" + more, STREAM))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")


def test_http_1_0_may_keep_its_connection(server: Server) -> None:
    kept = sized(b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\n", BODY)
    answer = talk(server, kept + b"GET /health HTTP/1.0\r\n\r\n")
    assert statuses(answer) == [200, 200]
    assert b"connection: keep-alive" in answer and b"connection: close" in answer


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/version"])
def test_head_is_the_head_of_get(server: Server, path: str) -> None:
    head, whole = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    assert server.http.get("/health").status_code == 200, "the connection goes on"


def test_options_says_what_a_route_takes(server: Server) -> None:
    answer = server.http.options("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (204, "POST")
    assert statuses(talk(server, b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n" + LAST)) == [404, 200]


def preflight(server: Server, origin: str) -> str | None:
    wish = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    asked = wish | {"Access-Control-Request-Headers": "authorization,content-type"}
    return server.http.options("/v1/completions", headers=asked).headers.get(
        "access-control-allow-origin"
    )


def test_pages_of_this_machine_may_ask_and_others_not(server: Server) -> None:
    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:80"):
        assert preflight(server, origin) == origin
    for origin in ("http://example.com", "http://localhost.example.com", "null"):
        assert preflight(server, origin) is None


def test_a_preflight_needs_no_key_and_a_refusal_can_be_read(
    start_server: Callable[..., Server],
) -> None:
    settings = Settings(
        api_key="k", cors_origins="https://a.example,https://b.example", store="none"
    )
    server = wait_ready(start_server(settings))
    assert preflight(server, "https://b.example") == "https://b.example"
    assert preflight(server, "http://localhost:3000") is None
    answer = server.http.get("/v1/models", headers={"Origin": "https://a.example"})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("x-gzip", gzip.compress(BODY[:9], mtime=0) + gzip.compress(BODY[9:], mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
    ],
)
def test_a_compressed_body(server: Server, encoding: str, body: bytes) -> None:
    answer = server.http.post(
        "/v1/completions", content=body, headers={"Content-Encoding": encoding}
    )
    assert answer.json()["choices"][0]["text"] == "hello"


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("br", BODY, 415),
        ("gzip, gzip", BODY, 415),
        ("gzip", BODY, 400),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 400),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more", 400),
        ("gzip", gzip.compress(bytes(100 << 20), mtime=0), 413),
        ("gzip", gzip.compress(b"", mtime=0) * 40_000, 400),
    ],
)
def test_a_compressed_body_that_is_none_or_too_much(
    server: Server, encoding: str, body: bytes, status: int
) -> None:
    answer = server.http.post(
        "/v1/completions", content=body, headers={"Content-Encoding": encoding}
    )
    assert answer.status_code == status, answer.text
    assert encoding[:4] in answer.text or str(body_limit(CONTEXT)) in answer.text or status == 400


def test_localhost_is_both_of_its_families() -> None:
    socks = listen_all("localhost", 0)
    ports = {sock.getsockname()[1] for sock in socks}
    assert len(ports) == 1
    families = {sock.family for sock in socks}
    for sock in socks:
        sock.close()
    try:  # a machine may have no loopback of IPv6
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        assert families == {socket.AF_INET}
    else:
        assert families == {socket.AF_INET, socket.AF_INET6}


def test_a_port_in_use_in_one_family_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ListenError, match="in use"),
    ):
        listen_all("localhost", taken.getsockname()[1])


def test_a_stream_that_is_silent_says_that_it_lives(start_server: Callable[..., Server]) -> None:
    server = wait_ready(start_server(Settings(stream_heartbeat_s=1, store="none")))
    server.planner.hold()
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as client:
        client.sendall(sized(POST + b"Connection: close\r\n", STREAM))
        got = b""
        while got.count(b": still working\n\n") < 2:
            part = client.recv(1 << 16)
            assert part, got
            got += part
        assert b"data:" not in got and statuses(got) == [200]
        server.planner.allow(None)
        while part := client.recv(1 << 16):
            got += part
    assert b"[DONE]" in got
