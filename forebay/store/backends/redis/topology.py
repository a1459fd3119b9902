"""Which server has a key: the one of the URL, or the master of the key's slot in a cluster.

    name --CRC16 of what stands in braces--> slot --CLUSTER SLOTS--> master's pool       MOVED: that slot is elsewhere from now on

https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/
"""

from __future__ import annotations

import binascii
import threading
import time

from forebay.store.address import Address, AddressError
from forebay.store.backends.redis.connection import Pool, Refused
from forebay.store.backends.redis.resp import ProtocolError, Reply, ReplyError
from forebay.store.backends.redis.url import RedisUrl

SLOTS = 16384
REFRESH_S = 1.0  # the table is asked for at most that often


def slot_of(name: bytes) -> int:
    """The cluster slot of a key: CRC16 (XMODEM) of its hash tag, or of all of it where there is none."""
    begin = name.find(b"{")
    if begin >= 0:
        end = name.find(b"}", begin + 1)
        if end > begin + 1:
            name = name[begin + 1 : end]
    return binascii.crc_hqx(name, 0) % SLOTS


class Topology:
    """Thread-safe. Owns the pools. Raises as `Pool.pipeline` when the first server does not answer."""

    def __init__(self, url: RedisUrl, deadline: float) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._first = Pool(url, url.address)
        self._pools = {url.address: self._first}
        self._slots: list[tuple[int, int, Address]] = []
        self._asked_at = float("-inf")
        self._moved: dict[int, Address] = {}  # since `_slots` were asked for
        try:
            self.info = self._read_info(deadline)
            self.is_cluster = self.info.get("cluster_enabled") == "1"
            if self.is_cluster:
                reply = self._first.pipeline([[b"CLUSTER", b"SLOTS"]], [None], deadline)[0]
                self._slots = _slots(reply, url.address)
        except BaseException:
            self.close()
            raise

    def pool_of(self, name: bytes) -> Pool:
        if not self.is_cluster:
            return self._first
        slot = slot_of(name)
        with self._lock:
            if slot in self._moved:
                return self._pool(self._moved[slot])
            for begin, end, address in self._slots:
                if begin <= slot <= end:
                    return self._pool(address)
        return self._first  # it will say where the key is

    def masters(self) -> list[Pool]:
        """Every server that has keys."""
        if not self.is_cluster:
            return [self._first]
        with self._lock:
            known = (*(address for _, _, address in self._slots), *self._moved.values())
            return [self._pool(address) for address in dict.fromkeys(known)]

    def redirected(self, error: ReplyError) -> tuple[Pool, bool] | None:
        """Where an error of the server's says that a key is, and whether only for this once (ASK)."""
        match str(error).split(" "):
            case [("MOVED" | "ASK") as kind, slot, place] if slot.isdecimal():
                try:
                    address = Address.parse(place)
                except AddressError:
                    return None
                with self._lock:
                    if kind == "MOVED":
                        self._moved[int(slot)] = address
                    return self._pool(address), kind == "ASK"
        return None

    def refresh(self, deadline: float) -> None:
        """Ask a server that answers who has which slots: a master that is gone may have a successor."""
        with self._lock:
            if not self.is_cluster or time.monotonic() - self._asked_at < REFRESH_S:
                return
            self._asked_at = time.monotonic()
            pools = list(self._pools.values())
        for pool in pools:
            try:
                reply = pool.pipeline([[b"CLUSTER", b"SLOTS"]], [None], deadline)[0]
                slots = _slots(reply, pool.address)
            except (OSError, ProtocolError, Refused):
                continue
            with self._lock:
                self._slots, self._moved = slots, {}
            return

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _pool(self, address: Address) -> Pool:
        if address not in self._pools:
            self._pools[address] = Pool(self._url, address)
        return self._pools[address]

    def _read_info(self, deadline: float) -> dict[str, str]:
        reply = self._first.pipeline([[b"INFO"]], [None], deadline)[0]
        return info_of(reply)


def info_of(reply: Reply) -> dict[str, str]:
    """The fields of an INFO reply; none where it is refused."""
    if not isinstance(reply, bytes):
        return {}
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _slots(reply: Reply, asked: Address) -> list[tuple[int, int, Address]]:
    """(first slot, last slot, master). Raises ``ProtocolError`` for what is no such table."""
    if isinstance(reply, ReplyError) or not isinstance(reply, list):
        raise ProtocolError(f"CLUSTER SLOTS answered {reply!r}")
    found = []
    for row in reply:
        match row:
            case [int(begin), int(end), [host, int(port), *_], *_]:
                # No host, or "": the server that was asked, by the name we know it under.
                name = host.decode() if isinstance(host, bytes) and host else asked.host
                found.append((begin, end, Address(name, port)))
            case _:
                raise ProtocolError("CLUSTER SLOTS has a row that is none")
    return found
