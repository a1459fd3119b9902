"""Reads of the log by four threads, each record once however many want it: a get and a promotion of one record share the read.

Buffers are page-aligned (O_DIRECT) and reused; one that a transport may still be sending from comes back when that is done.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from forebay.store.backend import Status
from forebay.store.holder.log.files import HUGE_PAGE_BYTES, aligned_buffer
from forebay.store.holder.log.log import SsdLog
from forebay.store.holder.log.record import padded
from forebay.store.holder.mapping import Staging
from forebay.store.holder.segment import as_bytes
from forebay.store.wire.messages import HeldSsd

READ_THREADS = 4
MAX_IDLE_BYTES = 256 << 20
MAX_BOUNCE_BYTES = 8 << 20  # kept by each thread


Name = tuple[str, bytes, int]  # tenant, key, generation


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of which record, from where, how many bytes, and where in a client's staging memory they go."""

    name: Name
    start: int
    count: int
    staging: Staging
    at: int

    @property
    def target(self) -> memoryview:
        return self.staging.view[self.at : self.at + self.count]


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
        self._under_way: dict[Name, asyncio.Future[memoryview | None]] = {}
        self._users: dict[int, int] = {}  # id of buffer -> users
        self._idle: dict[int, list[memoryview]] = {}  # by size
        self._idle_bytes = 0
        self._lent: list[tuple[memoryview, Loan]] = []
        self._bounce = threading.local()

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
            under_way = self._under_way[name] = loop.run_in_executor(
                self._threads, self._fill, name, buffer
            )
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

    def is_under_way(self, name: Name) -> bool:
        """Somebody reads this record now; whoever else wants it had better share that read."""
        return name in self._under_way

    async def copy(self, wanted: Sequence[Wanted]) -> list[Status]:
        """Read records one after another in one thread, and copy what is wanted of each to where it is wanted."""
        codes, damaged = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._copy_all, wanted
        )
        for held in damaged:
            self._damaged(held)
        return codes

    def touch(self, tenant: str, names: Sequence[tuple[bytes, int]]) -> None:
        """A client has read these records itself."""
        self._log.touch(tenant, names)

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

    def _fill(self, name: Name, buffer: memoryview) -> memoryview | None:
        return buffer if self._log.read(*name, buffer) is not None else None

    def _copy_all(self, wanted: Sequence[Wanted]) -> tuple[list[Status], list[HeldSsd]]:
        codes, damaged = [], []
        for one in wanted:
            length = self._log.length_of(*one.name)
            if length is None:
                codes.append(Status.NOT_FOUND)
            elif not 0 <= one.start <= one.start + one.count <= length:
                codes.append(Status.INVALID)
            elif self._copy(one, length):
                codes.append(Status.OK)
            else:
                codes.append(Status.NOT_FOUND)
                if self._log.length_of(*one.name) is None:
                    damaged.append(HeldSsd(*one.name, length))
        return codes, damaged

    def _copy(self, wanted: Wanted, length: int) -> bool:
        """A whole value straight to where it goes, if the disk is fast there; else by way of a buffer of this thread's own."""
        size = padded(length)
        if wanted.count == length and wanted.staging.is_fast(wanted.at, size):
            return (
                self._log.read(*wanted.name, wanted.staging.view[wanted.at : wanted.at + size])
                is not None
            )
        bounce: memoryview | None = getattr(self._bounce, "buffer", None)
        if bounce is None or len(bounce) < size:
            bounce = aligned_buffer(max(size, HUGE_PAGE_BYTES))
            if size <= MAX_BOUNCE_BYTES:
                self._bounce.buffer = bounce
        if self._log.read(*wanted.name, bounce) is None:
            return False
        as_bytes(wanted.target)[:] = as_bytes(bounce[wanted.start : wanted.start + wanted.count])
        return True

    def _take(self, size: int) -> memoryview:
        lent, self._lent = self._lent, []
        for buffer, borrower in lent:
            self.release(buffer, borrower)
        idle = self._idle.get(size)
        if idle:
            self._idle_bytes -= size
            return idle.pop()
        return self._make(size)

    def _make(self, size: int) -> memoryview:
        """A buffer; small ones are cut from one that has huge pages, and the rest of it waits for the next."""
        if size > HUGE_PAGE_BYTES // 2:
            return aligned_buffer(size)
        slab = aligned_buffer(HUGE_PAGE_BYTES)
        cuts = [slab[start : start + size] for start in range(0, HUGE_PAGE_BYTES - size + 1, size)]
        self._idle.setdefault(size, []).extend(cuts[1:])
        self._idle_bytes += size * (len(cuts) - 1)
        return cuts[0]
