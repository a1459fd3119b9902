"""The blocking client: one face for however many masters there are.

    keys, groups -> for each the master whose turn it is (rendezvous hashing) -> OneMaster, several of them at once -> one answer

A *group* is what stays together on one master, so that a dead one is not a hole in everything: an engine's group is the first page's
hash of a prefix. Without groups each key is its own. Whoever asks for a key must name the group it was put with.
"""

import heapq
import itertools
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

from msgspec.structs import replace
from typing_extensions import Buffer

from forebay.store.address import Address, StoreUrl
from forebay.store.backend import Status
from forebay.store.client.channel import ChannelError
from forebay.store.client.lent import Lent
from forebay.store.client.one_master import OneMaster
from forebay.store.client.prefetcher import PrefetchCounters, PrefetchOptions
from forebay.store.rendezvous import place_of
from forebay.store.wire import auth
from forebay.store.wire.messages import HolderEntry, HolderTable, StoreStats, Tier
from forebay.store.wire.tls import client_context

CALLS_AT_ONCE = 8  # for each master
T = TypeVar("T")
# StoreClient has a method called list, so annotations after it need other names for the type.
_Tiers: TypeAlias = list[frozenset[Tier]]
_Statuses: TypeAlias = list[Status]
_Bools: TypeAlias = list[bool]
_Work: TypeAlias = "list[tuple[OneMaster, Sequence[int]]]"
_NUMBERS = (
    "objects",
    "memory_bytes",
    "memory_used",
    "ssd_bytes",
    "ssd_used",
    "holders",
    "holders_usable",
    "waiting_puts",
    "promotions_in_flight",
)
_FAILED = (Status.TIMEOUT, Status.UNAVAILABLE)


class StoreClient:
    """One tenant's view of a store. Thread-safe. Close it, or use it as a context manager."""

    def __init__(
        self,
        masters: Sequence[Address],
        tenant: str = auth.DEFAULT_TENANT,
        secret: bytes = b"",
        *,
        timeout_s: float = 5.0,
        allow_local: bool = True,
        prefetch: PrefetchOptions | None = None,
        tls: ssl.SSLContext | None = None,
        patient: bool = True,
        lent: Lent | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._patient = patient and len(masters) == 1
        self.masters = tuple(
            OneMaster(
                master,
                tenant,
                secret,
                timeout_s=timeout_s,
                allow_local=allow_local,
                prefetch=prefetch,
                tls=tls,
                lent=lent,
            )
            for master in masters
        )
        self._names = [str(master).encode() for master in masters]
        self._threads = (
            ThreadPoolExecutor(CALLS_AT_ONCE * len(masters), "store-masters")
            if len(masters) > 1
            else None
        )

    @classmethod
    def connect(
        cls,
        url: str,
        tenant: str = auth.DEFAULT_TENANT,
        secret: str | bytes | Path | None = None,
        *,
        timeout_s: float = 5.0,
        allow_local: bool = True,
        prefetch: PrefetchOptions | None = None,
        patient: bool = True,
        lent: Lent | None = None,
    ) -> Self:
        """A client of ``forebay://HOST:PORT[,HOST:PORT...]``, or of ``forebay+tls://HOST:PORT[,...][?ca=FILE]`` for TLS wherever TCP
        is used.

        ``secret``: the tenant's, or the path of a secret file. ``timeout_s`` bounds each call. ``allow_local`` False: never map a
        holder's memory, use TCP as from another machine. ``prefetch``: what probes with the hint do; nothing by default. ``patient``:
        calls wait for a single master that is away, to the end of their time; of several none is ever waited for like that. ``lent``:
        memory that a holder on this machine reads for itself when it is put; it must stay for as long as this client.

        Raises ``AddressError`` for a bad URL, ``TlsError`` for a bad ``ca``, and ``ConnectionError`` if no master answers there.
        """
        where = StoreUrl.parse(url)
        if isinstance(secret, Path):
            secret = auth.Secrets.read(secret).of(tenant)
        client = cls(
            where.masters,
            tenant,
            secret.encode() if isinstance(secret, str) else secret or b"",
            timeout_s=timeout_s,
            allow_local=allow_local,
            prefetch=prefetch,
            tls=client_context(where.ca) if where.tls else None,
            patient=patient,
            lent=lent,
        )
        try:
            client._reach_one(timeout_s)
        except (ChannelError, TimeoutError) as error:
            client.close()
            raise ConnectionError(f"the store at {url} does not answer: {error}") from error
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for master in self.masters:
            master.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    # ------------------------------------------------------------------------------------------ writing

    def put(self, key: bytes, buf: Buffer, group: bytes | None = None) -> Status:
        """Store all of ``buf``; it is read before the return. EXISTS if an object of equal length is there."""
        return self.put_from([key], [buf], groups=None if group is None else [group])[0]

    def put_from(
        self,
        keys: Sequence[bytes],
        bufs: Sequence[Buffer],
        timeout_s: float | None = None,
        groups: Sequence[bytes] | None = None,
    ) -> list[Status]:
        """Store every buffer under its key. Raises ``ValueError`` if there are not as many keys as buffers, or groups."""
        if len(keys) != len(bufs):
            raise ValueError(f"{len(keys)} keys and {len(bufs)} buffers")
        return self._statuses(
            keys,
            groups,
            lambda master, some: master.put_from(
                _of(keys, some), _of(bufs, some), timeout_s=timeout_s
            ),
        )

    def remove(
        self,
        keys: Sequence[bytes],
        timeout_s: float | None = None,
        groups: Sequence[bytes] | None = None,
    ) -> list[Status]:
        """OK once every replica's holder has logged the removal. UNAVAILABLE: nothing was removed. TIMEOUT: it may have been."""
        return self._statuses(
            keys, groups, lambda master, some: master.remove(_of(keys, some), timeout_s)
        )

    # ------------------------------------------------------------------------------------------ reading

    def get(
        self, key: bytes, timeout_s: float | None = None, group: bytes | None = None
    ) -> bytes | None:
        """The whole object, or None."""
        master = self._master_of(key if group is None else group)
        return master.get(key, timeout_s) if self._is_up(master) else None

    def get_into(
        self,
        keys: Sequence[bytes],
        bufs: Sequence[Buffer],
        offsets: Sequence[int] | None = None,
        timeout_s: float | None = None,
        groups: Sequence[bytes] | None = None,
    ) -> list[Status]:
        """Fill each (writable, contiguous) buffer from its object, from ``offsets`` on (default 0).

        After any status but OK a buffer's bytes are undefined. INVALID: the buffer cannot be written, or the object is shorter
        than offset + buffer. Raises ``ValueError`` if the lists differ in length.
        """
        starts = [0] * len(keys) if offsets is None else offsets
        if not len(keys) == len(bufs) == len(starts):
            raise ValueError(f"{len(keys)} keys, {len(bufs)} buffers, {len(starts)} offsets")
        if self._patient and groups is None:  # the shortest way, which tells in a single read
            return self.masters[0].get_into(keys, bufs, starts, timeout_s=timeout_s)
        return self._statuses(
            keys,
            groups,
            lambda master, some: master.get_into(
                _of(keys, some), _of(bufs, some), _of(starts, some), timeout_s=timeout_s
            ),
        )

    def exists(
        self,
        keys: Sequence[bytes],
        prefetch: bool = False,
        timeout_s: float | None = None,
        groups: Sequence[bytes] | None = None,
    ) -> list[bool]:
        """Which keys can be read now. Neither a lease nor a use. ``prefetch``: they will be read soon; what is on SSD only is brought
        to memory meanwhile, if this client has prefetching enabled. That costs the probe no round trip."""
        return self._each(
            keys,
            groups,
            False,
            lambda master, some: master.exists(_of(keys, some), prefetch, timeout_s),
        )

    def prefetch(self, keys: Sequence[bytes], groups: Sequence[bytes] | None = None) -> int:
        """Bring these to memory soon, hint or not; how many were enqueued (the others were, lately)."""
        return sum(master.prefetch(_of(keys, some)) for master, some in self._divided(keys, groups))

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes] = (),
        prefetch: bool = False,
        timeout_s: float | None = None,
        group: bytes | None = None,
    ) -> int:
        """How many leading keys have every one of ``parts`` (or are there themselves, if there are no parts), all put with
        ``group``. ``prefetch`` as for ``exists``, for the keys that match."""
        if self._threads is None or group is not None:
            master = self._master_of(group or b"")
            return (
                master.match_prefix(keys, parts, prefetch, timeout_s) if self._is_up(master) else 0
            )
        wholes = [key + part for key in keys for part in parts or (b"",)]
        found = self.exists(wholes, timeout_s=timeout_s)
        matched = (found.index(False) if False in found else len(found)) // max(1, len(parts))
        if prefetch:
            for master, some in self._divided(wholes[: matched * max(1, len(parts))], None):
                if master.prefetcher.options.enabled:
                    master.prefetch(_of(wholes, some))
        return matched

    def list(
        self, prefix: bytes = b"", timeout_s: float | None = None
    ) -> Iterator[tuple[bytes, int]]:
        """(key, length) of every object whose key begins with ``prefix``, in key order. What a failing master has is missing."""
        return heapq.merge(*(master.list(prefix, timeout_s) for master in self._up()))

    def stats(self, timeout_s: float | None = None) -> StoreStats:
        """Of all masters that answer, together. Raises ``ConnectionError`` if none does."""
        found = self._ask_all(lambda master: master.stats(timeout_s))
        return found[0] if len(found) == 1 else _summed(found)

    def holders(self, timeout_s: float | None = None) -> HolderTable:
        """Of all masters that answer; a holder has an entry for each. Raises ``ConnectionError`` if none does."""
        found = self._ask_all(lambda master: master.holders(timeout_s))
        entries: _Entries = [entry for table in found for entry in table.holders]
        return HolderTable(0, found[0].epoch, entries)

    def tiers(
        self,
        keys: Sequence[bytes],
        timeout_s: float | None = None,
        groups: Sequence[bytes] | None = None,
    ) -> _Tiers:
        """In which tiers each key is readable, without touching anything."""
        nowhere: frozenset[Tier] = frozenset()
        return self._each(
            keys, groups, nowhere, lambda master, some: master.tiers(_of(keys, some), timeout_s)
        )

    def groups_of(self, keys: Sequence[bytes], timeout_s: float | None = None) -> "_List[bytes]":
        """A group for each key under which its master is found, whatever group it was put under: for people, who see keys alone. With
        several masters all of them are asked; of a key that none of them has, the key itself."""
        if len(self.masters) == 1:
            return list(keys)
        groups = list(keys)
        for name, master in zip(self._names, self.masters, strict=True):
            has = (
                master.exists(keys, timeout_s=timeout_s)
                if self._is_up(master)
                else [False] * len(keys)
            )
            groups = [
                self._group_at(name) if there else group
                for there, group in zip(has, groups, strict=True)
            ]
        return groups

    @property
    def prefetched(self) -> PrefetchCounters:
        """What became of this client's prefetches so far."""
        together = PrefetchCounters()
        for master in self.masters:
            together.add(master.prefetcher.counters)
        return together

    # ------------------------------------------------------------------------------------------ inside

    def _reach_one(self, timeout_s: float) -> None:
        """Raises ``ChannelError`` or ``TimeoutError`` if no master answers."""
        deadline = time.monotonic() + timeout_s
        failures: _Failures = []
        for master in self.masters:
            try:
                master.reach(
                    deadline
                    if len(self.masters) == 1
                    else min(deadline, time.monotonic() + timeout_s / len(self.masters))
                )
            except (ChannelError, TimeoutError) as error:
                failures.append(error)
        if len(failures) == len(self.masters):
            raise failures[0]

    def _master_of(self, group: bytes) -> OneMaster:
        return self.masters[place_of(self._names, group)]

    def _group_at(self, name: bytes) -> bytes:
        """Some group that is with the master of that name."""
        return next(
            group
            for group in map(str.encode, map(str, itertools.count()))
            if self._names[place_of(self._names, group)] == name
        )

    def _is_up(self, master: OneMaster) -> bool:
        """Whether a call goes out to ``master``; it always does if there is time to wait for it."""
        return self._patient or master.is_up()

    def _divided(self, keys: Sequence[bytes], groups: Sequence[bytes] | None) -> _Work:
        """Which indices of ``keys`` are which master's."""
        if groups is not None and len(groups) != len(keys):
            raise ValueError(f"{len(keys)} keys and {len(groups)} groups")
        if len(self.masters) == 1:
            return [(self.masters[0], range(len(keys)))]
        by_group: dict[bytes, OneMaster] = {}
        work: dict[OneMaster, _Places] = {}
        for index, given in enumerate(keys if groups is None else groups):
            group = given if isinstance(given, bytes) else b""
            master = by_group.get(group)
            if master is None:
                master = by_group[group] = self._master_of(group)
            work.setdefault(master, []).append(index)
        return [*work.items()]

    def _statuses(
        self,
        keys: Sequence[bytes],
        groups: Sequence[bytes] | None,
        call: Callable[[OneMaster, "_Indices"], _Statuses],
    ) -> _Statuses:
        def watched(master: OneMaster, some: _Indices) -> _Statuses:
            statuses = call(master, some)
            if all(status in _FAILED for status in statuses):
                master.suspect()
            return statuses

        return self._each(keys, groups, Status.UNAVAILABLE, call if self._patient else watched)

    def _each(
        self,
        keys: Sequence[bytes],
        groups: Sequence[bytes] | None,
        absent: T,
        call: Callable[[OneMaster, "_Indices"], "_List[T]"],
    ) -> "_List[T]":
        """The answers of every key's master in the order of the keys, masters asked at once; ``absent`` for one that is down."""
        if self._threads is None:
            if groups is not None and len(groups) != len(keys):
                raise ValueError(f"{len(keys)} keys and {len(groups)} groups")
            return (
                call(self.masters[0], range(len(keys)))
                if self._is_up(self.masters[0])
                else [absent] * len(keys)
            )
        answers = [absent] * len(keys)
        under_way = [
            (
                some,
                self._threads.submit(
                    lambda master, some: call(master, some) if master.is_up() else None,
                    master,
                    some,
                ),
            )
            for master, some in self._divided(keys, groups)
        ]
        for some, work in under_way:
            for index, answer in zip(some, work.result() or [absent] * len(some), strict=True):
                answers[index] = answer
        return answers

    def _up(self) -> "_List[OneMaster]":
        return [master for master in self.masters if self._is_up(master)]

    def _ask_all(self, ask: Callable[[OneMaster], T]) -> "_List[T]":
        found: _List[T] = []
        failure: ConnectionError | None = None
        for master in self._up():
            try:
                found.append(ask(master))
            except ConnectionError as error:
                failure = error
        if not found:
            raise failure or ConnectionError("no master of the store answers")
        return found


_List: TypeAlias = list
_Places: TypeAlias = list[int]
_Indices: TypeAlias = Sequence[int]
_Entries: TypeAlias = list[HolderEntry]
_Failures: TypeAlias = list[ChannelError | TimeoutError]


def _of(items: Sequence[T], indices: Sequence[int]) -> list[T]:
    return list(items) if len(indices) == len(items) else [items[index] for index in indices]


def _summed(found: Sequence[StoreStats]) -> StoreStats:
    """Figures of several masters. A holder counts once for each."""
    counters: dict[str, int] = {}
    tenants: dict[str, int] = {}
    for stats in found:
        for into, some in ((counters, stats.counters), (tenants, stats.tenants)):
            for name, count in some.items():
                into[name] = into.get(name, 0) + count
    totals = {name: sum(getattr(stats, name) for stats in found) for name in _NUMBERS}
    return replace(found[0], **totals, counters=counters, tenants=tenants)
