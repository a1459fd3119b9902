"""What clients ask of a holder: writes straight into the segment, reads straight out of it, records of the log.

A connection acts for one tenant (`wire.auth`) and reaches nothing else: a write needs the token that the master gave with the room, a
read must name memory that holds an object of the tenant.
"""

import asyncio
import hmac
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from forebay.store.backend import Status
from forebay.store.crc import crc32c
from forebay.store.holder.mapping import Staging
from forebay.store.holder.memory import Entry, Memory
from forebay.store.holder.promoter import Promoter
from forebay.store.holder.reads import LogReads, Wanted
from forebay.store.holder.segment import Segment, as_bytes
from forebay.store.master.puts import room_token
from forebay.store.native.library import copy_crc32c
from forebay.store.wire import auth
from forebay.store.wire.connection import Connection
from forebay.store.wire.frames import (
    FrameError,
    Prefix,
    check_keys,
    decode_client_to_holder,
    encode,
)
from forebay.store.wire.messages import (
    MAX_CAPACITY,
    Challenge,
    Check,
    ClientToHolder,
    Codes,
    CopyIn,
    CopyOut,
    Cut,
    Hello,
    Part,
    Piece,
    PrefetchKeys,
    ReadMemory,
    ReadSsd,
    Role,
    Touched,
    Welcome,
    Write,
)

T = TypeVar("T")
SINK_BYTES = 1 << 20
READS_PER_CONNECTION = 4


class Keeper(Protocol):
    """The holder, as its data server needs it."""

    memory: Memory
    segment: Segment
    token_key: bytes

    def awake(self, now: float) -> bool:
        """Whether this holder is registered and its loop has not stood still for longer than a lease (rule ST6)."""
        ...

    def written(self, entry: Entry, done: "Receipt | None") -> None:
        """``entry`` is live: log it. ``done`` hears of it if puts wait for the log (--fsync always)."""
        ...

    def waits_for_log(self) -> bool: ...


@dataclass(slots=True)
class Receipt:
    """An answer to a write that waits until the log has all of its entries."""

    connection: Connection
    call: int
    codes: bytearray
    missing: dict[int, int] = field(default_factory=dict)  # id of entry -> index in codes

    def settle(self, entry: Entry, logged: bool) -> None:
        index = self.missing.pop(id(entry))
        if not logged:
            self.codes[index] = Status.UNAVAILABLE
        if not self.missing:
            self.connection.answer(Codes(self.call, bytes(self.codes)))


@dataclass(slots=True)
class Peer:
    """State of one connection. ``entries``: what is being written through it, None where it was refused; ``lent``: memory of
    the client's that is only read."""

    call: int = 0
    entries: list[Entry | None] = field(default_factory=list)
    staging: Staging | None = None
    lent: memoryview | None = None
    reading: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(READS_PER_CONNECTION)
    )
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class DataServer:
    """The `Handler` of a holder's connections, TCP and Unix."""

    def __init__(
        self,
        keeper: Keeper,
        reads: LogReads | None,
        promoter: Promoter | None,
        secrets: auth.Secrets,
    ) -> None:
        self._keeper = keeper
        self._reads = reads
        self._promoter = promoter
        self._secrets = secrets
        self._sink = memoryview(bytearray(SINK_BYTES))
        self.epoch = time.time_ns() >> 10
        self.bytes_in = self.bytes_out = 0
        self.unasked = self.unasked_bytes = 0
        """What clients read without asking the master, who has not been told yet."""

    def opened(self, connection: Connection, given: Challenge, hello: Hello) -> Welcome:
        self.admit(given, hello)
        connection.state = Peer()
        return auth.welcome(given, hello, self._secrets, self.epoch)

    def admit(self, given: Challenge, hello: Hello) -> None:
        """Raises ``AuthError``."""
        auth.verify_hello(given, hello, self._secrets)
        if hello.role is not Role.CLIENT:
            raise auth.AuthError("a holder serves clients only")

    def closed(self, connection: Connection) -> None:
        """Whatever was still being written through it is forgotten at once."""
        peer = _peer(connection)
        for entry in peer.entries:
            if entry is not None and not entry.live:
                self._keeper.memory.drop(entry)
        peer.entries = []

    def frame(
        self, connection: Connection, body: memoryview, prefix: Prefix
    ) -> Sequence[memoryview]:
        try:
            message = decode_client_to_holder(body)
        except FrameError:
            if prefix.optional and not prefix.payload_bytes:
                return ()
            raise
        _check(message, prefix)
        if isinstance(message, Write):
            return self._begin_write(connection, message)
        if isinstance(message, PrefetchKeys):
            if self._promoter is not None and self._keeper.awake(time.monotonic()):
                self._promoter.prefetch(
                    _tenant(connection), message.keys, message.hint_s, demand=message.demand
                )
            return ()
        if isinstance(message, Touched):
            if self._reads is not None:
                self._reads.touch(_tenant(connection), message.records)
                self.bytes_out += message.bytes
                self.unasked = min(
                    MAX_CAPACITY, self.unasked + message.unasked
                )  # a claim, and it has to fit a Beat
                self.unasked_bytes = min(MAX_CAPACITY, self.unasked_bytes + message.unasked_bytes)
            return ()
        if not self._keeper.awake(time.monotonic()) and not isinstance(message, CopyIn):
            self._refuse(connection, message)
        elif isinstance(message, ReadMemory):
            self._read_memory(connection, message)
        elif isinstance(message, Check):
            at = self._keeper.memory.at
            codes = bytes(
                Status.OK if at(offset, stamp) else Status.NOT_FOUND
                for offset, stamp in message.ranges
            )
            connection.answer(Codes(message.call, codes))
        elif isinstance(message, ReadSsd):
            self._overtake(connection, message.cuts)
            for index, cut in enumerate(message.cuts):
                self._spawn(connection, self._send_cut(connection, message.call, index, cut))
        elif isinstance(message, CopyIn):
            self._spawn(connection, self._copy_in(connection, message))
        elif isinstance(message, CopyOut):
            self._overtake(connection, message.cuts)
            self._spawn(connection, self._copy_out(connection, message))
        return ()

    # ------------------------------------------------------------------------------------------ writes

    def payload(self, connection: Connection) -> None:
        peer = _peer(connection)
        entries, peer.entries = peer.entries, []
        for entry in entries:
            if entry is not None:
                entry.abort = None
        self._finish_write(
            connection, peer.call, entries, [self._is_intact(entry) for entry in entries]
        )

    def _begin_write(self, connection: Connection, message: Write) -> Sequence[memoryview]:
        peer = _peer(connection)
        self._keeper.awake(time.monotonic())  # forgets the key of rooms given before it stood still
        peer.call = message.call
        peer.entries = [self._begin(connection, piece) for piece in message.pieces]
        targets: list[memoryview] = []
        for piece, entry in zip(message.pieces, peer.entries, strict=True):
            if entry is not None:
                entry.abort = connection.abort
                targets.append(self._keeper.segment.data(entry.offset, entry.length))
            else:
                targets += [self._sink] * (piece.length // SINK_BYTES) + [
                    self._sink[: piece.length % SINK_BYTES]
                ]
        return targets

    def _begin(self, connection: Connection, piece: Piece) -> Entry | None:
        tenant = _tenant(connection)
        wanted = room_token(
            self._keeper.token_key, tenant, piece.key, piece.generation, piece.offset, piece.length
        )
        if not hmac.compare_digest(wanted, piece.token):
            return None
        entry = Entry(
            tenant,
            piece.key,
            piece.generation,
            piece.generation,
            piece.offset,
            piece.length,
            piece.crc,
        )
        return entry if self._keeper.memory.begin(entry) else None

    def _is_intact(self, entry: Entry | None) -> bool:
        if entry is None or entry.gone:
            return False
        return crc32c(self._keeper.segment.data(entry.offset, entry.length)) == entry.crc

    def _finish_write(
        self, connection: Connection, call: int, entries: list[Entry | None], intact: list[bool]
    ) -> None:
        """Publish what arrived well, log it, and answer, at once or when it is logged."""
        receipt = Receipt(connection, call, bytearray(len(entries)))
        for index, (entry, good) in enumerate(zip(entries, intact, strict=True)):
            if entry is None or entry.gone:
                receipt.codes[index] = Status.UNAVAILABLE
            elif not good:
                self._keeper.memory.drop(entry)
                receipt.codes[index] = Status.CHECKSUM
            elif self._keeper.memory.publish(entry):
                self.bytes_in += entry.length
                if self._keeper.waits_for_log():
                    receipt.missing[id(entry)] = index
        waiting = bool(receipt.missing)
        for entry in entries:
            if entry is not None and entry.live:
                self._keeper.written(entry, receipt if waiting else None)
        if not waiting:
            connection.answer(Codes(call, bytes(receipt.codes)))

    async def _copy_in(self, connection: Connection, message: CopyIn) -> None:
        peer = _peer(connection)
        staging = peer.staging.view if peer.staging is not None else None
        memory = peer.lent if message.lent else staging
        entries: list[Entry | None] = []
        jobs: list[tuple[Entry, memoryview, memoryview]] = []
        for piece, at in zip(message.pieces, message.at, strict=True):
            entry = None
            if memory is not None and at >= 0 and at + piece.length <= len(memory):
                entry = self._begin(connection, piece)
                if entry is not None:
                    entry.busy = True
                    target = self._keeper.segment.data(entry.offset, entry.length)
                    jobs.append((entry, memory[at : at + piece.length], target))
            entries.append(entry)
        good = await asyncio.get_running_loop().run_in_executor(None, _copy_checked, jobs)
        for entry, _, _ in jobs:
            self._keeper.memory.copied(entry)
            if not connection.alive:
                self._keeper.memory.drop(entry)
        self._finish_write(connection, message.call, entries, [entry in good for entry in entries])

    # ------------------------------------------------------------------------------------------ reads

    def _read_memory(self, connection: Connection, message: ReadMemory) -> None:
        tenant, codes, payload = _tenant(connection), bytearray(), []
        for wanted in message.slices:
            entry = self._keeper.memory.at(wanted.offset, wanted.stamp)
            inside = (
                entry is not None
                and wanted.start >= 0
                and 0 <= wanted.length <= entry.length - wanted.start
            )
            if entry is None or entry.tenant != tenant or not inside:
                codes.append(Status.NOT_FOUND)
                continue
            codes.append(Status.OK)
            payload.append(self._keeper.segment.data(wanted.offset, wanted.length, wanted.start))
        total = sum(map(len, payload))
        self.bytes_out += total
        connection.send(encode(Codes(message.call, bytes(codes)), total), payload)

    def _overtake(self, connection: Connection, cuts: Sequence[Cut]) -> None:
        if self._promoter is not None:
            self._promoter.overtaken(_tenant(connection), [cut.key for cut in cuts])

    async def _send_cut(self, connection: Connection, call: int, index: int, cut: Cut) -> None:
        async with _peer(connection).reading:
            await connection.writable()
            if not connection.alive:
                return
            found = (
                await self._reads.read(_tenant(connection), cut.key, cut.generation)
                if self._reads
                else None
            )
            if found is None:
                connection.answer(Part(call, index, Status.NOT_FOUND))
                return
            assert self._reads is not None
            buffer, length = found
            if not 0 <= cut.start <= cut.start + cut.length <= length:
                connection.answer(Part(call, index, Status.INVALID))
                self._reads.release(buffer)
                return
            frame = encode(Part(call, index, Status.OK), cut.length)
            connection.send(frame, [buffer[cut.start : cut.start + cut.length]])
            self.bytes_out += cut.length
            self._reads.release(buffer, connection)

    async def _copy_out(self, connection: Connection, message: CopyOut) -> None:
        """In a few jobs of several records each: handing a thread every single one would cost more than small ones take to read."""
        staging, codes = _peer(connection).staging, bytearray(len(message.cuts))
        alone: list[tuple[int, Wanted]] = []
        shared: list[tuple[int, Wanted]] = []
        for index, (cut, at) in enumerate(zip(message.cuts, message.at, strict=True)):
            if (
                self._reads is None
                or staging is None
                or not 0 <= at <= at + cut.length <= len(staging.view)
            ):
                codes[index] = Status.INVALID
                continue
            name = (_tenant(connection), cut.key, cut.generation)
            busy = self._reads.is_under_way(name)
            (shared if busy else alone).append(
                (index, Wanted(name, cut.start, cut.length, staging, at))
            )
        jobs = [
            self._copy_records(connection, some, codes)
            for some in _dealt(alone, READS_PER_CONNECTION)
        ]
        await asyncio.gather(
            *jobs,
            *(self._copy_shared(connection, index, wanted, codes) for index, wanted in shared),
        )
        connection.answer(Codes(message.call, bytes(codes)))

    async def _copy_records(
        self, connection: Connection, some: Sequence[tuple[int, Wanted]], codes: bytearray
    ) -> None:
        assert self._reads is not None
        async with _peer(connection).reading:
            for (index, wanted), code in zip(
                some, await self._reads.copy([one for _, one in some]), strict=True
            ):
                codes[index] = code
                self.bytes_out += wanted.count if code is Status.OK else 0

    async def _copy_shared(
        self, connection: Connection, index: int, wanted: Wanted, codes: bytearray
    ) -> None:
        """A promotion or another get reads this record now."""
        assert self._reads is not None
        start, target = wanted.start, wanted.target
        codes[index] = Status.NOT_FOUND
        async with _peer(connection).reading:
            found = await self._reads.read(*wanted.name)
            if found is None:
                return
            buffer, length = found
            try:
                codes[index] = Status.INVALID
                if start + len(target) <= length:
                    source = buffer[start : start + len(target)]
                    await asyncio.get_running_loop().run_in_executor(None, _copy, source, target)
                    codes[index] = Status.OK
                    self.bytes_out += len(target)
            finally:
                self._reads.release(buffer)

    def _refuse(
        self, connection: Connection, message: ReadMemory | Check | ReadSsd | CopyOut
    ) -> None:
        """This holder does not serve now."""
        if isinstance(message, ReadSsd):
            for index in range(len(message.cuts)):
                connection.answer(Part(message.call, index, Status.UNAVAILABLE))
            return
        count = len(_items(message))
        connection.answer(Codes(message.call, bytes([Status.UNAVAILABLE]) * count))

    def _spawn(self, connection: Connection, work: Coroutine[None, None, None]) -> None:
        tasks = _peer(connection).tasks
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _items(message: ReadMemory | Check | CopyIn | CopyOut | ReadSsd | Write) -> Sequence[object]:
    match message:
        case ReadMemory(_, slices):
            return slices
        case Check(_, ranges):
            return ranges
        case CopyIn(_, pieces) | Write(_, pieces):
            return pieces
        case CopyOut(_, cuts) | ReadSsd(_, cuts):
            return cuts


def _check(message: ClientToHolder, prefix: Prefix) -> None:
    """Raises ``FrameError`` for what only a broken or hostile client sends."""
    if isinstance(message, PrefetchKeys):
        items: Sequence[object] = message.keys
    elif isinstance(message, Touched):
        items = [key for key, _ in message.records]
    else:
        items = _items(message)
    check_keys(items)
    if isinstance(message, CopyIn | CopyOut) and len(message.at) != len(items):
        raise FrameError("unequal lists")
    payload = 0
    if isinstance(message, Write | CopyIn):
        if not message.pieces or any(piece.length < 1 for piece in message.pieces):
            raise FrameError("a write of no bytes")
        check_keys([piece.key for piece in message.pieces])
        payload = sum(piece.length for piece in message.pieces) if isinstance(message, Write) else 0
    if prefix.payload_bytes != payload:
        raise FrameError(f"payload of {prefix.payload_bytes} bytes where {payload} are due")


def _copy_checked(jobs: list[tuple[Entry, memoryview, memoryview]]) -> set[Entry]:
    """Copy staging into the segment and check what arrived; the entries that are intact. Runs without the GIL mostly."""
    good = set()
    for entry, source, target in jobs:
        if copy_crc32c(as_bytes(target), as_bytes(source)) == entry.crc:
            good.add(entry)
    return good


def _copy(source: memoryview, target: memoryview) -> None:
    as_bytes(target)[:] = as_bytes(source)


def _dealt(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """At most ``count`` runs of nearly equal length."""
    size = -(-len(items) // count)
    return [items[start : start + size] for start in range(0, len(items), size)] if items else []


def _peer(connection: Connection) -> Peer:
    assert isinstance(connection.state, Peer)
    return connection.state


def _tenant(connection: Connection) -> str:
    assert connection.peer is not None
    return connection.peer.tenant
