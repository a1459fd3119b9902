"""The server's end of one connection: bytes to frames, with every bound that keeps a hostile peer's damage to itself.

    scratch (64 KiB) <- small reads; bodies larger than it get a buffer of their own; payload goes straight into the targets the
    handler names (segment memory), without another copy

A peer is dropped for: a frame it may not send, not finishing its opening within 5 s, a frame that takes longer than 10 s plus a
second per MiB or of which nothing comes for 10 s, not reading answers for 30 s. While it does not read, it is not read from either.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from forebay.store.wire import auth
from forebay.store.wire.frames import (
    MAX_BODY_BYTES,
    MAX_OPENING_BYTES,
    PREFIX,
    FrameError,
    Prefix,
    decode_opening,
    encode,
    read_prefix,
)
from forebay.store.wire.loopback import send_unpaced
from forebay.store.wire.messages import Challenge, Hello, Message, Refused, Welcome

SCRATCH_BYTES = 64 << 10
OPENING_S = 5.0
FRAME_S = 10.0
FRAME_BYTES_PER_S = 1 << 20
STALLED_S = 30.0
LINGER_S = 5.0  # for the last word to a peer
WRITE_HIGH_BYTES = 8 << 20
TLS_PIECE_BYTES = (
    256 << 10
)  # encrypted at a time: the peer decrypts one while we encrypt the next, and it is in the caches
TLS_HIGH_BYTES = 512 << 10


class Handler(Protocol):
    """What a server does with its connections; all calls come from the event loop's thread."""

    def opened(self, connection: "Connection", given: Challenge, hello: Hello) -> Welcome:
        """Raises ``AuthError`` to refuse."""
        ...

    def frame(
        self, connection: "Connection", body: memoryview, prefix: Prefix
    ) -> Sequence[memoryview]:
        """A whole body (valid during the call). Returns where its payload goes, in order, as long as ``prefix.payload_bytes``
        together. Raises ``FrameError``."""
        ...

    def payload(self, connection: "Connection") -> None:
        """The payload of the last frame is in its targets."""
        ...

    def closed(self, connection: "Connection") -> None:
        """The connection is gone; called once, after ``opened`` succeeded."""
        ...


class Connection(asyncio.BufferedProtocol):
    """One peer. ``state`` belongs to the handler. ``peer`` is None until the opening is done. ``over``: it has ended, or never
    began."""

    def __init__(
        self,
        handler: Handler,
        number: int,
        registry: dict[int, "Connection"],
        opened: Hello | None = None,
    ) -> None:
        self.number = number
        self.peer = opened
        self.state: object = None
        self.over = False
        self._handler = handler
        self._registry = registry
        self._challenge = auth.challenge()
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._filled = 0
        self._body: memoryview | None = None  # a body too large for the scratch
        self._body_prefix: Prefix | None = None
        self._body_filled = 0
        self._targets: list[memoryview] = []
        self._deadline = time.monotonic() + OPENING_S
        self._stalled_since = 0.0
        self._heard = 0.0  # when something of the frame under way came
        self._transport: asyncio.Transport | None = None
        self._in_tls = False
        self._unencrypted: deque[memoryview] = deque()  # inside TLS, what waits for its turn
        self._writable = asyncio.Event()
        self._writable.set()

    # ------------------------------------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self._registry[self.number] = self
        send_unpaced(transport.get_extra_info("socket"))
        self._in_tls = transport.get_extra_info("ssl_object") is not None
        transport.set_write_buffer_limits(high=TLS_HIGH_BYTES if self._in_tls else WRITE_HIGH_BYTES)  # type: ignore[attr-defined]
        if self.peer is None:
            self.send(encode(self._challenge))
        else:
            self._deadline = 0.0

    def connection_lost(self, exc: BaseException | None) -> None:
        self.over = True
        self._registry.pop(self.number, None)
        self._writable.set()
        self._transport = None
        self._targets = []
        self._unencrypted.clear()
        if self.peer is not None:
            self._handler.closed(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._targets:
            return self._targets[0]
        if self._body is not None:
            return self._body[self._body_filled :]
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._targets:
                self._heard = time.monotonic()
                self._payload_arrived(nbytes)
            elif self._body is not None:
                self._heard = time.monotonic()
                self._body_filled += nbytes
                if self._body_filled == len(self._body):
                    body, prefix = self._body, self._body_prefix
                    assert prefix is not None
                    self._body = self._body_prefix = None
                    self._dispatch(body, prefix)
            else:
                self._filled += nbytes
            self._drain_scratch()
        except FrameError as error:
            self.drop(str(error))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._writable.clear()
        self._stalled_since = time.monotonic()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stalled_since = 0.0
        self._writable.set()
        if self._transport is not None:
            self._transport.resume_reading()
        self._encrypt_some()

    # ------------------------------------------------------------------------------------------ the handler's side

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def writable(self) -> None:
        """Wait until the peer takes what it asked for, or is gone: whoever makes answers that cost memory asks first."""
        await self._writable.wait()

    def unsent_bytes(self) -> int:
        """What is queued and not yet with the kernel; 0 once the connection is gone."""
        if self._transport is None:
            return 0
        return self._transport.get_write_buffer_size() + sum(map(len, self._unencrypted))

    def send(self, frame: bytes, payload: Sequence[memoryview] = ()) -> None:
        """Queue a frame and its payload. The payload is not copied: it is read from where it lies as the peer takes it."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._unencrypted or (payload and self._in_tls):
            self._unencrypted += [memoryview(frame), *payload]
            self._encrypt_some()
        elif payload:
            self._transport.writelines([frame, *payload])
        else:
            self._transport.write(frame)

    def _encrypt_some(self) -> None:
        """Hand on what waits, in pieces, until the peer has enough to do."""
        waiting = self._unencrypted
        while waiting and self.alive and self._writable.is_set():
            piece = waiting[0][:TLS_PIECE_BYTES]
            if len(piece) == len(waiting[0]):
                waiting.popleft()
            else:
                waiting[0] = waiting[0][TLS_PIECE_BYTES:]
            assert self._transport is not None
            self._transport.write(piece)

    def answer(self, message: Message) -> None:
        self.send(encode(message))

    def drop(self, reason: str) -> None:
        """End this peer, saying why. One that does not read what was to be said is cut off when its time is over."""
        now = time.monotonic()
        if self._transport is None:
            return
        if self._transport.is_closing():
            if now > self._deadline:
                self._transport.abort()
            return
        if self._stalled_since or self._unencrypted:
            self._transport.abort()
            return
        self._transport.write(encode(Refused(reason)))
        self._transport.close()
        self._deadline = now + LINGER_S

    def overdue(self, now: float) -> str:
        """Why this peer has had its time, or ""."""
        if self._deadline and now > self._deadline:
            return ("the opening" if self.peer is None else "a frame") + " took too long"
        if (
            (self._targets or self._body is not None)
            and not self._stalled_since
            and now - self._heard > FRAME_S
        ):
            return "a frame stood still"
        if self._stalled_since and now - self._stalled_since > STALLED_S:
            return "answers are not read"
        return ""

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------------------------------ frames

    def _drain_scratch(self) -> None:
        """Take every whole frame out of the scratch, then move what is left to its front."""
        at = 0
        while not self._targets and self._body is None and self._filled - at >= PREFIX.size:
            limit = MAX_BODY_BYTES if self.peer is not None else MAX_OPENING_BYTES
            prefix = read_prefix(self._scratch, at, max_body=limit)
            begin = at + PREFIX.size
            have = self._filled - begin
            if have >= prefix.body_bytes:
                at = begin + prefix.body_bytes
                self._dispatch(self._view[begin:at], prefix)
                at += self._feed_targets(at)
            elif PREFIX.size + prefix.body_bytes > SCRATCH_BYTES:
                self._body, self._body_prefix, self._body_filled = (
                    memoryview(bytearray(prefix.body_bytes)),
                    prefix,
                    have,
                )
                self._body[:have] = self._view[begin : self._filled]
                at = self._filled
                self._allow(prefix.body_bytes + prefix.payload_bytes)
            else:
                break
            if at < self._filled and not self.alive:
                return
        left = self._filled - at
        if at and left:
            self._scratch[:left] = self._scratch[at : self._filled]
        self._filled = left
        if self.peer is not None and not self._targets and self._body is None:
            self._deadline = 0.0 if not left else self._deadline or time.monotonic() + FRAME_S

    def _dispatch(self, body: memoryview, prefix: Prefix) -> None:
        if self.peer is None:
            self._open(body, prefix)
            return
        self._deadline = 0.0
        targets = self._handler.frame(self, body, prefix)
        if not prefix.payload_bytes:
            return
        assert sum(len(target) for target in targets) == prefix.payload_bytes
        self._targets = [target for target in targets if len(target)]
        self._allow(prefix.payload_bytes)

    def _open(self, body: memoryview, prefix: Prefix) -> None:
        hello = decode_opening(body)
        if not isinstance(hello, Hello) or prefix.payload_bytes:
            raise FrameError("a hello is due")
        try:
            answer = self._handler.opened(self, self._challenge, hello)
        except auth.AuthError as error:
            raise FrameError(str(error)) from error
        self.peer = hello
        self._deadline = 0.0
        self.answer(answer)

    def _feed_targets(self, at: int) -> int:
        """Payload that came along in the scratch; how much of it was taken."""
        taken = 0
        while self._targets and at + taken < self._filled:
            target = self._targets[0]
            count = min(len(target), self._filled - at - taken)
            target[:count] = self._view[at + taken : at + taken + count]
            taken += count
            self._payload_arrived(count)
        return taken

    def _payload_arrived(self, count: int) -> None:
        target = self._targets[0]
        if count < len(target):
            self._targets[0] = target[count:]
            return
        self._targets.pop(0)
        if not self._targets:
            self._deadline = 0.0
            self._handler.payload(self)

    def _allow(self, count: int) -> None:
        self._heard = time.monotonic()
        self._deadline = self._heard + FRAME_S + count / FRAME_BYTES_PER_S


async def watch(registry: dict[int, Connection], every_s: float = 1.0) -> None:
    """Drop overdue peers, for as long as the server runs."""
    while True:
        await asyncio.sleep(every_s)
        now = time.monotonic()
        for connection in list(registry.values()):
            reason = connection.overdue(now)
            if reason:
                connection.drop(reason)
