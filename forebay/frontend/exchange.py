"""One request of a connection and its answer, as ASGI's two calls see them.

    connection --body--> receive() --> application --> send() --> answer, framed by length, in chunks, or by the connection's end

HTTP/1.0 knows no chunks: an answer of unknown length ends there with its connection. HEAD has the head of GET's answer alone.
"""

import asyncio
import http
from collections.abc import Callable, MutableMapping
from enum import Enum, auto
from typing import Any, Protocol

BODY_WAITING_MAX = 64 << 10

Message = MutableMapping[str, Any]
Header = tuple[bytes, bytes]
_REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_EMPTY = (204, 304)


class Framing(Enum):
    LENGTH = auto()
    CHUNKS = auto()
    CLOSE = auto()
    NONE = auto()  # a head alone


class Wire(Protocol):
    """What an exchange needs of its connection."""

    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def default_headers(self) -> list[Header]: ...


def head(status: int, headers: list[Header]) -> bytes:
    """A status line and headers, which must hold no line breaks. Raises ``ValueError``."""
    lines = [b"HTTP/1.1 %d %s" % (status, _REASONS.get(status, b""))]
    lines += [name + b": " + value for name, value in headers]
    text = b"\r\n".join(lines)
    if text.count(b"\n") != len(headers) or b"\0" in text:
        raise ValueError("a header of the answer has a line break in it")
    return text + b"\r\n\r\n"


class Exchange:
    """``keep_alive``: whether the connection goes on after the answer. ``is_received``: the request is there to its end.
    ``is_gone``: nobody is left to answer."""

    def __init__(
        self,
        wire: Wire,
        scope: Message,
        keep_alive: bool,
        expects_100: bool,
        on_answered: Callable[["Exchange"], None],
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.is_received = False
        self.is_started = False
        self.is_answered = False
        self.is_gone = False
        self._wire = wire
        self._expects_100 = expects_100
        self._on_answered = on_answered
        self._body = bytearray()
        self._changed = asyncio.Event()
        self._framing = Framing.NONE
        self._bytes_left = 0

    # ------------------------------------------------------------------------------------------ from the connection

    def feed(self, body: bytes) -> None:
        if self.is_answered or self.is_gone:  # nobody reads it any more
            return
        self._body += body
        if len(self._body) > BODY_WAITING_MAX:
            self._wire.pause_reading()
        self._changed.set()

    def end_of_request(self) -> None:
        self.is_received = True
        self._changed.set()

    def lose(self) -> None:
        """The client is gone, or has no right to an answer any more."""
        self.is_gone = True
        self._changed.set()

    # ------------------------------------------------------------------------------------------ ASGI

    async def receive(self) -> Message:
        if self._expects_100 and not self.is_started and not self.is_gone:
            self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_100 = False
        if not (self.is_gone or self.is_answered):
            self._wire.resume_reading()
            await self._changed.wait()
            self._changed.clear()
        if self.is_gone or self.is_answered:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.is_received}

    async def send(self, message: Message) -> None:
        if not self.is_gone:
            await self._wire.drain()
        if self.is_gone:
            return
        if message["type"] == "http.response.start":
            assert not self.is_started
            self._start(message["status"], list(message["headers"]))
        else:
            assert self.is_started and not self.is_answered, message["type"]
            self._write(message.get("body", b""), message.get("more_body", False))

    def _start(self, status: int, headers: list[Header]) -> None:
        self.is_started = True
        self._expects_100 = False
        said = {name.lower(): value for name, value in headers}
        headers = [*self._wire.default_headers(), *headers]
        self._framing = self._choose_framing(status, said)
        if self._framing is Framing.CHUNKS:
            headers.append((b"transfer-encoding", b"chunked"))
        if self._framing is Framing.CLOSE or said.get(b"connection", b"").lower() == b"close":
            self.keep_alive = False
        if b"connection" not in said:
            if not self.keep_alive:
                headers.append((b"connection", b"close"))
            elif self.scope["http_version"] == "1.0":
                headers.append((b"connection", b"keep-alive"))
        self._wire.write(head(status, headers))

    def _choose_framing(self, status: int, said: dict[bytes, bytes]) -> Framing:
        if self.scope["method"] == "HEAD" or status in _EMPTY:
            return Framing.NONE
        if b"content-length" in said:
            self._bytes_left = int(said[b"content-length"])
            return Framing.LENGTH
        return Framing.CLOSE if self.scope["http_version"] == "1.0" else Framing.CHUNKS

    def _write(self, body: bytes, more: bool) -> None:
        match self._framing:
            case Framing.LENGTH:
                self._bytes_left -= len(body)
                assert self._bytes_left >= 0 and (more or not self._bytes_left), self._bytes_left
            case Framing.CHUNKS:
                body = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
                body += b"" if more else b"0\r\n\r\n"
            case Framing.NONE:
                body = b""
            case Framing.CLOSE:
                pass
        if body:
            self._wire.write(body)
        if not more:
            self.is_answered = True
            self._changed.set()
            self._on_answered(self)
