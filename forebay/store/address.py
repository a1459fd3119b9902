"""Where things listen: ``HOST:PORT`` and Store URLs."""

import re
import uuid
from dataclasses import dataclass
from pathlib import Path


class AddressError(ValueError):
    """One line: what was given, what is allowed."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str, default_port: int | None = None) -> "Address":
        """``host:port``, ``[v6]:port``, with or without ``forebay://`` in front. Raises ``AddressError``."""
        bare = (
            text.removeprefix("forebay://")
            .removeprefix("forebay+tls://")
            .removeprefix("tcp://")
            .rstrip("/")
        )
        host, colon, port = bare.rpartition(":")
        if not colon and default_port is not None:
            host, port = bare, str(default_port)
        if not host or not port.isdecimal() or int(port) > 65535:
            raise AddressError(
                f"{text!r} is no address; write it as HOST:PORT, such as 127.0.0.1:7001"
            )
        return cls(host.strip("[]"), int(port))


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """``forebay://HOST:PORT[,HOST:PORT...]``: where the masters are. ``forebay+tls://...[?ca=FILE]``: the same over TLS, trusting the
    certificates in FILE instead of the machine's authorities."""

    masters: tuple[Address, ...]
    tls: bool = False
    ca: Path | None = None

    @classmethod
    def parse(cls, url: str, default_port: int | None = None) -> "StoreUrl":
        """Raises ``AddressError``."""
        where, _, query = url.partition("?")
        scheme, found, places = where.partition("://")
        if not found or scheme not in ("forebay", "forebay+tls"):
            raise AddressError(
                f"{url!r} is no store of masters; write it as forebay://HOST:PORT or forebay+tls://HOST:PORT"
            )
        name, _, ca = query.partition("=")
        if query and (scheme != "forebay+tls" or name != "ca" or not ca):
            raise AddressError(
                f"{url!r}: unknown option {query!r}; only ca=FILE, of forebay+tls://, is known"
            )
        masters = tuple(Address.parse(part, default_port) for part in places.rstrip("/").split(","))
        if len(set(masters)) < len(masters):
            raise AddressError(f"{url!r} names a master twice")
        return cls(masters, scheme == "forebay+tls", Path(ca) if ca else None)

    def each(self) -> dict[str, str]:
        """A URL for every master alone, by its address."""
        scheme, ca = "forebay+tls" if self.tls else "forebay", f"?ca={self.ca}" if self.ca else ""
        return {str(master): f"{scheme}://{master}{ca}" for master in self.masters}


def shown(url: str) -> str:
    """``url`` as it may be shown to people: without its password."""
    return re.sub(r"(?<=://)([^/?#@]*):[^/?#]*@", r"\1:***@", url)


def this_machine() -> str:
    """Equal for two processes that can share memory through a Unix socket: same boot, same network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").readlink()
    except OSError:
        return uuid.uuid4().hex
    return f"{boot}/{network}"
