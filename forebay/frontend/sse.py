"""Streaming over server-sent events: one `data:` line per chunk, `[DONE]` at the end.

The status line waits for the engine's first word, so that a refusal still has its own status; what goes wrong later is an error
event, after which the stream ends without `[DONE]`. A stream that is silent for `--stream-heartbeat-s` gets a comment line, which
clients skip and proxies count as life; before the first word it brings the status line with it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.frontend.disconnect import ClientGone, run_while_connected
from forebay.frontend.errors import as_api_error
from forebay.frontend.generation import Event, Generation, GenerationError
from forebay.frontend.sequence import Delta

_COMMENT = b": still working\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Chunks(Protocol):
    """How one endpoint words a stream."""

    def opening(self) -> Iterable[msgspec.Struct]: ...
    def delta(self, index: int, delta: Delta) -> Iterable[msgspec.Struct]: ...
    def closing(self) -> Iterable[msgspec.Struct]: ...


async def stream(
    request: Request, generation: Generation, chunks: Chunks, heartbeat_s: float
) -> Response:
    """The response that streams ``generation`` and closes it. Raises ``GenerationError`` and ``ClientGone`` before any byte."""
    events = generation.events()
    first = asyncio.ensure_future(_next(events))
    try:
        await run_while_connected(request.receive, _settled(first, heartbeat_s))
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        generation.close()
        raise
    return EventStream(generation, first, events, chunks, heartbeat_s)


class EventStream(Response):
    """``first``: the engine's first word, or the wait for it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        first: "asyncio.Future[list[Event]]",
        events: AsyncIterator[list[Event]],
        chunks: Chunks,
        heartbeat_s: float,
    ) -> None:
        self.background = None
        self.status_code = 200
        self.init_headers(_HEADERS)
        # Response.init_headers announces the length of a body; a stream has none.
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._generation = generation
        self._first = first
        self._events = events
        self._chunks = chunks
        self._heartbeat_s = heartbeat_s
        self._is_silent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation, contextlib.suppress(ClientGone):
            try:
                await run_while_connected(receive, self._send_all(send))
            finally:
                self._first.cancel()

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        if not self._heartbeat_s:
            await self._send_events(send)
            return
        heart = asyncio.ensure_future(self._beat(send, not self._first.done()))
        try:
            await self._send_events(send)
        finally:
            heart.cancel()

    async def _send_events(self, send: Send) -> None:
        try:
            first = await self._first
            await send(_body([*map(_data, self._chunks.opening()), *self._lines(first)]))
            async for events in self._events:
                self._is_silent = False
                await send(_body(self._lines(events)))
            await send(
                _body([*map(_data, self._chunks.closing()), b"data: [DONE]\n\n"], more=False)
            )
        except GenerationError as error:
            await send(_body([b"data: ", as_api_error(error).body, b"\n\n"], more=False))

    async def _beat(self, send: Send, at_once: bool) -> None:
        """A comment whenever nothing was sent since the last look; a reader that takes nothing gets none either."""
        if at_once:
            await send(_body([_COMMENT]))
        while True:
            self._is_silent = True
            await asyncio.sleep(self._heartbeat_s)
            if self._is_silent:
                await send(_body([_COMMENT]))

    def _lines(self, events: list[Event]) -> list[bytes]:
        return [
            _data(chunk) for index, delta in events for chunk in self._chunks.delta(index, delta)
        ]


async def _settled(first: "asyncio.Future[list[Event]]", patience_s: float) -> None:
    """Until ``first`` is there, or for so long; 0 for ever."""
    await asyncio.wait((first,), timeout=patience_s or None)


async def _next(events: AsyncIterator[list[Event]]) -> list[Event]:
    return await anext(events)


def _data(chunk: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _body(lines: list[bytes], more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"".join(lines), "more_body": more}
