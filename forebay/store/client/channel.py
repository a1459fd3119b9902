"""One blocking connection of a client, plain or inside TLS: frames out, frames in, payload straight into the caller's buffers.

Deadlines are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO) on a blocking socket, set anew before each wait: so a large receive is one
system call, and the GIL is released throughout.
"""

import ctypes
import errno
import os
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from forebay.store.address import Address
from forebay.store.backend import Status
from forebay.store.native import library as native
from forebay.store.native.reads import OneRead
from forebay.store.wire import auth
from forebay.store.wire.frames import (
    PREFIX,
    BodyDecoder,
    FrameError,
    Prefix,
    decode_opening,
    encode,
    read_prefix,
)
from forebay.store.wire.loopback import send_unpaced
from forebay.store.wire.messages import Challenge, Message, Refused, Role, Welcome

T = TypeVar("T")
_SCRATCH_BYTES = 8 << 10  # small, so that payload goes past it
_IOV_MAX = 512
LOOK_NS = 60_000  # somewhat more than a server takes to begin its answer
_TIMEVAL = struct.Struct("ll")
Bytes = npt.NDArray[np.uint8]


class ChannelError(ConnectionError):
    """The peer is gone, refuses us, or talks nonsense. The channel is of no more use."""


_STATUSES = {int(status): status for status in Status}


def status_of(code: int) -> Status:
    """What a peer's code means. Raises ``ChannelError`` for what is none."""
    try:
        return _STATUSES[code]
    except KeyError:
        raise ChannelError(f"{code} is no code") from None


class Channel:
    """Not for two threads at once. Any error but ``TimeoutError`` before a byte was sent leaves it unusable: close it."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(None)
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._scratch))
        self._begin = self._end = 0  # unread bytes of the scratch
        self._calls = 0
        self._timeouts = (0.0, 0.0)
        self.epoch = 0
        self.unused_since = 0.0
        """The pool's, which has it meanwhile (`holders.Pool`)."""

    @staticmethod
    def connect(
        address: Address,
        tenant: str,
        secret: bytes,
        deadline: float,
        tls: ssl.SSLContext | None = None,
    ) -> "Channel":
        """Raises ``ChannelError``, ``TimeoutError``."""
        try:
            connected = socket.create_connection(
                (address.host, address.port), max(0.001, deadline - time.monotonic())
            )
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelError(f"{address}: {error.strerror or error}") from error
        except UnicodeError as error:  # a host that cannot be a name
            raise ChannelError(f"{address}: {error}") from error
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_unpaced(connected)
        channel = (
            Channel(connected)
            if tls is None
            else TlsChannel.wrap(connected, address, tls, deadline)
        )
        try:
            channel.open(tenant, secret, deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def open(self, tenant: str, secret: bytes, deadline: float) -> None:
        """The opening exchange (`wire.auth`)."""
        given, _ = self.receive(decode_opening, deadline)
        if not isinstance(given, Challenge):
            raise ChannelError("the server sent no challenge")
        hello = auth.hello(given, Role.CLIENT, tenant, secret)
        self.send(encode(hello), (), deadline)
        answer, _ = self.receive(decode_opening, deadline)
        if isinstance(answer, Refused):
            raise ChannelError(f"refused: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise ChannelError("the server sent no welcome")
        try:
            auth.verify_welcome(given, hello, answer, secret)
        except auth.AuthError as error:
            raise ChannelError(str(error)) from error
        self.epoch = answer.epoch

    def new_call(self) -> int:
        self._calls += 1
        return self._calls

    def ask(
        self,
        message: Message,
        decode: BodyDecoder[T],
        deadline: float,
        beside: OneRead | None = None,
        *,
        hurry: bool = False,
    ) -> T:
        """Send a message without payload and wait for one without payload. ``beside``: a read that is to be begun before. ``hurry``: as
        for ``exchange``."""
        self.exchange(encode(message), deadline, beside, hurry=hurry)
        answer, prefix = self.receive(decode, deadline)
        if prefix.payload_bytes:
            raise ChannelError("a payload came where none was due")
        return answer

    def exchange(
        self, frame: bytes, deadline: float, beside: OneRead | None = None, *, hurry: bool = False
    ) -> None:
        """Send ``frame``, and receive what comes first if that can be had in the same breath (`native.exchange`, `OneRead.ask`).
        ``hurry``: spend some of a core on having it soon, if the machine is quiet enough for that to help."""
        exchange = native.exchange()
        if exchange is None or self._begin != self._end:
            if beside is not None:
                beside.begin()
            self.send(frame, (), deadline)
            return
        self._set_timeouts(deadline)
        self._begin = self._end = 0
        sent = ctypes.c_int64()
        fd, room, sent_at = self._socket.fileno(), _SCRATCH_BYTES, ctypes.byref(sent)
        count = beside.ask(fd, frame, self._address, room, sent_at) if beside is not None else None
        if count is None:
            count = exchange(
                fd, frame, len(frame), self._address, room, sent_at, LOOK_NS if hurry else 0
            )
        if count > 0:
            self._end = count
        elif count == 0:
            raise ChannelError("the peer closed the connection")
        elif count == -errno.EAGAIN:
            raise TimeoutError("no answer in time")
        elif count != -errno.EINTR:
            raise ChannelError(os.strerror(-count))
        elif sent.value < len(frame):
            self.send(frame[sent.value :], (), deadline)

    def send(self, frame: bytes, payload: Sequence[Bytes], deadline: float) -> None:
        """Gather ``frame`` and ``payload`` into the socket, without joining them first."""
        pending = [memoryview(frame), *(part.data for part in payload)]
        try:
            while pending:
                self._set_timeout(deadline, send=True)
                sent = self._transmit(pending)
                while pending and sent >= len(pending[0]):
                    sent -= len(pending.pop(0))
                if sent:
                    pending[0] = pending[0][sent:]
        except BlockingIOError as error:
            raise TimeoutError("sending took too long") from error
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelError(str(error)) from error

    def receive(self, decode: BodyDecoder[T], deadline: float) -> tuple[T, Prefix]:
        """The next frame's body; its payload is to be taken with ``receive_into`` before anything else."""
        try:
            if self._end - self._begin < PREFIX.size:
                self._need(PREFIX.size, deadline)
            prefix = read_prefix(self._scratch, self._begin)
            self._begin += PREFIX.size
            if prefix.body_bytes <= _SCRATCH_BYTES:
                if self._end - self._begin < prefix.body_bytes:
                    self._need(prefix.body_bytes, deadline)
                body = self._view[self._begin : self._begin + prefix.body_bytes]
                self._begin += prefix.body_bytes
                return decode(body), prefix
            large = np.empty(prefix.body_bytes, np.uint8)
            self.receive_into(large, deadline)
            return decode(large.data), prefix
        except FrameError as error:
            raise ChannelError(str(error)) from error

    def receive_into(self, target: Bytes, deadline: float, patience_s: float | None = None) -> None:
        """Fill ``target``. ``patience_s``: give up if nothing at all comes for so long, even before the deadline."""
        ready = min(len(target), self._end - self._begin)
        target[:ready] = np.frombuffer(self._view[self._begin : self._begin + ready], np.uint8)
        self._begin += ready
        view = target.data
        while ready < len(view):
            wait_until = (
                deadline if patience_s is None else min(deadline, time.monotonic() + patience_s)
            )
            ready += self._receive(view[ready:], wait_until, socket.MSG_WAITALL)

    def close(self) -> None:
        self._socket.close()

    def is_stale(self) -> bool:
        """Whether the idle channel was closed by its peer (or has bytes nobody asked for)."""
        if (stale := native.is_stale()) is not None:
            return bool(stale(self._socket.fileno()))
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _need(self, count: int, deadline: float) -> None:
        """Have at least ``count`` unread bytes in the scratch, which has fewer."""
        if self._begin + count > _SCRATCH_BYTES:
            left = self._end - self._begin
            self._scratch[:left] = self._scratch[self._begin : self._end]
            self._begin, self._end = 0, left
        elif self._begin == self._end:
            self._begin = self._end = 0
        while self._end - self._begin < count:
            self._end += self._receive(self._view[self._end :], deadline, 0)

    def _receive(self, into: memoryview, deadline: float, flags: int) -> int:
        try:
            self._set_timeout(deadline, send=False)
            count = self._take(into, flags)
        except BlockingIOError as error:
            raise TimeoutError("no answer in time") from error
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelError(str(error)) from error
        if count == 0:
            raise ChannelError("the peer closed the connection")
        return count

    def _transmit(self, pending: list[memoryview]) -> int:
        """Send some of what is pending, in order; how many bytes."""
        return self._socket.sendmsg(pending[:_IOV_MAX])

    def _take(self, into: memoryview, flags: int) -> int:
        return self._socket.recv_into(into, 0, flags)

    def _set_timeouts(self, deadline: float) -> None:
        """For both directions."""
        left = deadline - time.monotonic()
        known = self._timeouts
        if not (left > 0 and 0.8 * max(known) <= left <= min(known)):
            self._set_timeout(deadline, send=True)
            self._set_timeout(deadline, send=False)

    def _set_timeout(self, deadline: float, *, send: bool) -> None:
        """Raises ``TimeoutError`` if there is no time left."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time left")
        known = self._timeouts[send]
        if 0.8 * known <= left <= known:  # close enough, and a system call saved
            return
        micros = int(left * 1e6) + 1
        option = socket.SO_SNDTIMEO if send else socket.SO_RCVTIMEO
        self._socket.setsockopt(
            socket.SOL_SOCKET, option, _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)
        )
        self._timeouts = (self._timeouts[0], left) if send else (left, self._timeouts[1])


class TlsChannel(Channel):
    """The same inside TLS, where there is neither gathering nor waiting for all, and deadlines are Python's."""

    @staticmethod
    def wrap(
        connected: socket.socket, address: Address, tls: ssl.SSLContext, deadline: float
    ) -> "TlsChannel":
        """Shake hands. Raises ``ChannelError``, ``TimeoutError``; ``connected`` is closed then."""
        try:
            connected.settimeout(max(0.001, deadline - time.monotonic()))
            return TlsChannel(tls.wrap_socket(connected, server_hostname=address.host))
        except TimeoutError:
            connected.close()
            raise
        except (OSError, ValueError) as error:
            connected.close()
            raise ChannelError(f"{address}: TLS: {error}") from error

    def exchange(
        self, frame: bytes, deadline: float, beside: OneRead | None = None, *, hurry: bool = False
    ) -> None:
        if beside is not None:
            beside.begin()
        self.send(frame, (), deadline)

    def is_stale(self) -> bool:
        self._socket.settimeout(0)
        self._timeouts = (0.0, 0.0)
        try:
            socket.socket.recv(
                self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT
            )  # of the bytes below TLS
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _transmit(self, pending: list[memoryview]) -> int:
        return self._socket.send(pending[0])

    def _take(self, into: memoryview, flags: int) -> int:
        return self._socket.recv_into(into)

    def _set_timeout(self, deadline: float, *, send: bool) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time left")
        known = self._timeouts[0]
        if not 0.8 * known <= left <= known:  # close enough, and each change is a system call
            self._socket.settimeout(left)
            self._timeouts = (left, left)
