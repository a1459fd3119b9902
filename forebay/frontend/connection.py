"""One client's HTTP/1 connection: llhttp reads it (by httptools), within bounds; errors before there is a request have the API's form.

    connected --> head (`HEAD_S`, `HEAD_BYTES_MAX`) --> body (`limits.read_body`) --> answer --> idle (`keep_alive_s`) --> head ...
                    '-- too slow: 408    too large: 431    no HTTP: 400 --> half closed, `DROP_S`, closed

Requests that come before the answer to an earlier one wait in a queue, so answers go out in the order of their requests. What is
wrong with a later request is said in its place.

An offer to upgrade (to HTTP/2, to WebSocket) is not taken, and so changes nothing: the request is read once more without it, by a
parser that then knows whose the body is.

A body that nobody reads any more, since the answer did not need it, has `DROP_S` to come to its end. After the last answer of a
connection only our half is closed, and what still comes is dropped for as long: closing with bytes unread would reset the
connection, and take the answer with it. A client that takes
nothing of what is sent to it is left to the kernel (`server.listen`).
"""

import asyncio
import logging
import urllib.parse
from collections import deque
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from forebay.frontend.errors import ApiError
from forebay.frontend.exchange import Exchange, Header, head

HEAD_BYTES_MAX = 64 << 10
HEAD_S = 10.0
DROP_S = 5.0
QUEUE_MAX = 32  # requests that wait behind an answer; a client that sends more is read on later
# Headers of an offer that is not taken.
_OFFER = (b"upgrade", b"http2-settings")


class Connection(asyncio.Protocol):
    """As `uvicorn.Server` makes and ends it. Between two requests, and before the first, it counts as in a head; a head's time runs
    from its first byte."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._app = config.loaded_app
        self._idle_s = config.timeout_keep_alive
        self._server = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: list[Header] = []
        self._in_head = True
        self._head_bytes = 0
        self._is_deaf = False  # what comes from now on is dropped
        self._arriving: Exchange | None = None
        self._active: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._last_word: ApiError | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._is_paused = False
        self._is_ending = False

    # ------------------------------------------------------------------------------------------ asyncio's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._server.connections.add(self)  # type: ignore[arg-type]
        self._start_clock(self._idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._server.connections.discard(self)
        self._is_deaf = True
        for exchange in (self._active, self._arriving, *self._queue):
            if exchange is not None:
                exchange.lose()
        self._queue.clear()
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._in_head:
            if not self._head_bytes:
                self._start_clock(HEAD_S)
            self._head_bytes += len(data)
        self._parse(data)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX and not self._is_deaf:
            self._refuse_head()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def shutdown(self) -> None:
        """The server ends: no request more than the one that is being answered, and no waiting for the client."""
        self._is_ending = True
        if self._active is None:
            self._transport.close()
        else:
            self._active.keep_alive = False

    # ------------------------------------------------------------------------------------------ what exchanges need

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def drain(self) -> None:
        await self._can_write.wait()

    def pause_reading(self) -> None:
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        has_room = len(self._queue) < QUEUE_MAX
        if self._is_paused and has_room and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def default_headers(self) -> list[Header]:
        return self._server.default_headers

    # ------------------------------------------------------------------------------------------ the parser's calls

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._is_deaf:
            return
        if self._parser.should_upgrade():
            return  # `_parse` has the rest
        self._in_head = False
        self._stop_clock()
        size = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
        if size > HEAD_BYTES_MAX:
            self._refuse_head()
        elif (wrong := self._ambiguity()) is not None:
            self._refuse(400, wrong)
        else:
            self._begin(self._scope())

    def _ambiguity(self) -> str | None:
        """What a server before this one may have read otherwise (RFC 9112, 3.2 and 6.1), beyond what the parser refuses."""
        codings = [value.strip() for name, value in self._headers if name == b"transfer-encoding"]
        if codings and self._parser.get_http_version() != "1.1":
            return "Transfer-Encoding goes with HTTP/1.1; send the body with its Content-Length"
        if codings and [coding.lower() for coding in codings] != [b"chunked"]:
            return f"Transfer-Encoding is {codings[0][:40]!r}; allowed: chunked"
        if sum(name == b"host" for name, _ in self._headers) > 1:
            return "the request has several Host headers; allowed: one"
        return None

    def on_body(self, body: bytes) -> None:
        if not self._is_deaf and self._arriving is not None:
            self._arriving.feed(body)

    def on_message_complete(self) -> None:
        arrived, self._arriving = self._arriving, None
        if self._is_deaf or arrived is None:
            return
        arrived.end_of_request()
        self._in_head, self._head_bytes = True, 0
        if not arrived.keep_alive:
            self._is_deaf = True  # nothing that follows is a request
        if self._active is None:  # it was answered before it had come to its end
            self._start_clock(self._idle_s)

    # ------------------------------------------------------------------------------------------ requests

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = self._without_offer() + data[offer.args[0] :]
                if not data:
                    return
                continue
            except httptools.HttpParserError:
                if not self._is_deaf:
                    self._refuse(400, "what was sent is not valid HTTP/1.1")
            return

    def _without_offer(self) -> bytes:
        """The head that has just been read, for a new parser, without what would end HTTP/1; empty for what is refused."""
        method, version = self._parser.get_method(), self._parser.get_http_version()
        lines = [b"%s %s HTTP/%s" % (method, self._url, version.encode())]
        lines += [name + b": " + value for name, value in self._headers if name not in _OFFER]
        if method == b"CONNECT" or any(b"\r" in line or b"\n" in line for line in lines):
            self._refuse(400, f"{method.decode()} as it was sent is not taken here")
            return b""
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _scope(self) -> dict[str, Any]:
        """Raises whatever is wrong with the URL, which the parser then counts as no HTTP."""
        is_star = self._url == b"*"  # of OPTIONS
        url = None if is_star else httptools.parse_url(self._url)
        raw = b"*" if url is None else url.path
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": urllib.parse.unquote(raw.decode("ascii")),
            "raw_path": raw,
            "query_string": (url and url.query) or b"",
            "root_path": "",
            "headers": self._headers,
            "client": self._transport.get_extra_info("peername", (None,))[:2],
            "server": self._transport.get_extra_info("sockname", (None,))[:2],
            "state": {},
        }

    def _begin(self, scope: dict[str, Any]) -> None:
        expects_100 = any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in self._headers
        )
        exchange = Exchange(
            self, scope, self._parser.should_keep_alive(), expects_100, self._on_answered
        )
        self._arriving = exchange
        if self._active is None:
            self._run(exchange)
        else:
            self._queue.append(exchange)
            if len(self._queue) >= QUEUE_MAX:
                self.pause_reading()

    def _run(self, exchange: Exchange) -> None:
        self._active = exchange
        task = self._loop.create_task(self._answer(exchange))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _answer(self, exchange: Exchange) -> None:
        """The application's errors are its own to answer (`errors.install`); one that it could not answer ends the connection."""
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except Exception:
            logging.getLogger("forebay.http").exception("while a request was answered")
        finally:
            if not exchange.is_answered and not exchange.is_gone:
                self._transport.close()

    def _on_answered(self, exchange: Exchange) -> None:
        self._server.total_requests += 1
        self._active = None
        if self._transport.is_closing():
            return
        if not exchange.keep_alive:
            self._end()
            return
        if self._queue:
            self._run(self._queue.popleft())
            self.resume_reading()
            return
        self.resume_reading()
        if self._last_word is not None:
            self._say(self._last_word)
        elif not exchange.is_received:
            self._start_clock(DROP_S)
        elif not self._head_bytes:
            self._start_clock(self._idle_s)
        else:  # a head has begun meanwhile; its time was not the client's to keep
            self._start_clock(HEAD_S)

    # ------------------------------------------------------------------------------------------ ends

    def _end(self) -> None:
        """The last answer of this connection is given. What still comes is dropped."""
        self._is_deaf = True
        for exchange in self._queue:
            exchange.lose()
        self._queue.clear()
        if self._is_ending:
            self._transport.close()
        else:
            self._half_close()

    def _half_close(self) -> None:
        self._transport.write_eof()
        self.resume_reading()
        self._start_clock(DROP_S)

    def _refuse_head(self) -> None:
        self._refuse(431, f"the request's line and headers are larger than {HEAD_BYTES_MAX} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """The last word on this connection, in the place of the request that is wrong; in the middle of its answer there is none."""
        self._is_deaf = True
        self._stop_clock()
        word = ApiError(status, message)
        wrong, self._arriving = self._arriving, None
        if wrong is not None and wrong is self._active:
            wrong.lose()
            self._active = None
            if wrong.is_started:
                self._transport.close()
                return
        elif wrong is not None and wrong in self._queue:
            self._queue.remove(wrong)
        if self._active is None:
            self._say(word)
        else:
            self._last_word = word

    def _say(self, word: ApiError) -> None:
        if self._transport.is_closing():
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(word.body)),
            (b"connection", b"close"),
        ]
        self._transport.write(head(word.status, [*self.default_headers(), *headers]) + word.body)
        self._half_close()

    # ------------------------------------------------------------------------------------------ the clock

    def _start_clock(self, seconds: float) -> None:
        self._stop_clock()
        self._clock = self._loop.call_later(seconds, self._on_late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _on_late(self) -> None:
        self._clock = None
        if self._active is not None and not self._is_deaf:
            return  # of a request that came too early; `_on_answered` starts its time
        if self._in_head and self._head_bytes and not self._is_deaf:
            self._refuse(408, f"the request's head did not arrive within {HEAD_S:.0f} s")
        else:
            self._transport.close()
