"""The API key: a bearer token that every request must carry, except the probes that a supervisor sends."""

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.frontend.errors import ApiError

OPEN_PATHS = ("/health", "/ready")


class RequireKey:
    """ASGI middleware in front of everything, so that an unknown route or a large body is not even looked at without the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        await ApiError(401, message, code="invalid_api_key", headers=headers).response()(
            scope, receive, send
        )

    def _has_key(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                given = token.strip() if scheme.lower() == b"bearer" else b""
        # Digests have one length, and comparing them takes the same time wherever they differ.
        return hmac.compare_digest(_digest(given), self._digest)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
