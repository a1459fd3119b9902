"""Mooncake's own client (PyPI ``mooncake-transfer-engine``), as much of it as we need.

Its calls take no time-out and may stand for half a minute (a stopped master: 30 s), so they are made on threads that
may be given up, with memory of those threads. Codes: Mooncake's `types.h` (0 and sizes are good, errors are negative).
"""

import importlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.store.backend import Status
from forebay.store.backends.call_threads import Scratch
from forebay.store.backends.mooncake.url import MooncakeUrl
from forebay.store.client.channel import Bytes

CONNECT_S = 2.0
LOCAL_BUFFER_BYTES = 16 << 20
_STATUSES = {
    -200: Status.NO_SPACE,  # no segment has room
    -600: Status.INVALID,
    -704: Status.NOT_FOUND,
    -703: Status.NOT_FOUND,  # a put is under way, or its replica is not complete
    -901: Status.TIMEOUT,
}


class Client:
    """One connection to a cluster. Calls block; any thread may make them."""

    def __init__(self, url: MooncakeUrl) -> None:
        """Raises ``OSError``: the package is missing, the master does not answer, or it refuses us."""
        host = url.own_host
        # Without this it would listen on every address of the machine. What the user has set stays.
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it says a dozen lines at each start
        try:
            module: Any = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise OSError(
                f"{error}; pip install 'forebay[mooncake]' (Debian: also libibverbs1)"
            ) from error
        # Its own attempt at a master that is not there takes a minute and a half.
        socket.create_connection((url.master.host, url.master.port), CONNECT_S).close()
        self._store = module.MooncakeDistributedStore()
        code = self._store.setup(
            host,
            url.metadata,
            url.segment_bytes,
            LOCAL_BUFFER_BYTES,
            url.protocol,
            url.devices,
            str(url.master),
        )
        if code:
            raise OSError(f"Mooncake's client cannot be set up (code {code})")

    def exist(self, names: Sequence[str]) -> list[int]:
        """1: there, 0: not, negative: not known."""
        return list(self._store.batch_is_exist(list(names)))

    def size(self, name: str) -> int:
        return int(self._store.get_size(name))

    def get(self, names: Sequence[str], regions: Sequence[Bytes]) -> list[int]:
        """Sizes of the values that were read into the regions (registered memory), or what went wrong."""
        addresses, sizes = _laid_out(regions)
        return list(self._store.batch_get_into(list(names), addresses, sizes))

    def put(self, names: Sequence[str], regions: Sequence[Bytes]) -> list[int]:
        """A name that is there already is 0, too, and keeps its value."""
        addresses, sizes = _laid_out(regions)
        return list(self._store.batch_put_from(list(names), addresses, sizes))

    def remove(self, name: str) -> int:
        return int(self._store.remove(name, True))

    def remove_matching(self, pattern: str) -> int:
        """How many names that match were removed, whoever has leases on them."""
        return int(self._store.remove_by_regex(pattern, True))

    def register(self, region: Bytes) -> None:
        """Raises ``OSError`` if it cannot be registered."""
        if code := self._store.register_buffer(region.ctypes.data, region.nbytes):
            raise OSError(f"Mooncake does not register {region.nbytes} bytes (code {code})")

    def unregister(self, region: Bytes) -> None:
        self._store.unregister_buffer(region.ctypes.data)

    def close(self) -> None:
        self._store.close()


class RegisteredScratch(Scratch):
    """Memory of one thread that Mooncake may read and write."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    def take(self, size: int) -> Bytes:
        if len(self._bytes) < size:
            if len(self._bytes):
                self._client.unregister(self._bytes)
            self._bytes = np.empty(0, np.uint8)
            grown = np.empty(size, np.uint8)
            self._client.register(grown)
            self._bytes = grown
        return self._bytes[:size]


def status_of(code: int) -> Status:
    """Of a negative code."""
    return _STATUSES.get(code, Status.UNAVAILABLE)


def _laid_out(regions: Sequence[Bytes]) -> tuple[list[int], list[int]]:
    return [region.ctypes.data for region in regions], [region.nbytes for region in regions]
