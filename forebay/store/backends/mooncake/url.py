"""Where a Mooncake cluster is: ``mooncake://MASTER:PORT[?segment=SIZE&host=ADDRESS&protocol=tcp|rdma&devices=NAMES&metadata=URL]``.

``segment``: memory that this server gives to the cluster (its planner's process has it, not each rank); 0: it is a
client alone. ``host``: our own address, as other clients reach it; by default the one on the route to the master.
"""

import re
import socket
from dataclasses import dataclass, replace
from typing import ClassVar
from urllib.parse import parse_qsl

from forebay.store.address import Address, AddressError

_SHIFTS = {None: 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}
_OPTIONS = (
    "segment=SIZE, host=ADDRESS, protocol=tcp or rdma, devices=NAMES, metadata=URL, metrics=PORT"
)


@dataclass(frozen=True, slots=True)
class MooncakeUrl:
    master: Address
    segment_bytes: int = 0
    host: str = ""
    protocol: str = "tcp"
    devices: str = ""
    metadata: str = "P2PHANDSHAKE"
    metrics_port: int = 9003

    SCHEME: ClassVar[str] = "mooncake://"

    @classmethod
    def parse(cls, url: str) -> "MooncakeUrl":
        """Raises ``AddressError``."""
        where, _, query = url.removeprefix(cls.SCHEME).partition("?")
        found = cls(Address.parse(where, 50051))
        for name, value in parse_qsl(query, keep_blank_values=True):
            found = found._with(name, value)
        return found

    @property
    def own_host(self) -> str:
        """Raises ``OSError`` if there is no route to the master."""
        if self.host:
            return self.host
        family, _, _, _, place = socket.getaddrinfo(self.master.host, self.master.port)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])

    def _with(self, name: str, value: str) -> "MooncakeUrl":
        match name:
            case "segment" if size := re.fullmatch(r"(\d+)([KMGT]i)?B?", value):
                return replace(self, segment_bytes=int(size[1]) << _SHIFTS[size[2]])
            case "protocol" if value in ("tcp", "rdma"):
                return replace(self, protocol=value)
            case "metrics" if value.isdecimal():
                return replace(self, metrics_port=int(value))
            case "host" if value:
                return replace(self, host=value)
            case "devices" if value:
                return replace(self, devices=value)
            case "metadata" if value:
                return replace(self, metadata=value)
        raise AddressError(f"store option {name}={value!r}; allowed: {_OPTIONS}")
