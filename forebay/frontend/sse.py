"""Streaming over server-sent events: one `data:` line per chunk, `[DONE]` at the end.

The status line waits for the engine's first word, so that a refusal still has its own status; what goes wrong later is an error
event, after which the stream ends without `[DONE]`.
"""

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

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Chunks(Protocol):
    """How one endpoint words a stream."""

    def opening(self) -> Iterable[msgspec.Struct]: ...
    def delta(self, index: int, delta: Delta) -> Iterable[msgspec.Struct]: ...
    def closing(self) -> Iterable[msgspec.Struct]: ...


async def stream(request: Request, generation: Generation, chunks: Chunks) -> Response:
    """The response that streams ``generation`` and closes it. Raises ``GenerationError`` and ``ClientGone`` before any byte."""
    events = generation.events()
    try:
        first = await run_while_connected(request.receive, _next(events))
    except BaseException:
        generation.close()
        raise
    return EventStream(generation, first, events, chunks)


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        first: list[Event],
        events: AsyncIterator[list[Event]],
        chunks: Chunks,
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation, contextlib.suppress(ClientGone):
            await run_while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            await send(_body([*map(_data, self._chunks.opening()), *self._lines(self._first)]))
            async for events in self._events:
                await send(_body(self._lines(events)))
            await send(
                _body([*map(_data, self._chunks.closing()), b"data: [DONE]\n\n"], more=False)
            )
        except GenerationError as error:
            await send(_body([b"data: ", as_api_error(error).body, b"\n\n"], more=False))

    def _lines(self, events: list[Event]) -> list[bytes]:
        return [
            _data(chunk) for index, delta in events for chunk in self._chunks.delta(index, delta)
        ]


async def _next(events: AsyncIterator[list[Event]]) -> list[Event]:
    return await anext(events)


def _data(chunk: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _body(lines: list[bytes], more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"".join(lines), "more_body": more}
