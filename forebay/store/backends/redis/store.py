"""The `PageStore` of a Valkey or Redis server or cluster.

    items --by server--> pipelines, side by side --> statuses in the items' order      a key that has moved is asked for once more

Gets receive straight into the buffers. What the server evicts or expires is a miss. It has one tier and
lends no memory, so hints and ranged reads bring nothing: a value is read whole, checked, and cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from forebay.store.backend import Capabilities, GetItem, Health, PutItem, Status, StoreUse
from forebay.store.backends.items import target_of, value_of
from forebay.store.backends.redis.connection import Command, Pool, Refused
from forebay.store.backends.redis.resp import (
    Argument,
    ProtocolError,
    Reader,
    Reply,
    ReplyError,
    Target,
)
from forebay.store.backends.redis.topology import Topology, info_of
from forebay.store.backends.redis.url import RedisUrl
from forebay.store.backends.sealed import TRAILER_BYTES, is_whole, trailer_of
from forebay.store.client.channel import Bytes
from forebay.store.crc import crc32c

NAMES = b"forebay:{"
OPEN_S = 3.0
HEALTH_S = 1.0
USE_S = 2.0
QUESTIONS = 256  # keys in one pipeline of questions, whose replies must fit what sockets hold
SCAN_COUNT = 1000
OLDEST = (4, 0)  # UNLINK
_REFUSALS = {"OOM": Status.NO_SPACE, "WRONGTYPE": Status.CHECKSUM}


@dataclass(frozen=True, slots=True)
class _Failed:
    """There is no reply."""

    status: Status


@dataclass(frozen=True, slots=True)
class _Ask:
    """One command of item ``index``; ``name``: the key that decides where it goes."""

    index: int
    name: bytes
    command: Command
    target: Target | None = None


class RedisStore:
    """Thread-safe; sockets release the GIL. Raises ``OSError`` if the server does not answer or refuses us."""

    capabilities = Capabilities(hints=False, ranged_reads=False, lent_memory=False)

    def __init__(self, url: RedisUrl) -> None:
        self._url = url
        try:
            self._topology = Topology(url, time.monotonic() + OPEN_S)
        except (Refused, ProtocolError) as error:
            raise OSError(f"{url.address}: {error}") from error
        except OSError as error:
            raise OSError(f"{url.address}: {error.strerror or error}") from error
        version = self._topology.info.get("redis_version", "")
        if version and tuple(int(n) for n in version.split(".")[:2] if n.isdecimal()) < OLDEST:
            self._topology.close()
            raise OSError(f"{url.address}: version {version}; allowed: 4.0 and newer")
        self._threads = ThreadPoolExecutor(url.connections, "redis")

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes],
        *,
        hint: bool,
        timeout_s: float,
        group: bytes = b"",
    ) -> int:
        """One question a page: the parts of a page, and all of a group, are in one slot."""
        deadline = time.monotonic() + timeout_s
        wanted = parts or (b"",)
        for first in range(0, len(keys), QUESTIONS):
            some = keys[first : first + QUESTIONS]
            asks = []
            for index, key in enumerate(some):
                names = [name_of(group, key + part) for part in wanted]
                asks.append(_Ask(index, names[0], [b"EXISTS", *names]))
            replies = self._ask(asks, deadline)
            if any(isinstance(reply, _Failed) for reply in replies):
                return 0
            for index, reply in enumerate(replies):
                if reply != len(wanted):
                    return first + index
        return len(keys)

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]:
        statuses = [Status.INVALID] * len(items)
        asks = []
        for index, item in enumerate(items):
            target = target_of(item)
            if target is not None:
                name = name_of(item.group, item.key)
                receive = _receiving(item, target, statuses, index)
                asks.append(_Ask(index, name, [b"GET", name], receive))
        for ask, reply in zip(asks, self._ask(asks, time.monotonic() + timeout_s), strict=True):
            if reply is None:
                statuses[ask.index] = Status.NOT_FOUND
            elif isinstance(reply, _Failed | ReplyError) and statuses[ask.index] is not Status.OK:
                statuses[ask.index] = _status(reply)
        return statuses

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        """First who is there with which length, then what is missing or of another length."""
        deadline = time.monotonic() + timeout_s
        statuses = [Status.INVALID] * len(items)
        values = {i: value for i, item in enumerate(items) if (value := value_of(item)) is not None}
        names = {i: name_of(items[i].group, items[i].key) for i in values}
        lengths = [_Ask(i, name, [b"STRLEN", name]) for i, name in names.items()]
        puts = []
        for ask, length in zip(lengths, self._ask(lengths, deadline), strict=True):
            i, value = ask.index, values[ask.index]
            if isinstance(length, _Failed):
                statuses[i] = length.status
            elif length == len(value) + TRAILER_BYTES:
                statuses[i] = Status.EXISTS
                if self._url.ttl_s:
                    again = [b"EXPIRE", ask.name, b"%d" % self._url.ttl_s]
                    puts.append(_Ask(i, ask.name, again))
            elif isinstance(length, int):
                puts.append(self._set(i, ask.name, items[i].key, value, is_new=not length))
            elif isinstance(length, ReplyError) and length.code == "WRONGTYPE":
                puts.append(self._set(i, ask.name, items[i].key, value, is_new=False))
            elif isinstance(length, ReplyError):
                statuses[i] = _status(length)
        for ask, reply in zip(puts, self._ask(puts, deadline), strict=True):
            if reply == b"OK":
                statuses[ask.index] = Status.OK
            elif reply is None:  # another writer of the same key was first
                statuses[ask.index] = Status.EXISTS
            elif isinstance(reply, _Failed | ReplyError):
                statuses[ask.index] = _status(reply)
        return statuses

    def health(self) -> Health:
        deadline = time.monotonic() + HEALTH_S
        self._topology.refresh(deadline)
        lines = []
        for pool in self._topology.masters():
            try:
                ping, info = pool.pipeline(
                    [[b"PING"], [b"INFO", b"memory"]], [None, None], deadline
                )
            except (OSError, ProtocolError, Refused) as error:
                return Health(False, f"{pool.address}: {error}")
            if isinstance(ping, ReplyError):
                return Health(False, f"{pool.address}: {ping}")
            lines.append(f"{pool.address}: {_memory(info_of(info))}")
        return Health(True, "; ".join(lines))

    def use(self) -> StoreUse:
        """Of the whole server: it counts other programs' keys too."""
        deadline = time.monotonic() + USE_S
        objects = capacity = used = 0
        for pool in self._topology.masters():
            try:
                size, info = pool.pipeline(
                    [[b"DBSIZE"], [b"INFO", b"memory"]], [None, None], deadline
                )
            except (OSError, ProtocolError, Refused):
                return StoreUse()
            memory = info_of(info)
            objects += size if isinstance(size, int) else 0
            used += int(memory.get("used_memory", 0))
            capacity += int(memory.get("maxmemory", 0)) or int(memory.get("total_system_memory", 0))
        return StoreUse({"objects": objects, "dram_bytes": capacity, "dram_used": used})

    def clear(self, parts: Sequence[bytes], timeout_s: float) -> int:
        """Looks at every key of the database: SCAN has no index of suffixes."""
        deadline = time.monotonic() + timeout_s
        ends = tuple(parts)
        return sum(_clear(pool, ends, deadline) for pool in self._topology.masters())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._topology.close()

    def _set(self, index: int, name: bytes, key: bytes, value: Bytes, *, is_new: bool) -> _Ask:
        command: list[Argument] = [b"SET", name, (value.data, trailer_of(key, crc32c(value.data)))]
        if is_new:
            command.append(b"NX")
        if self._url.ttl_s:
            command += [b"EX", b"%d" % self._url.ttl_s]
        return _Ask(index, name, command)

    # ------------------------------------------------------------------------------------------ servers

    def _ask(self, asks: Sequence[_Ask], deadline: float) -> list[Reply | _Failed]:
        """A reply for each, or why there is none. A key that has moved is asked for where it is now, once."""
        replies: list[Reply | _Failed] = [_Failed(Status.UNAVAILABLE)] * len(asks)
        first = {i: (self._topology.pool_of(ask.name), False) for i, ask in enumerate(asks)}
        self._ask_at(asks, first, replies, deadline)
        moved = {
            index: place
            for index, reply in enumerate(replies)
            if isinstance(reply, ReplyError) and (place := self._topology.redirected(reply))
        }
        if moved:
            self._ask_at(asks, moved, replies, deadline)
        if any(isinstance(reply, _Failed) for reply in replies):
            self._topology.refresh(time.monotonic() + HEALTH_S)  # for the next call
        return replies

    def _ask_at(
        self,
        asks: Sequence[_Ask],
        places: Mapping[int, tuple[Pool, bool]],
        replies: list[Reply | _Failed],
        deadline: float,
    ) -> None:
        """Ask servers side by side, and settle ``replies`` of the indices in ``places``."""
        work: dict[tuple[Pool, bool], list[int]] = {}
        for index, place in places.items():
            work.setdefault(place, []).append(index)

        def run(place: tuple[Pool, bool]) -> list[Reply] | _Failed:
            return _pipelined(*place, [asks[index] for index in work[place]], deadline)

        answers = self._threads.map(run, work) if len(work) > 1 else map(run, work)
        for indices, answer in zip(work.values(), answers, strict=True):
            for nth, index in enumerate(indices):
                replies[index] = answer if isinstance(answer, _Failed) else answer[nth]


def name_of(group: bytes, key: bytes) -> bytes:
    """A cluster keeps what stands in braces in one slot."""
    return NAMES + group.hex().encode() + b"}:" + key


def _pipelined(
    pool: Pool, asking: bool, asks: Sequence[_Ask], deadline: float
) -> list[Reply] | _Failed:
    """The replies, or what is the matter with the server. ``asking``: it has these keys already, though not their slot."""
    commands: list[Command] = []
    targets: list[Target | None] = []
    for ask in asks:
        if asking:
            commands.append([b"ASKING"])
            targets.append(None)
        commands.append(ask.command)
        targets.append(ask.target)
    try:
        return pool.pipeline(commands, targets, deadline)[1 if asking else 0 :: 2 if asking else 1]
    except TimeoutError:
        return _Failed(Status.TIMEOUT)
    except (OSError, ProtocolError, Refused):
        return _Failed(Status.UNAVAILABLE)


def _receiving(item: GetItem, target: Bytes, statuses: list[Status], index: int) -> Target:
    """Receives a value, straight into ``target`` if that is to have all of it, and settles the item's status."""

    def receive(length: int, reader: Reader) -> Reply:
        size = length - TRAILER_BYTES
        if size < 0:
            reader.skip(length)
            statuses[index] = Status.CHECKSUM
            return b""
        if item.offset + item.length > size:
            reader.skip(length)
            statuses[index] = Status.INVALID
            return b""
        page = target if size == item.length else np.empty(size, np.uint8)
        trailer = bytearray(TRAILER_BYTES)
        reader.read_into(page.data)
        reader.read_into(memoryview(trailer))
        if not is_whole(item.key, crc32c(page.data), trailer):
            statuses[index] = Status.CHECKSUM
            return b""
        if page is not target:
            target[:] = page[item.offset : item.offset + item.length]
        statuses[index] = Status.OK
        return b""

    return receive


def _status(reply: _Failed | ReplyError) -> Status:
    if isinstance(reply, _Failed):
        return reply.status
    return _REFUSALS.get(reply.code, Status.UNAVAILABLE)


def _memory(info: dict[str, str]) -> str:
    """For whoever is on call: what it has, and what it does when that is used up."""
    if not info:
        return "it answers (INFO is not permitted)"
    limit = int(info.get("maxmemory", 0))
    policy = info.get("maxmemory_policy", "unknown")
    if not limit:
        return f"{info.get('used_memory_human')} used, no maxmemory: it grows until the machine is full"
    bound = f"{info.get('used_memory_human')} of {info.get('maxmemory_human')} used, {policy}"
    if policy == "noeviction" or policy.startswith("volatile"):
        return bound + ": when it is full, pages are refused (allkeys-lru makes room)"
    return bound


def _clear(pool: Pool, ends: tuple[bytes, ...], deadline: float) -> int:
    removed, cursor = 0, b"0"
    pattern = NAMES + b"*"
    scan: Callable[[bytes], Command] = lambda at: [  # noqa: E731
        b"SCAN", at, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT,
    ]  # fmt: skip
    while time.monotonic() < deadline:
        try:
            reply = pool.pipeline([scan(cursor)], [None], deadline)[0]
            match reply:
                case [bytes(cursor), list(names)]:
                    found = [n for n in names if isinstance(n, bytes) and n.endswith(ends)]
                case _:
                    return removed
            if found:
                # One by one: in a cluster they are in many slots.
                unlinked = pool.pipeline(
                    [[b"UNLINK", name] for name in found], [None] * len(found), deadline
                )
                removed += sum(count for count in unlinked if isinstance(count, int))
        except (OSError, ProtocolError, Refused):
            return removed
        if cursor == b"0":
            break
    return removed
