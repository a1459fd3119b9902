"""Bounds on what a request may bring, and reading a body within them."""

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request

from forebay.frontend.disconnect import ClientGone, Receive
from forebay.frontend.errors import ApiError

MAX_BODY_BYTES = 32 << 20
MIN_BODY_BYTES = 1 << 20
BYTES_PER_CONTEXT_TOKEN = 256
MAX_PROMPTS = 128
BODY_TIMEOUT_S = 60.0


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
    return bytes(body)


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
