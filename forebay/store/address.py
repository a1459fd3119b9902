"""Where things listen: ``HOST:PORT`` and Store URLs."""

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
        bare = text.removeprefix("forebay://").removeprefix("tcp://").rstrip("/")
        host, colon, port = bare.rpartition(":")
        if not colon and default_port is not None:
            host, port = bare, str(default_port)
        if not host or not port.isdecimal() or int(port) > 65535:
            raise AddressError(f"{text!r} is no address; write it as HOST:PORT, such as 127.0.0.1:7001")
        return cls(host.strip("[]"), int(port))


def parse_masters(url: str) -> list[Address]:
    """The masters of ``forebay://HOST:PORT[,HOST:PORT...]``. Raises ``AddressError``."""
    if not url.startswith("forebay://"):
        raise AddressError(f"{url!r} is no store of masters; write it as forebay://HOST:PORT")
    return [Address.parse(part) for part in url.removeprefix("forebay://").rstrip("/").split(",")]


def this_machine() -> str:
    """Equal for two processes that can share memory through a Unix socket: same boot, same network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").readlink()
    except OSError:
        return uuid.uuid4().hex
    return f"{boot}/{network}"
