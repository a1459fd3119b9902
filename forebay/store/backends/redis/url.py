"""Where a Valkey or Redis server is: ``redis[s]://[USER[:PASSWORD]@]HOST[:PORT][/DB][?options]``, or ``valkey[s]://``.

``redis://:PASSWORD@HOST`` is the default user's. Options: ``ttl=SECONDS`` (0: pages stay until the server
evicts them), ``connections=N`` of each process and server, ``ca=FILE`` (of the TLS schemes).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

from forebay.store.address import Address, AddressError, shown

DEFAULT_PORT = 6379
DEFAULT_CONNECTIONS = 8
_TLS = ("rediss", "valkeys")
_FORM = "redis://USER:PASSWORD@HOST:PORT/DB?ttl=SECONDS&connections=N (valkey:// is the same)"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    address: Address
    db: int = 0
    user: str = ""
    password: str = ""
    is_tls: bool = False
    ca: Path | None = None
    ttl_s: int = 0
    connections: int = DEFAULT_CONNECTIONS

    SCHEMES: ClassVar[tuple[str, ...]] = ("redis://", "valkey://", "rediss://", "valkeys://")

    @classmethod
    def parse(cls, url: str) -> "RedisUrl":
        """Raises ``AddressError``, whose message has no password in it."""
        try:
            split = urlsplit(url)
            host, port = split.hostname, split.port or DEFAULT_PORT
        except ValueError:
            raise AddressError(f"the address of the store is none; write it as {_FORM}") from None
        db = split.path.strip("/")
        if not host or (db and not db.isdecimal()):
            raise AddressError(f"{shown(url)!r} names no server or database; write it as {_FORM}")
        found = cls(
            Address(host, port),
            int(db or 0),
            unquote(split.username or ""),
            unquote(split.password or ""),
            split.scheme in _TLS,
        )
        for name, value in parse_qsl(split.query, keep_blank_values=True):
            found = found._with(name, value)
        return found

    def _with(self, name: str, value: str) -> "RedisUrl":
        if name == "ca" and self.is_tls and value:
            return replace(self, ca=Path(value))
        if name == "ttl" and value.isdecimal():
            return replace(self, ttl_s=int(value))
        if name == "connections" and value.isdecimal() and 1 <= int(value) <= 64:
            return replace(self, connections=int(value))
        raise AddressError(
            f"store option {name}={value!r}; allowed: ttl=SECONDS, connections=1 to 64, "
            "and ca=FILE with rediss:// or valkeys://"
        )
