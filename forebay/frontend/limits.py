"""Bounds on what a request may bring, and reading a body within them."""

import asyncio
import zlib
from collections.abc import AsyncGenerator

from starlette.requests import Request

from forebay.frontend.disconnect import ClientGone, Receive
from forebay.frontend.errors import ApiError

MAX_BODY_BYTES = 32 << 20
MIN_BODY_BYTES = 1 << 20
BYTES_PER_CONTEXT_TOKEN = 256
MAX_PROMPTS = 128
BODY_TIMEOUT_S = 60.0
_EITHER = 32  # zlib then tells gzip from deflate by the header


def body_limit(max_context: int) -> int:
    """Bytes of the largest body that can make sense for a context of that many tokens, within fixed bounds."""
    return max(MIN_BODY_BYTES, min(MAX_BODY_BYTES, max_context * BYTES_PER_CONTEXT_TOKEN))


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The whole body. Raises ``ApiError``: 413 above ``bytes_max``, whether or not its length was announced, 408 if it stalls.

    The rest of what is refused is the connection's to drop.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > bytes_max:
        raise _too_large(f"{announced} bytes", bytes_max)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in _parts(request.receive):
                body += part
                if len(body) > bytes_max:
                    raise _too_large(f"more than {bytes_max} bytes", bytes_max)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s"
        raise ApiError(408, message, headers={"Connection": "close"}) from None
    return await _decoded(bytes(body), request.headers.get("content-encoding", ""), bytes_max)


async def _decoded(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """A body as it was before a client compressed it. Raises ``ApiError``: 413 above ``bytes_max``, 415 for another encoding."""
    kind = encoding.strip().lower()
    if kind in ("", "identity"):
        return body
    if kind not in ("gzip", "x-gzip", "deflate"):
        message = f"the Content-Encoding is {encoding[:40]!r}; allowed: gzip, deflate, identity"
        raise ApiError(415, message, headers={"Accept-Encoding": "gzip, deflate"})
    try:
        # A bomb costs as much time as the largest body that is allowed: that is not the loop's to spend.
        return await asyncio.to_thread(_inflated, body, bytes_max)
    except zlib.error as error:
        raise ApiError(400, f"the body is no {kind}: {error}") from None


def _inflated(body: bytes, bytes_max: int) -> bytes:
    """All members of a gzip or zlib body. Raises ``zlib.error`` for what is neither or not whole, ``ApiError`` (413)."""
    out = bytearray()
    while body:
        inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | _EITHER)
        out += inflater.decompress(body, bytes_max + 1 - len(out))
        if len(out) > bytes_max:
            raise _too_large(f"more than {bytes_max} bytes once decompressed", bytes_max)
        if not inflater.eof:
            raise zlib.error("it is not whole")
        body = inflater.unused_data
    return bytes(out)


async def _parts(receive: Receive) -> AsyncGenerator[bytes, None]:
    """Raises ``ClientGone``."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if body := message.get("body"):
            yield body
        if not message.get("more_body", False):
            return


def _too_large(got: str, bytes_max: int) -> ApiError:
    message = f"the body has {got}; at most {bytes_max} are allowed"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
