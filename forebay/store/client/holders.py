"""Where holders are, and how this process reaches each: mapped memory if it is on this machine, else TCP.

master's table {number: HolderEntry} -> Remote(pool of channels) or Local(segment, pool of channels with staging)
"""

import contextlib
import fcntl
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from types import TracebackType

import numpy as np

from forebay.store.address import Address, this_machine
from forebay.store.client.channel import Channel, ChannelError
from forebay.store.client.lent import Lent
from forebay.store.holder.log.hints import LogView
from forebay.store.holder.mapping import Mapping
from forebay.store.holder.segment import MappedSegment
from forebay.store.wire import auth
from forebay.store.wire.frames import PREFIX, FrameError, decode_opening, encode, read_prefix
from forebay.store.wire.messages import Challenge, HolderEntry, HolderTable, Refused, Role, Welcome

MAX_IDLE_CHANNELS = 16
IDLE_S = 30.0
REGIONS = 4  # of staging memory: while one is copied by us, the holder works on others
REGION_BYTES = 8 << 20
STAGING_BYTES = REGIONS * REGION_BYTES
REFRESH_EVERY_S = 0.02


class Pool:
    """Idle channels to one place. ``lease`` gives one to one thread; it comes back unless something went wrong with it. The one used
    last is used next, so that those of a crowd long ago are found unused for `IDLE_S`, and closed."""

    def __init__(self, connect: Callable[[float], Channel]) -> None:
        self._connect = connect
        self._idle: list[Channel] = []  # the longest unused first
        self._lock = threading.Lock()
        self._closed = False

    def lease(self, deadline: float) -> "Lease":
        """For a ``with``. Raises ``ChannelError``, ``TimeoutError``. Any exception in the block closes the channel."""
        return Lease(self, deadline)

    def take(self, deadline: float) -> Channel:
        return self._idle_one() or self._connect(deadline)

    def give_back(self, channel: Channel) -> None:
        for unused in self._keep(channel):
            unused.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def _keep(self, channel: Channel) -> list[Channel]:
        """What has to be closed: ``channel`` itself if there is no room, and those that have been idle for too long."""
        unused = []
        channel.unused_since = time.monotonic()
        with self._lock:
            while self._idle and channel.unused_since - self._idle[0].unused_since > IDLE_S:
                unused.append(self._idle.pop(0))
            if self._closed or len(self._idle) >= MAX_IDLE_CHANNELS:
                unused.append(channel)
            else:
                self._idle.append(channel)
        return unused

    def _idle_one(self) -> Channel | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                channel = self._idle.pop()
            if not channel.is_stale():
                return channel
            channel.close()


class Lease:
    """A channel of ``pool`` for one block. A class, since a generator takes longer to enter and leave than a small get has."""

    __slots__ = ("_channel", "_deadline", "_pool")

    def __init__(self, pool: Pool, deadline: float) -> None:
        self._pool, self._deadline = pool, deadline

    def __enter__(self) -> Channel:
        self._channel = self._pool.take(self._deadline)
        return self._channel

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._pool.give_back(self._channel)
        else:
            self._channel.close()


class LocalChannel(Channel):
    """A channel through the holder's door, with the staging memory that was handed over, and what else this process lends."""

    def __init__(self, connected: socket.socket, lent: Lent | None = None) -> None:
        super().__init__(connected)
        self.lent = lent
        self._fd = os.memfd_create("forebay-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, STAGING_BYTES)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._mapping = Mapping(self._fd, STAGING_BYTES, writable=True)
        self.staging = np.frombuffer(self._mapping.view, dtype=np.uint8)
        self._given: list[int] = []  # descriptors: the segment, maybe what a log's view needs
        self.segment_bytes = 0

    @classmethod
    def enter(
        cls, name: str, tenant: str, secret: bytes, deadline: float, lent: Lent | None = None
    ) -> "LocalChannel":
        """Through the door ``name``. Raises ``ChannelError``, ``TimeoutError``."""
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            door.settimeout(max(0.001, deadline - time.monotonic()))
            door.connect("\0" + name)
            channel = cls(door, lent)
        except OSError as error:
            door.close()
            raise ChannelError(f"door {name}: {error}") from error
        try:
            channel._exchange(tenant, secret, deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def _exchange(self, tenant: str, secret: bytes, deadline: float) -> None:
        given, _ = self.receive(decode_opening, deadline)
        if not isinstance(given, Challenge):
            raise ChannelError("the holder sent no challenge")
        hello = auth.hello(given, Role.CLIENT, tenant, secret)
        try:
            socket.send_fds(
                self._socket,
                [encode(hello)],
                [self._fd] if self.lent is None else [self._fd, self.lent.fd],
            )
            self._set_timeout(deadline, send=False)
            data, self._given, _, _ = socket.recv_fds(self._socket, 4096, 3)
        except OSError as error:
            raise ChannelError(f"door: {error}") from error
        try:
            prefix = read_prefix(data) if len(data) >= PREFIX.size else None
            answer = decode_opening(data[PREFIX.size :])
        except FrameError as error:
            raise ChannelError(str(error)) from error
        if isinstance(answer, Refused):
            raise ChannelError(f"refused: {answer.reason}")
        if prefix is None or not isinstance(answer, Welcome) or not self._given:
            raise ChannelError("the holder sent no welcome")
        try:
            auth.verify_welcome(given, hello, answer, secret)
        except auth.AuthError as error:
            raise ChannelError(str(error)) from error
        self.segment_bytes = answer.segment_bytes

    def take_segment(self) -> MappedSegment:
        """Raises ``OSError`` for memory that is not what was promised, or may be taken away under us."""
        return MappedSegment(self._given.pop(0), self.segment_bytes)

    def take_log(self) -> LogView | None:
        """After the segment was taken. None if the holder shows us no log."""
        given, self._given = self._given, []
        try:
            return LogView(given) if len(given) == 2 else None
        except (OSError, ValueError):
            return None

    def drop_given(self) -> None:
        """One channel's is enough."""
        for fd in self._given:
            os.close(fd)
        self._given = []

    def close(self) -> None:
        super().close()
        self.drop_given()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self.staging = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._mapping.close()


class HolderPeer:
    """One incarnation of one holder. ``segment`` is set if its memory is mapped here, ``log`` if we may read its log ourselves."""

    def __init__(
        self,
        entry: HolderEntry,
        tenant: str,
        secret: bytes,
        tls: ssl.SSLContext | None,
        lent: Lent | None,
        *,
        local: bool,
    ) -> None:
        self.entry = entry
        self.number = entry.number
        self.segment: MappedSegment | None = None
        self.log: LogView | None = None
        self._tenant, self._secret, self._tls, self._lent = tenant, secret, tls, lent
        self._lock = threading.Lock()
        self._door_open = local
        self.pool = Pool(self._connect)
        self.words = Pool(self._connect_by_tcp)
        """For messages without answer or payload. A channel of the other pool that was made for one of them would be taken for the next
        read, whose staging memory nobody has touched yet."""

    def attach(self, deadline: float) -> bool:
        """Whether its memory is mapped here, trying to if that was not tried yet."""
        if self._door_open and self.segment is None:
            with contextlib.suppress(ChannelError, TimeoutError), self.pool.lease(deadline):
                pass
        return self.segment is not None

    def close(self) -> None:
        self.pool.close()
        self.words.close()
        self.log = None
        segment, self.segment = (
            self.segment,
            None,
        )  # readers that are still copying hold it themselves
        if segment is not None:
            segment.close()

    def _connect(self, deadline: float) -> Channel:
        if self._door_open:
            try:
                return self._enter(deadline)
            except TimeoutError:
                raise
            except OSError:
                self._door_open = False  # then by TCP like everyone
        return self._connect_by_tcp(deadline)

    def _connect_by_tcp(self, deadline: float) -> Channel:
        return Channel.connect(
            Address(self.entry.host, self.entry.port),
            self._tenant,
            self._secret,
            deadline,
            self._tls,
        )

    def _enter(self, deadline: float) -> Channel:
        """Through the door. Raises ``OSError``, which ``ChannelError`` and ``TimeoutError`` are too."""
        channel = LocalChannel.enter(
            self.entry.unix, self._tenant, self._secret, deadline, self._lent
        )
        try:
            with self._lock:
                if self.segment is None:
                    self.segment = channel.take_segment()
                    self.log = channel.take_log()
        except OSError:
            channel.close()
            raise
        channel.drop_given()
        return channel


class Holders:
    """The holders of one master, by number. ``ask`` fetches the master's table."""

    def __init__(
        self,
        tenant: str,
        secret: bytes,
        tls: ssl.SSLContext | None,
        ask: Callable[[float], HolderTable],
        *,
        allow_local: bool,
        lent: Lent | None = None,
    ) -> None:
        self._tenant, self._secret, self._tls, self._ask, self._lent = (
            tenant,
            secret,
            tls,
            ask,
            lent,
        )
        self._machine = this_machine() if allow_local else ""
        self._lock = threading.Lock()
        self._peers: dict[int, HolderPeer] = {}
        self._epoch = 0
        self._asked_at = 0.0

    def get(self, number: int, deadline: float) -> HolderPeer | None:
        """None if the master knows of no such holder. Raises as ``ask`` does."""
        peer = self._peers.get(number)
        if peer is None:
            self.refresh(
                deadline, even_now=True
            )  # the master has just named it, so it is in its table
            peer = self._peers.get(number)
        return peer

    def known(self, number: int) -> HolderPeer | None:
        return self._peers.get(number)

    def logs(self) -> list[tuple[int, LogView]]:
        """The logs that we may read ourselves, by number of their holder."""
        return [
            (number, log)
            for number, peer in [*self._peers.items()]
            if (log := peer.log) is not None
        ]

    def tell_of_own_reads(self, deadline: float) -> None:
        """Now and then, holders hear what was read past them."""
        for peer in [*self._peers.values()]:
            told = peer.log.to_tell() if peer.log is not None else None
            if told is not None:
                with (
                    contextlib.suppress(ChannelError, TimeoutError),
                    peer.words.lease(deadline) as channel,
                ):
                    channel.send(encode(told, optional=True), (), deadline)

    def refresh_quietly(self, deadline: float) -> None:
        """``refresh``, if the master answers."""
        with contextlib.suppress(ChannelError, TimeoutError):
            self.refresh(deadline)

    def refresh(self, deadline: float, *, even_now: bool = False) -> None:
        """Look again where holders are, unless that was done just now."""
        with self._lock:
            if time.monotonic() - self._asked_at < REFRESH_EVERY_S and not even_now:
                return
            table = self._ask(deadline)
            self._asked_at = time.monotonic()
            stale = [] if table.epoch == self._epoch else list(self._peers.values())
            known = {} if table.epoch != self._epoch else self._peers
            peers: dict[int, HolderPeer] = {}
            for entry in table.holders:
                peer = known.get(entry.number)
                if peer is not None and peer.entry.instance == entry.instance:
                    peers[entry.number] = peer
                    continue
                if peer is not None:
                    stale.append(peer)
                local = bool(entry.unix) and entry.machine == self._machine
                peers[entry.number] = HolderPeer(
                    entry, self._tenant, self._secret, self._tls, self._lent, local=local
                )
            self._epoch, self._peers = table.epoch, peers
        for peer in stale:
            peer.close()

    def forget(self) -> None:
        """The master has changed: numbers mean nothing any more."""
        with self._lock:
            self._asked_at = 0.0

    def check_epoch(self, epoch: int) -> None:
        """A master of another epoch answered: its numbers are not ours."""
        if epoch != self._epoch:
            self.forget()
            with self._lock:
                peers, self._peers, self._epoch = self._peers, {}, epoch
            for peer in peers.values():
                peer.close()

    def close(self) -> None:
        with self._lock:
            peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()
