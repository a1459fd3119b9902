"""One client's HTTP connection: uvicorn's protocol within bounds, and errors before there is a request in the API's own form.

    connected --> head (`HEAD_S`, `HEAD_BYTES_MAX`) --> body (`limits.read_body`) --> response --> idle (`IDLE_S`) --> head ...
                    '-- too slow: 408    too large: 431    no HTTP: 400 --> half closed, `IDLE_S`, closed

A body that nobody reads any more, since the answer did not need it, has the idle time to come to its end, also where the answer is
the last of its connection: closing with bytes unread would reset the connection, and take the answer with it. A client that takes
nothing of what is sent to it is left to the kernel (`server.listen`).
"""

import asyncio
import http

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from forebay.frontend.errors import ApiError

HEAD_BYTES_MAX = 64 << 10
HEAD_S = 10.0
IDLE_S = 5


class Connection(HttpToolsProtocol):
    """Between two requests, and before the first, it counts as in a head; its time runs from the head's first byte."""

    _in_head = True
    _head_bytes = 0
    _late: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive = IDLE_S
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._in_head:
            self._start_clock()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
            self._refuse_head()

    def on_message_begin(self) -> None:
        self._start_clock()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_clock()
        head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if head_bytes > HEAD_BYTES_MAX:
            self._refuse_head()
        else:
            super().on_headers_complete()
            self.cycle.transport = _AnswerTransport(self)

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()
            self._in_head, self._head_bytes = True, 0

    def end_answer(self) -> None:
        """The last answer of this connection is given, or cannot be. What still comes of a body is dropped."""
        if self._in_head or not self.cycle.response_complete or self.transport.is_closing():
            self.transport.close()
        else:  # from here on the idle time runs
            self._is_refused = True
            self.transport.write_eof()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "what was sent is not valid HTTP/1.1")

    def _unset_keepalive_if_required(self) -> None:
        if self._in_head:  # the rest of a body that nobody reads is no new request
            super()._unset_keepalive_if_required()

    def _start_clock(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._on_late)

    def _stop_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _on_late(self) -> None:
        self._late = None
        if (
            self._is_answering
        ):  # of a request that came too early; its time is not the client's to keep
            self._start_clock()
        elif self._head_bytes:
            self._refuse(408, f"the request's head did not arrive within {HEAD_S:.0f} s")
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        self._refuse(431, f"the request's line and headers are larger than {HEAD_BYTES_MAX} bytes")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """The last word on this connection; in the middle of an answer there is none."""
        self._is_refused = True
        self._stop_clock()
        if self.transport.is_closing():
            return
        if self._is_answering and self.cycle.response_started:
            self.transport.close()
            return
        if self._is_answering:  # whoever works on the answer has nobody to give it to
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = ApiError(status, message).body
        lines = [
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        ]
        self.transport.write(
            STATUS_LINE[http.HTTPStatus(status)] + b"\r\n".join(lines) + b"\r\n\r\n" + body
        )
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(IDLE_S, self.transport.close)


class _AnswerTransport(asyncio.Transport):
    """What an answer is written to: its connection, which knows better when to close."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.end_answer()
