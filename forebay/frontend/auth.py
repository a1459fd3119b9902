"""Who asks: API keys as bearer tokens, the operator's key, and whose cached prefixes a caller shares.

Every request must carry a key where keys are set, except the probes that a supervisor sends. Where an operator's key is set, the
routes that change or show the whole server take that alone.
"""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.frontend.errors import ApiError
from forebay.settings import Settings, listed

OPEN_PATHS = ("/health", "/ready")
ADMIN_PATHS = ("/cache/flush", "/flush_cache", "/timeline")
ADMIN_PREFIX = "/admin/"

Headers = Iterable[tuple[bytes, bytes]]


class Keys:
    """The keys of one server, as digests: these have one length, and comparing them takes the same time wherever they differ."""

    def __init__(self, settings: Settings) -> None:
        keys = listed(settings.api_key) if settings.api_key is not None else ()
        self._keys = [_digest(key.encode()) for key in keys]
        admin = settings.admin_key
        self._admin = None if admin is None else _digest(admin.encode())

    @property
    def are_set(self) -> bool:
        return bool(self._keys) or self._admin is not None

    def operates(self, headers: Headers) -> bool:
        """Whether a request carries the operator's key."""
        return self._admin is not None and self._is_admin(_digest(bearer(headers)))

    def allow(self, path: str, headers: Headers) -> bool:
        if path in OPEN_PATHS:
            return True
        given = _digest(bearer(headers))
        if self._admin is not None and self._is_admin(given):
            return True
        if self._admin is not None and (path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX)):
            return False
        # All are compared, so that the time does not tell which one it was.
        return not self._keys or any([hmac.compare_digest(given, key) for key in self._keys])

    def _is_admin(self, given: bytes) -> bool:
        assert self._admin is not None
        return hmac.compare_digest(given, self._admin)


class RequireKey:
    """ASGI middleware in front of everything, so that an unknown route or a large body is not even looked at without the key."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._keys.allow(scope["path"], scope["headers"]):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        await ApiError(401, message, code="invalid_api_key", headers=headers).response()(
            scope, receive, send
        )


def bearer(headers: Headers) -> bytes:
    """The bearer token of the last Authorization header; empty for none."""
    given = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            given = token.strip() if scheme.lower() == b"bearer" else b""
    return given


def salt(salt_from: str, headers: Headers, asked: bytes) -> bytes:
    """What a request's cached prefixes are kept apart by: the caller's share of it, and ``asked`` by the request itself.

    ``salt_from``: none, key or header:NAME. Raises ``ApiError`` (400) for a request without the header.
    """
    if salt_from == "none":
        return asked
    if salt_from == "key":
        whose = bearer(headers)
    else:
        wanted = salt_from.removeprefix("header:").lower()
        found = [value for name, value in headers if name == wanted.encode()]
        if len(found) != 1 or not found[0]:
            message = f"the header {wanted} is missing or not single; cached prefixes are kept apart by it"
            raise ApiError(400, message, code="missing_header")
        whose = found[0]
    return hashlib.blake2b(
        hashlib.sha256(whose).digest() + asked, digest_size=16, person=b"forebay-salt"
    ).digest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
