"""Who is on the other end: an HMAC challenge over a shared secret, which also binds the tenant.

    server -> Challenge(n)      peer -> Hello(role, tenant, m, HMAC(secret of tenant, "peer" n m role tenant))
    server -> Welcome(HMAC(secret, "server" m n), ...)         or Refused(reason), and the connection ends

Comparison is constant time. An unknown tenant is checked against a random secret, so it takes as long as a wrong one and is told the
same. Without secrets everybody is who they say, as on a machine or network that only friends reach.
"""

import hashlib
import hmac
import secrets
import struct
from pathlib import Path

from forebay.store.wire.messages import MAX_TENANT_CHARS, Challenge, Hello, Role, Welcome

NONCE_BYTES = 16
HOLDER_TENANT = "@holder"
DEFAULT_TENANT = "default"


class AuthError(Exception):
    """This peer is not who it says. The text may be shown to it."""


class SecretFileError(ValueError):
    """One line: what the file says, what is allowed."""


class Secrets:
    """Tenant -> secret. Empty: no authentication."""

    def __init__(self, by_tenant: dict[str, bytes] | None = None) -> None:
        self._by_tenant = dict(by_tenant or {})
        self._decoy = secrets.token_bytes(32)

    def __bool__(self) -> bool:
        return bool(self._by_tenant)

    @property
    def tenants(self) -> int:
        """How many tenants of clients there are; 0 without authentication."""
        return sum(not name.startswith("@") for name in self._by_tenant)

    def of(self, tenant: str) -> bytes:
        """The secret of ``tenant``; of an unknown one, something nobody knows. Empty without authentication."""
        if not self._by_tenant:
            return b""
        return self._by_tenant.get(tenant, self._decoy)

    @classmethod
    def read(cls, path: Path) -> "Secrets":
        """A file of lines ``TENANT SECRET``; ``@holder SECRET`` is what holders prove themselves with. A single line with a secret
        alone serves the tenant ``default`` and holders both. Raises ``SecretFileError``."""
        try:
            lines = [
                line.split()
                for line in path.read_text().splitlines()
                if line.strip() and not line.startswith("#")
            ]
        except (OSError, UnicodeDecodeError) as error:
            raise SecretFileError(f"secret file {path}: {error}") from error
        if len(lines) == 1 and len(lines[0]) == 1:
            secret = lines[0][0].encode()
            return cls({DEFAULT_TENANT: secret, HOLDER_TENANT: secret})
        if not lines or any(len(line) != 2 or len(line[0]) > MAX_TENANT_CHARS for line in lines):
            raise SecretFileError(
                f"secret file {path}: every line is 'TENANT SECRET', or the whole file one secret"
            )
        return cls({name: secret.encode() for name, secret in lines})


def challenge() -> Challenge:
    return Challenge(secrets.token_bytes(NONCE_BYTES))


def hello(given: Challenge, role: Role, tenant: str, secret: bytes) -> Hello:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return Hello(role, tenant, nonce, _peer_mac(secret, given.nonce, nonce, role, tenant))


def verify_hello(given: Challenge, answer: Hello, known: Secrets) -> None:
    """Raises ``AuthError``."""
    if not 0 < len(answer.tenant) <= MAX_TENANT_CHARS or len(answer.nonce) != NONCE_BYTES:
        raise AuthError("malformed hello")
    if (answer.tenant == HOLDER_TENANT) != (answer.role is Role.HOLDER):
        raise AuthError("this tenant cannot have this role")
    if known:
        wanted = _peer_mac(
            known.of(answer.tenant), given.nonce, answer.nonce, answer.role, answer.tenant
        )
        if not hmac.compare_digest(wanted, answer.mac):
            raise AuthError("wrong tenant or secret")


def welcome(
    given: Challenge, answer: Hello, known: Secrets, epoch: int, segment_bytes: int = 0
) -> Welcome:
    return Welcome(
        _server_mac(known.of(answer.tenant), given.nonce, answer.nonce), epoch, segment_bytes
    )


def verify_welcome(given: Challenge, sent: Hello, answer: Welcome, secret: bytes) -> None:
    """Raises ``AuthError`` if we have a secret and the server does not know it."""
    if secret and not hmac.compare_digest(_server_mac(secret, given.nonce, sent.nonce), answer.mac):
        raise AuthError("the server does not know our secret")


def _peer_mac(secret: bytes, server_nonce: bytes, nonce: bytes, role: Role, tenant: str) -> bytes:
    name = tenant.encode()
    message = b"peer" + server_nonce + nonce + struct.pack("<BI", role, len(name)) + name
    return hmac.new(secret or b"\0", message, hashlib.sha256).digest()


def _server_mac(secret: bytes, server_nonce: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret or b"\0", b"server" + nonce + server_nonce, hashlib.sha256).digest()
