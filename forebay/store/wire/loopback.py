"""TCP between two processes of one machine.

A congestion control that paces what it sends (BBR, a common default) does so by a timer, which on the loopback device has nothing to
spare and halves the throughput (docs/LOG.md). Connections to elsewhere keep what the machine's administrator chose.
"""

import contextlib
import socket
from typing import Any, Protocol

UNPACED = (
    "cubic",
    "reno",
)  # the first that this process may choose; reno is always among those it may


class Connected(Protocol):
    """A socket, or what asyncio shows of one."""

    @property
    def family(self) -> int: ...
    def getpeername(self) -> Any: ...
    def getsockname(self) -> Any: ...
    def setsockopt(self, level: int, name: int, value: bytes, /) -> None: ...


def send_unpaced(connected: Connected | None) -> bool:
    """Choose one of ``UNPACED`` if both ends have one address, and so are on one machine; whether that was done. None (a transport
    that is no socket's) has none."""
    if connected is None or connected.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    with contextlib.suppress(OSError):  # not connected any more
        if connected.getpeername()[0] != connected.getsockname()[0]:
            return False
        for name in UNPACED:
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
                return True
    return False
