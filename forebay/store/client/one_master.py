"""The client of one master: caller's buffers in, one status per key out, nothing raised for what a store may do on a bad day.

Thread-safe: connections are leased per call, and copies run without the GIL.
"""

import ctypes
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from typing_extensions import Buffer

from forebay.store.address import Address
from forebay.store.backend import Status
from forebay.store.client.channel import Bytes, Channel, ChannelError
from forebay.store.client.gets import Reader, Want, locate
from forebay.store.client.holders import Holders, Pool
from forebay.store.client.lent import Lent
from forebay.store.client.own_reads import OwnRead
from forebay.store.client.prefetcher import Prefetcher, PrefetchOptions
from forebay.store.client.puts import Gift, Putter
from forebay.store.holder.segment import as_bytes
from forebay.store.wire import auth
from forebay.store.wire.frames import MAX_LOOKUPS, decode_master_to_client, encode
from forebay.store.wire.messages import (
    MAX_KEY_BYTES,
    MAX_KEYS,
    AskHolders,
    AskStats,
    ClientToMaster,
    Codes,
    Count,
    Exists,
    Get,
    HolderTable,
    KeyPage,
    ListKeys,
    Located,
    MasterToClient,
    MatchPrefix,
    Place,
    PrefetchKeys,
    Query,
    Remove,
    StoreStats,
    Tier,
)

GET_BATCH_BYTES = 256 << 20
STALE_FOR_S = 2.0
MAX_STALE_KEYS = 65536
LIST_PAGE = 1000
RETRY_EVERY_S = 0.05
READ_AGAIN = 20
READ_PAUSE_S = 0.05
PROBE_S = 0.25
DOWN_S = 1.0
_PASSING = (Status.LEASE_EXPIRED, Status.UNAVAILABLE)
PROMOTION_POLL_S = 0.001
DELEGATE_S = 2.0
_NOT_KNOWN = bytes([Status.UNAVAILABLE])
T = TypeVar("T", bound=MasterToClient)
# OneMaster has a method called list, so annotations after it need other names for the type.
_Statuses: TypeAlias = list[Status]
_Gifts: TypeAlias = list[Gift]
_Wants: TypeAlias = list[Want]
_Places: TypeAlias = list[Place]
_Tiers: TypeAlias = list[frozenset[Tier]]


class OneMaster:
    """One tenant's view of what one master has. ``tls``: wherever TCP is used. The methods are those of `store.StoreClient`."""

    def __init__(
        self,
        master: Address,
        tenant: str = auth.DEFAULT_TENANT,
        secret: bytes = b"",
        *,
        timeout_s: float = 5.0,
        allow_local: bool = True,
        prefetch: PrefetchOptions | None = None,
        tls: ssl.SSLContext | None = None,
        lent: Lent | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._tenant = tenant
        self.prefetcher = Prefetcher(prefetch or PrefetchOptions(), self._query, self._delegate)
        self._master = Pool(lambda deadline: Channel.connect(master, tenant, secret, deadline, tls))
        self._holders = Holders(
            tenant, secret, tls, self._ask_holders, allow_local=allow_local, lent=lent
        )
        self._down_until = 0.0
        self._suspect = False
        self._stale: dict[bytes, float] = {}
        self._stale_lock = threading.Lock()

    def is_up(self) -> bool:
        """Whether the master answers: known from an idle connection, else found out within ``PROBE_S``, at most once in ``DOWN_S``."""
        now = time.monotonic()
        if self._down_until > now:
            return False
        try:
            if self._suspect:
                self._ask_holders(now + PROBE_S)
                self._suspect = False
            else:
                with self._master.lease(now + PROBE_S):
                    pass
        except (ChannelError, TimeoutError):
            self._down_until = time.monotonic() + DOWN_S
            return False
        return True

    def suspect(self) -> None:
        """A whole call came to nothing: see that the master answers before the next."""
        self._suspect = True

    def reach(self, deadline: float) -> None:
        """Learn the holders. Raises ``ChannelError``, ``TimeoutError``."""
        self._holders.refresh(deadline)

    def close(self) -> None:
        self.prefetcher.close()
        self._master.close()
        self._holders.close()

    # ------------------------------------------------------------------------------------------ writing

    def put(self, key: bytes, buf: Buffer) -> Status:
        """Store all of ``buf``; it is read before the return. EXISTS if an object of equal length is there."""
        return self.put_from([key], [buf])[0]

    def put_from(
        self, keys: Sequence[bytes], bufs: Sequence[Buffer], timeout_s: float | None = None
    ) -> list[Status]:
        """Store every buffer under its key. Raises ``ValueError`` if there are not as many keys as buffers."""
        if len(keys) != len(bufs):
            raise ValueError(f"{len(keys)} keys and {len(bufs)} buffers")
        deadline = self._deadline(timeout_s)
        gifts = []
        for key, buf in zip(keys, bufs, strict=True):
            try:
                gift = Gift(key, as_bytes(buf))
            except (TypeError, ValueError):
                gift = Gift(key, as_bytes(b""))
            if not _is_key(key) or not len(gift.source):
                gift.status = Status.INVALID
            gifts.append(gift)
        self._put(gifts, deadline)
        with self._stale_lock:
            for gift in gifts:
                if gift.status in (Status.OK, Status.EXISTS):
                    self._stale.pop(gift.key, None)
        return [Status.UNAVAILABLE if gift.status is None else gift.status for gift in gifts]

    def remove(self, keys: Sequence[bytes], timeout_s: float | None = None) -> list[Status]:
        """OK once every replica's holder has logged the removal. UNAVAILABLE: nothing was removed. TIMEOUT: it may have been."""
        deadline = self._deadline(timeout_s)
        statuses: list[Status] = []
        for some in _slices(keys, MAX_KEYS):
            statuses += self._codes(lambda call, some=some: Remove(call, some), len(some), deadline)  # type: ignore[misc]
        return statuses

    # ------------------------------------------------------------------------------------------ reading

    def get(self, key: bytes, timeout_s: float | None = None) -> bytes | None:
        """The whole object, or None."""
        deadline = self._deadline(timeout_s)
        if not _is_key(key):
            return None
        return self._get_one(key, deadline)

    def get_into(
        self,
        keys: Sequence[bytes],
        bufs: Sequence[Buffer],
        offsets: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[Status]:
        """Fill each (writable, contiguous) buffer from its object, from ``offsets`` on (default 0).

        After any status but OK a buffer's bytes are undefined. INVALID: the buffer cannot be written, or the object is shorter
        than offset + buffer. Raises ``ValueError`` if the lists differ in length.
        """
        starts = [0] * len(keys) if offsets is None else offsets
        if not len(keys) == len(bufs) == len(starts):
            raise ValueError(f"{len(keys)} keys, {len(bufs)} buffers, {len(starts)} offsets")
        deadline = self._deadline(timeout_s)
        wants = [_want(key, buf, start) for key, buf, start in zip(keys, bufs, starts, strict=True)]
        self._read([want for want in wants if want.status is not Status.INVALID], deadline)
        return [want.status for want in wants]

    def exists(
        self, keys: Sequence[bytes], prefetch: bool = False, timeout_s: float | None = None
    ) -> list[bool]:
        """Which keys can be read now. Neither a lease nor a use. ``prefetch``: they will be read soon; what is on SSD only is brought
        to memory meanwhile, if this client has prefetching enabled. That costs the probe no round trip."""
        if prefetch and self.prefetcher.options.enabled:
            self.prefetcher.submit(keys)
        deadline = self._deadline(timeout_s)
        found: list[bool] = []
        for some in _slices(keys, MAX_KEYS):
            answer = self._ask(lambda call, some=some: Exists(call, some), Codes, deadline)  # type: ignore[misc]
            codes = (
                answer.codes
                if answer is not None and len(answer.codes) == len(some)
                else _NOT_KNOWN * len(some)
            )
            found += [
                code == 0 for code in codes
            ]  # OK; bytes, since making 128 statuses would take longer than asking for them
        if self._stale:
            found = [
                there and not self._is_stale(key) for key, there in zip(keys, found, strict=True)
            ]
        return found

    def prefetch(self, keys: Sequence[bytes]) -> int:
        """Bring these to memory soon, hint or not; how many were enqueued (the others were, lately)."""
        return self.prefetcher.submit(keys)

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes] = (),
        prefetch: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """How many leading keys have every one of ``parts`` (or are there themselves, if there are no parts). ``prefetch`` as for
        ``exists``, for the keys that match."""
        deadline = self._deadline(timeout_s)
        matched = 0
        for some in _slices(keys, max(1, min(MAX_KEYS, MAX_LOOKUPS // max(1, len(parts))))):
            answer = self._ask(
                lambda call, some=some: MatchPrefix(call, some, [*parts]),  # type: ignore[misc]
                Count,
                deadline,
            )
            if answer is None:
                break
            count = min(answer.count, self._first_stale(some, parts))
            matched += count
            if count < len(some):
                break
        if prefetch and self.prefetcher.options.enabled:
            self.prefetcher.submit(
                [key + part for key in keys[:matched] for part in parts or (b"",)]
            )
        return matched

    def list(
        self, prefix: bytes = b"", timeout_s: float | None = None
    ) -> Iterator[tuple[bytes, int]]:
        """(key, length) of every object whose key begins with ``prefix``, in key order. Ends early if the store fails."""
        after = b""
        while True:
            deadline = self._deadline(timeout_s)
            page = self._ask(
                lambda call, after=after: ListKeys(call, prefix, after, LIST_PAGE),  # type: ignore[misc]
                KeyPage,
                deadline,
            )
            if page is None or not page.keys:
                return
            yield from page.keys
            after = page.keys[-1][0]

    def stats(self, timeout_s: float | None = None) -> StoreStats:
        """Raises ``ConnectionError`` if the master does not answer."""
        answer = self._ask(AskStats, StoreStats, self._deadline(timeout_s))
        if answer is None:
            raise ConnectionError("the store's master does not answer")
        return answer

    def holders(self, timeout_s: float | None = None) -> HolderTable:
        """Raises ``ConnectionError`` if the master does not answer."""
        answer = self._ask(AskHolders, HolderTable, self._deadline(timeout_s))
        if answer is None:
            raise ConnectionError("the store's master does not answer")
        return answer

    def tiers(self, keys: Sequence[bytes], timeout_s: float | None = None) -> _Tiers:
        """In which tiers each key is readable, without touching anything."""
        deadline = self._deadline(timeout_s)
        tiers: _Tiers = []
        for some in _slices(keys, MAX_KEYS):
            answer = self._ask(lambda call, some=some: Query(call, some), Located, deadline)  # type: ignore[misc]
            places = answer.places if answer is not None else []
            tiers += [frozenset(spot.tier for spot in place.spots) for place in places] or [
                frozenset()
            ] * len(some)
        return tiers

    # ------------------------------------------------------------------------------------------ inside

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    def _put(self, gifts: _Gifts, deadline: float) -> None:
        """Settle all gifts; a master that is lost meanwhile is asked again for those that are open."""
        while any(gift.status is None for gift in gifts):
            try:
                with self._master.lease(deadline) as channel:
                    self._holders.check_epoch(channel.epoch)
                    Putter(channel, self._holders, deadline).put(
                        [gift for gift in gifts if gift.status is None]
                    )
            except TimeoutError:
                for gift in gifts:
                    gift.status = Status.TIMEOUT if gift.status is None else gift.status
            except ChannelError:
                if not _pause(deadline):
                    return

    def _read(self, wants: _Wants, deadline: float) -> None:
        for some in _by_bytes(wants):
            self._read_some(some, deadline)
            for _ in range(
                READ_AGAIN
            ):  # the master's word was overtaken by an eviction or a holder's restart: ask it once more
                again = [
                    want
                    for want in some
                    if want.stale or (want.located and want.status in _PASSING)
                ]
                if not again or not _pause(deadline, READ_PAUSE_S):
                    break
                for want in again:
                    want.stale = False
                self._holders.refresh_quietly(deadline)
                self._read_some(again, deadline)
            if stale := [want.key for want in some if want.stale]:
                self._note_stale(stale)

    def _read_some(self, wants: _Wants, deadline: float) -> None:
        asked = time.monotonic()
        own = self._own_read(wants[0].key, wants[0].target) if len(wants) == 1 else None
        if own is not None and own.unasked(wants[0], deadline):
            self._tell_if_due(own, deadline)
            return
        answer = self._ask_places([want.key for want in wants], deadline, own)
        if answer is None or len(answer.places) != len(wants):
            status = Status.TIMEOUT if time.monotonic() >= deadline else Status.UNAVAILABLE
            for want in wants:
                want.status = status
            return
        for want, place in zip(wants, answer.places, strict=True):
            locate(want, place)
        if own is not None and self._settle(own, wants[0], deadline):
            return
        self._await_promotions(wants, deadline)
        Reader(self._holders, deadline, asked + answer.ttl_s).read(wants)

    def _get_one(self, key: bytes, deadline: float) -> bytes | None:
        """A get whose buffer is made when the master has told the length: a bytes object that is filled before anyone sees it."""
        asked = time.monotonic()
        own = self._own_read(key)
        answer = self._ask_places([key], deadline, own)
        if answer is None or len(answer.places) != 1 or answer.places[0].code != Status.OK:
            return None
        try:
            made, target = _new_bytes(answer.places[0].length)
        except MemoryError:  # more than there can be here, whoever claims it
            return None
        want = Want(key, 0, target)
        locate(want, answer.places[0])
        if own is not None and self._settle(own, want, deadline):
            return made
        self._await_promotions([want], deadline)
        Reader(self._holders, deadline, asked + answer.ttl_s).read([want])
        if want.status is not Status.OK:
            want.stale = False
            self._read([want], deadline)
        return made if want.status is Status.OK else None

    def _own_read(self, key: bytes, target: Bytes | None = None) -> OwnRead | None:
        """Not of what is on its way to memory: the holder reads that anyway."""
        if self.prefetcher.options.enabled and self.prefetcher.under_way([key]):
            return None
        for number, log in self._holders.logs():
            own = OwnRead.prepare(log, number, self._tenant, key, target)
            if own is not None:
                return own
        return None

    def _settle(self, own: OwnRead, want: Want, deadline: float) -> bool:
        if not own.settle(want, deadline):
            return False
        self._tell_if_due(own, deadline)
        return True

    def _tell_if_due(self, own: OwnRead, deadline: float) -> None:
        if own.view.has_to_tell():
            self._holders.tell_of_own_reads(deadline)

    def _await_promotions(self, wants: _Wants, deadline: float) -> None:
        """Keys headed for the SSD get one last attempt at a promotion; those under way are waited for, all together for at most
        ``get_wait_ms``. Then the SSD is read."""
        options = self.prefetcher.options
        if not options.enabled:
            return
        cold = [want for want in wants if want.spots and want.spots[0].tier is Tier.SSD]
        if options.get_wait_ms <= 0:
            self.prefetcher.overtaken([want.key for want in cold])
            return
        if not cold:
            return
        self.prefetcher.submit([want.key for want in cold], demand=True)
        until = min(deadline, time.monotonic() + options.get_wait_ms / 1e3)
        live = set(self.prefetcher.under_way([want.key for want in cold]))
        waiting = [want for want in cold if want.key in live]
        while waiting and time.monotonic() + PROMOTION_POLL_S < until:
            time.sleep(PROMOTION_POLL_S)
            places = self._query([want.key for want in waiting], until)
            warm = [
                want
                for want, place in zip(waiting, places, strict=False)
                if place.spots and place.spots[0].tier is Tier.MEMORY
            ]
            if warm:
                self._relocate(warm, until)
            waiting = [want for want in waiting if want not in warm]

    def _relocate(self, wants: _Wants, deadline: float) -> None:
        """They are in memory now: lease them. The earlier lease's end stays in force for the batch, which is the earlier one."""
        answer = self._ask_places([want.key for want in wants], deadline)
        if answer is not None and len(answer.places) == len(wants):
            for want, place in zip(wants, answer.places, strict=True):
                locate(want, place)

    def _query(self, keys: Sequence[bytes], deadline: float) -> _Places:
        answer = self._ask(lambda call: Query(call, [*keys]), Located, deadline)
        return answer.places if answer is not None else []

    def _delegate(self, number: int, keys: Sequence[bytes], demand: bool) -> bool:
        """Tell a holder to promote keys; it does not answer."""
        deadline = time.monotonic() + DELEGATE_S
        message = PrefetchKeys([*keys], self.prefetcher.options.hint_window_s, demand)
        try:
            peer = self._holders.get(number, deadline)
            if peer is None:
                return False
            with peer.words.lease(deadline) as channel:
                channel.send(encode(message, optional=True), (), deadline)
            return True
        except (ChannelError, TimeoutError):
            return False

    def _ask_places(
        self, keys: Sequence[bytes], deadline: float, own: OwnRead | None = None
    ) -> Located | None:
        """Where to read ``keys``, for which somebody waits. ``own``: a read that goes on meanwhile."""
        return self._ask(lambda call: Get(call, [*keys]), Located, deadline, own, hurry=True)

    def _ask(
        self,
        make: Callable[[int], ClientToMaster],
        kind: type[T],
        deadline: float,
        own: OwnRead | None = None,
        *,
        hurry: bool = False,
    ) -> T | None:
        """One question to the master, asked again on a new connection while there is time if the old one is lost."""
        beside = own.read if own is not None else None
        while True:
            try:
                with self._master.lease(deadline) as channel:
                    self._holders.check_epoch(channel.epoch)
                    answer = channel.ask(
                        make(channel.new_call()),
                        decode_master_to_client,
                        deadline,
                        beside,
                        hurry=hurry,
                    )
                    return answer if isinstance(answer, kind) else None
            except TimeoutError:
                return None
            except ChannelError:
                if not _pause(deadline):
                    return None

    def _codes(
        self, make: Callable[[int], ClientToMaster], count: int, deadline: float
    ) -> _Statuses:
        answer = self._ask(make, Codes, deadline)
        if answer is None or len(answer.codes) != count:
            return [Status.TIMEOUT] * count
        return [Status(code) for code in answer.codes]

    def _ask_holders(self, deadline: float) -> HolderTable:
        with self._master.lease(deadline) as channel:
            answer = channel.ask(AskHolders(channel.new_call()), decode_master_to_client, deadline)
        if not isinstance(answer, HolderTable):
            raise ChannelError("a table of holders was due")
        return answer

    def _note_stale(self, keys: Sequence[bytes]) -> None:
        """Negative cache: the master says yes, the holder no. For a moment ``exists`` believes the holder."""
        with self._stale_lock:
            if len(self._stale) > MAX_STALE_KEYS:
                self._stale.clear()
            until = time.monotonic() + STALE_FOR_S
            self._stale.update(dict.fromkeys(keys, until))

    def _is_stale(self, key: bytes) -> bool:
        until = self._stale.get(key)
        if until is None:
            return False
        if time.monotonic() < until:
            return True
        with self._stale_lock:
            self._stale.pop(key, None)
        return False

    def _first_stale(self, keys: Sequence[bytes], parts: Sequence[bytes]) -> int:
        if self._stale:
            for index, key in enumerate(keys):
                if any(self._is_stale(key + part) for part in parts or (b"",)):
                    return index
        return len(keys)


def _pause(deadline: float, pause_s: float = RETRY_EVERY_S) -> bool:
    """Wait a moment before asking again; False if there is no time left for that."""
    if time.monotonic() + pause_s >= deadline:
        return False
    time.sleep(pause_s)
    return True


def _is_key(key: object) -> bool:
    return isinstance(key, bytes) and 0 < len(key) <= MAX_KEY_BYTES


def _want(key: bytes, buf: Buffer, offset: int) -> Want:
    """INVALID if it cannot be read, or not into ``buf``."""
    try:
        want = Want(key, offset, as_bytes(buf))
    except (TypeError, ValueError):
        return Want(key, offset, as_bytes(b""), Status.INVALID)
    if not _is_key(key) or not len(want.target) or not want.target.flags.writeable:
        want.status = Status.INVALID
    return want


def _slices(keys: Sequence[bytes], size: int) -> list[list[bytes]]:
    return [list(keys[start : start + size]) for start in range(0, len(keys), size)]


def _by_bytes(wants: list[Want]) -> list[list[Want]]:
    """Consecutive wants of at most ``GET_BATCH_BYTES`` together (field report E4: no batch may outlive its lease)."""
    if len(wants) == 1:
        return [wants]
    batches: list[list[Want]] = []
    size = GET_BATCH_BYTES
    for want in wants:
        if size + len(want.target) > GET_BATCH_BYTES or len(batches[-1]) >= MAX_KEYS:
            batches.append([])
            size = 0
        batches[-1].append(want)
        size += len(want.target)
    return batches


_new_uninitialised = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_uninitialised.restype = ctypes.py_object
_new_uninitialised.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = [ctypes.py_object]


def _new_bytes(length: int) -> tuple[bytes, Bytes]:
    """A new bytes object and a writable view of its content, as C code makes them: fill it before anyone else has it."""
    made: bytes = _new_uninitialised(None, length)
    address = _address_of(made)
    return made, as_bytes((ctypes.c_ubyte * length).from_address(address or 0))
