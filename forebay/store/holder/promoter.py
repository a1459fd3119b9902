"""SSD -> DRAM, for both triggers one chain: alloc_start -> SSD read -> write into the replica -> PromotionDone.

From the moment a task has a number, its end is told whatever happens on the way, so the master's pin and cap never leak.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Protocol

from forebay.store.holder.master_link import MasterLink
from forebay.store.holder.memory import Entry, Memory
from forebay.store.holder.reads import LogReads
from forebay.store.holder.segment import Segment, as_bytes
from forebay.store.native.library import copy_crc32c
from forebay.store.throttle import PrefetchThrottle, State
from forebay.store.wire.messages import (
    Allocated,
    AllocStart,
    Prefetchable,
    PrefetchCode,
    PromotionDone,
    RegisterPrefetch,
)

CHUNK_KEYS = 128
ALLOC_TASKS = 8
MAX_QUEUED_CHUNKS = 256
CALL_S = 2.0
_AFTER_REGISTER = {
    PrefetchCode.OK: State.IN_FLIGHT,
    PrefetchCode.PROMOTION_ALREADY_EXISTS: State.ALREADY_RESIDENT,
}


class Known(Protocol):
    def length_of(self, tenant: str, key: bytes) -> int | None:
        """The size of the newest record of a key by the holder's own index, which is the authority on it."""
        ...


class Promoter:
    """One holder's promotions. At most ``MAX_QUEUED_CHUNKS`` requests wait; more are declined (a prefetch is only a hint)."""

    def __init__(
        self, memory: Memory, segment: Segment, reads: LogReads, link: MasterLink, known: Known
    ) -> None:
        self._memory = memory
        self._segment = segment
        self._reads = reads
        self._link = link
        self._known = known
        self._tasks: set[asyncio.Task[None]] = set()
        self._hinted: dict[
            bytes, bool
        ] = {}  # by name, until its read begins: whether a get was there first
        self.throttle = PrefetchThrottle()
        self.declined = self.promoted = 0

    def prefetch(
        self, tenant: str, keys: Sequence[bytes], hint_s: float, *, demand: bool = False
    ) -> None:
        """The local branch of prefetch on exist: keys of which this holder has a record and that were not promoted lately."""
        here = {
            _name(tenant, key): key for key in keys if (self._known.length_of(tenant, key) or 0) > 0
        }
        admitted = [
            here[name]
            for name in self.throttle.admit(list(here), time.monotonic(), despite_cooldown=demand)
        ]
        for start in range(0, len(admitted), CHUNK_KEYS):
            chunk = admitted[start : start + CHUNK_KEYS]
            if len(self._tasks) >= MAX_QUEUED_CHUNKS:
                self._note(tenant, chunk, State.FAILED)
                self.declined += len(chunk)
            else:
                self._spawn(self._prefetch_chunk(tenant, chunk, hint_s))

    def overtaken(self, tenant: str, keys: Sequence[bytes]) -> None:
        """A get reads these: a promotion that has not begun to read them would do it a second time, for nobody."""
        if self._hinted:
            for key in keys:
                name = _name(tenant, key)
                if name in self._hinted:
                    self._hinted[name] = True

    def run(self, task: int, tenant: str, key: bytes) -> None:
        """A task that the master created (promotion on hit)."""
        self._spawn(self._run_tasks(tenant, [(task, key)]))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _prefetch_chunk(self, tenant: str, keys: list[bytes], hint_s: float) -> None:
        hinted = {_name(tenant, key): False for key in keys}
        self._hinted |= hinted
        try:
            await self._register(tenant, keys, hint_s)
        finally:
            for name in hinted:
                self._hinted.pop(name, None)

    async def _register(self, tenant: str, keys: list[bytes], hint_s: float) -> None:
        number = self._link.new_call()
        answer = await self._link.call(
            RegisterPrefetch(number, tenant, keys, hint_s), number, CALL_S
        )
        if not isinstance(answer, Prefetchable):
            self._note(tenant, keys, State.FAILED)
            return
        granted = []
        for code, task, key in zip(answer.codes, answer.tasks, keys, strict=True):
            if code == PrefetchCode.OK:
                granted.append((task, key))
            self._note(tenant, [key], _AFTER_REGISTER.get(PrefetchCode(code), State.FAILED))
        await self._run_tasks(tenant, granted)

    async def _run_tasks(self, tenant: str, tasks: list[tuple[int, bytes]]) -> None:
        """Whatever happens, each task's end is told once."""
        open_tasks = dict(tasks)
        try:
            for start in range(0, len(tasks), ALLOC_TASKS):
                some = [
                    task
                    for task in tasks[start : start + ALLOC_TASKS]
                    if not self._is_late(tenant, task[1])
                ]
                if not some:
                    continue
                self._note(tenant, open_tasks.values(), State.IN_FLIGHT)  # refreshed while it lasts
                number = self._link.new_call()
                answer = await self._link.call(
                    AllocStart(number, [task for task, _ in some]), number, CALL_S
                )
                if not isinstance(answer, Allocated):
                    return
                steps = []
                for (task, key), spot in zip(some, answer.allotments, strict=True):
                    if spot.code is not PrefetchCode.OK:
                        self._refused(
                            tenant, open_tasks.pop(task), spot.code
                        )  # the master ended it
                        continue
                    entry = Entry(
                        tenant, key, spot.generation, spot.stamp, spot.offset, spot.length, crc=0
                    )
                    steps.append(self._fill(task, entry, open_tasks))
                await asyncio.gather(*steps)
        finally:
            for task in open_tasks:
                self._link.send(PromotionDone(task, False))
            self._note(tenant, open_tasks.values(), State.FAILED)

    async def _fill(self, task: int, entry: Entry, open_tasks: dict[int, bytes]) -> None:
        late = self._is_late(entry.tenant, entry.key)
        self._hinted.pop(_name(entry.tenant, entry.key), None)
        found = (
            await self._reads.read(entry.tenant, entry.key, entry.generation) if not late else None
        )
        ok = False
        if found is not None:
            buffer, length = found
            if length == entry.length and self._memory.begin(entry):
                target = self._segment.data(entry.offset, length)
                entry.busy = True
                entry.crc = await asyncio.get_running_loop().run_in_executor(
                    None, _copy, buffer[:length], target
                )
                self._memory.copied(entry)
                ok = self._memory.publish(entry)
            self._reads.release(buffer)
        del open_tasks[task]
        self._link.send(PromotionDone(task, ok))
        self._note(entry.tenant, [entry.key], State.COMPLETED if ok else State.FAILED)
        self.promoted += ok

    def _is_late(self, tenant: str, key: bytes) -> bool:
        return self._hinted.get(_name(tenant, key), False)

    def _refused(self, tenant: str, key: bytes, code: PrefetchCode) -> None:
        """No memory: for a while prefetch keeps out of the way of eviction and offload."""
        if code is PrefetchCode.NO_AVAILABLE_HANDLE:
            self.throttle.open_cooldown(time.monotonic())
        self._note(tenant, [key], State.FAILED)

    def _note(self, tenant: str, keys: Iterable[bytes], state: State) -> None:
        self.throttle.move([_name(tenant, key) for key in keys], state, time.monotonic())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _name(tenant: str, key: bytes) -> bytes:
    return tenant.encode() + b"\0" + key


def _copy(source: memoryview, target: memoryview) -> int:
    """The CRC is of what was read, which was checked."""
    return copy_crc32c(as_bytes(target), as_bytes(source))
