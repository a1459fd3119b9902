"""Reads of the log by four threads, each record once however many want it: a get and a promotion of one record share the read.

Buffers are page-aligned (O_DIRECT) and reused; one that a transport may still be sending from comes back when that is done.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from forebay.store.holder.log.files import aligned_buffer
from forebay.store.holder.log.log import SsdLog
from forebay.store.holder.log.record import padded
from forebay.store.wire.messages import HeldSsd

READ_THREADS = 4
MAX_IDLE_BYTES = 256 << 20


class Loan(Protocol):
    """Who may still be reading from a buffer."""

    def unsent_bytes(self) -> int: ...


class LogReads:
    """``damaged`` hears of each record that a read found bad. Used by the loop's thread.

    Every buffer got from ``read`` is given back with ``release`` once per caller."""

    def __init__(self, log: SsdLog, damaged: Callable[[HeldSsd], None]) -> None:
        self._log = log
        self._damaged = damaged
        self._threads = ThreadPoolExecutor(READ_THREADS, "log-read")
        self._under_way: dict[tuple[str, bytes, int], asyncio.Future[memoryview | None]] = {}
        self._users: dict[int, int] = {}  # id of buffer -> users
        self._idle: dict[int, list[memoryview]] = {}  # by size
        self._idle_bytes = 0
        self._lent: list[tuple[memoryview, Loan]] = []

    async def read(self, tenant: str, key: bytes, generation: int) -> tuple[memoryview, int] | None:
        """A buffer with the whole value in front, and the value's length; None if it is not there or damaged."""
        length = self._log.length_of(tenant, key, generation)
        if length is None:
            return None
        name = (tenant, key, generation)
        under_way = self._under_way.get(name)
        if under_way is None:
            buffer = self._take(padded(length))
            loop = asyncio.get_running_loop()
            under_way = self._under_way[name] = loop.run_in_executor(self._threads, self._fill, name, buffer)
            under_way.add_done_callback(lambda _: self._under_way.pop(name, None))
            self._users[id(buffer)] = 1
            found = await asyncio.shield(under_way)
            if found is None:
                self.release(buffer)
                if self._log.length_of(tenant, key, generation) is None:
                    self._damaged(HeldSsd(tenant, key, generation, length))
                return None
            return found, length
        found = await asyncio.shield(under_way)
        if found is None:
            return None
        if id(found) not in self._users:  # all earlier users were done before we woke
            return await self.read(tenant, key, generation)
        self._users[id(found)] += 1
        return found, length

    async def read_into(self, tenant: str, key: bytes, generation: int, target: memoryview) -> bool | None:
        """Read a whole value straight into ``target`` (page-aligned, its padded length). None: not like this (it has another length,
        or is being read already, so that `read` shares that); False: it is not there or damaged."""
        name = (tenant, key, generation)
        length = self._log.length_of(*name)
        if length is None:
            return False
        if padded(length) != len(target) or name in self._under_way:
            return None
        if await asyncio.get_running_loop().run_in_executor(self._threads, self._fill, name, target) is not None:
            return True
        if self._log.length_of(*name) is None:
            self._damaged(HeldSsd(tenant, key, generation, length))
        return False

    def release(self, buffer: memoryview, lent_to: Loan | None = None) -> None:
        """``buffer`` is not needed any more, or only until ``lent_to`` has sent what was queued."""
        if lent_to is not None and lent_to.unsent_bytes():
            self._lent.append((buffer, lent_to))
            return
        self._users[id(buffer)] -= 1
        if self._users[id(buffer)]:
            return
        del self._users[id(buffer)]
        if self._idle_bytes + len(buffer) <= MAX_IDLE_BYTES:
            self._idle.setdefault(len(buffer), []).append(buffer)
            self._idle_bytes += len(buffer)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _fill(self, name: tuple[str, bytes, int], buffer: memoryview) -> memoryview | None:
        return buffer if self._log.read(*name, buffer) is not None else None

    def _take(self, size: int) -> memoryview:
        lent, self._lent = self._lent, []
        for buffer, borrower in lent:
            self.release(buffer, borrower)
        idle = self._idle.get(size)
        if idle:
            self._idle_bytes -= size
            return idle.pop()
        return memoryview(aligned_buffer(size))
