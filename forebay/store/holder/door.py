"""The Unix door: where a client on the same machine proves itself, hands over its staging memory and gets the segment, read-only.

    holder -> Challenge     client -> Hello + [staging memfd, maybe a lent one]     holder -> Welcome + [segment memfd, maybe hints and
                                                                                      directory of the log (``log.hints``)]

What a client hands over is sealed against shrinking. The holder writes to staging memory alone; lent memory it only reads.

Afterwards the same socket speaks the holder's ordinary frames. The socket is abstract: it lives in no directory. Whoever has the
segment can read every tenant's bytes, so a holder that serves several tenants opens no door.
"""

import asyncio
import contextlib
import mmap
import os
import secrets as random_bytes
import socket
import struct

from forebay.store.holder.data import DataServer, Peer
from forebay.store.holder.log.hints import LogHints
from forebay.store.holder.mapping import Staging, sealed_bytes
from forebay.store.holder.segment import Segment
from forebay.store.wire import auth
from forebay.store.wire.connection import OPENING_S, Connection
from forebay.store.wire.frames import (
    MAX_OPENING_BYTES,
    PREFIX,
    FrameError,
    decode_opening,
    encode,
    read_prefix,
)
from forebay.store.wire.listener import MAX_STRANGERS
from forebay.store.wire.messages import Hello, Refused

MAX_STAGING_BYTES = 1 << 30
MAX_LENT_BYTES = 1 << 44
ACCEPT_AGAIN_S = 0.1


class Door:
    """Accepts until ``close``. ``name``: of the abstract socket, without its leading zero byte."""

    def __init__(
        self,
        server: DataServer,
        segment: Segment,
        secrets: auth.Secrets,
        registry: dict[int, Connection],
        hints: LogHints | None = None,
    ) -> None:
        self.name = f"forebay-holder-{random_bytes.token_hex(12)}"
        self._server = server
        self._segment = segment
        self._hints = hints
        self._secrets = secrets
        self._registry = registry
        self._numbers = -1  # Unix connections count downwards, TCP ones upwards
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + self.name)
        self._socket.listen(128)
        self._openings: dict[asyncio.Task[None], None] = {}  # in the order they began
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        self._accepting.cancel()
        for task in self._openings:
            task.cancel()
        await asyncio.gather(self._accepting, *self._openings, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(self._socket)
            except OSError:  # no descriptors left: others may give some back
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            peer.setblocking(False)
            if len(self._openings) >= MAX_STRANGERS:  # as at the other entrance (`wire.listener`)
                next(iter(self._openings)).cancel()
            task = asyncio.create_task(self._open(peer))
            self._openings[task] = None
            task.add_done_callback(self._openings.pop)

    async def _open(self, peer: socket.socket) -> None:
        """Let one client in, or close its socket."""
        descriptors: list[int] = []
        try:
            async with asyncio.timeout(OPENING_S):
                hello, state = await self._exchange(peer, descriptors)
            self._numbers -= 1
            connection = Connection(self._server, self._numbers, self._registry, opened=hello)
            connection.state = state
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, peer)
        except (OSError, TimeoutError, FrameError, auth.AuthError, asyncio.CancelledError) as error:
            with contextlib.suppress(OSError):
                peer.send(encode(Refused(str(error))))
            peer.close()
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            for fd in descriptors:
                os.close(fd)

    async def _exchange(self, peer: socket.socket, descriptors: list[int]) -> tuple[Hello, Peer]:
        given = auth.challenge()
        peer.send(encode(given))
        await _readable(peer)
        data, received, _, _ = socket.recv_fds(peer, MAX_OPENING_BYTES, 4)
        descriptors += received
        if len(data) < PREFIX.size:
            raise FrameError("a hello is due")
        prefix = read_prefix(data, max_body=MAX_OPENING_BYTES)
        hello = decode_opening(data[PREFIX.size :])
        if not isinstance(hello, Hello) or prefix.body_bytes != len(data) - PREFIX.size:
            raise FrameError("a hello is due")
        self._server.admit(given, hello)
        same_user = _same_user(peer)
        if not self._secrets and not same_user:
            raise auth.AuthError("another user's process; give the store a secret")
        staging, lent = None, None
        if received:
            staging = Staging(received[0], _size_of(received[0], MAX_STAGING_BYTES))
        if len(received) > 1:
            lent = memoryview(
                mmap.mmap(received[1], _size_of(received[1], MAX_LENT_BYTES), prot=mmap.PROT_READ)
            )
        answer = auth.welcome(
            given, hello, self._secrets, self._server.epoch, self._segment.capacity
        )
        log = (
            self._hints.descriptors if self._hints is not None and same_user else ()
        )  # others may not open the files anyway
        socket.send_fds(peer, [encode(answer)], [self._segment.fd, *log])
        return hello, Peer(staging=staging, lent=lent)


def _size_of(fd: int, at_most: int) -> int:
    """Raises ``FrameError`` or ``OSError`` for memory that cannot be used safely."""
    size = sealed_bytes(fd)
    if not 0 < size <= at_most:
        raise FrameError(f"memory of {size} bytes; 1 to {at_most} are allowed")
    return size


def _same_user(peer: socket.socket) -> bool:
    _, uid, _ = struct.unpack(
        "3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return uid in (0, os.getuid())


async def _readable(peer: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(peer.fileno(), lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(peer.fileno())
