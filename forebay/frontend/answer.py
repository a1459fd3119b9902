"""The end of every request for text: its Generation as one body or as a stream, in the words of its endpoint."""

from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.frontend.disconnect import run_while_connected
from forebay.frontend.generation import Generation
from forebay.frontend.responses import json_body
from forebay.frontend.sse import Chunks, stream


class Wording(Chunks, Protocol):
    """How one endpoint words an answer."""

    async def whole(self) -> msgspec.Struct: ...


async def answer(
    request: Request,
    generation: Generation,
    wording: Wording,
    streamed: bool,
    heartbeat_s: float = 0.0,
) -> Response:
    """The response, which closes ``generation``. Raises ``GenerationError`` and ``ClientGone`` before any byte."""
    if streamed:
        return await stream(request, generation, wording, heartbeat_s)
    with generation:
        whole = await run_while_connected(request.receive, wording.whole())
    return Response(json_body(whole), media_type="application/json")
