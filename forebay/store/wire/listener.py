"""Who is let in: one address, a bound on connections, and a tighter one on those who have not said who they are.

    newcomer -> stranger (TLS hand, opening: 5 s at most) -> peer

A stranger costs memory and a descriptor, and anybody can be one. Of too many the oldest goes: a real peer needs milliseconds to
introduce itself, so a crowd that says nothing keeps nobody out. A machine that vanishes without a word is noticed within half a minute.
"""

import asyncio
import contextlib
import os
import resource
import socket
import ssl
from collections import deque
from collections.abc import Callable

from forebay.store.address import Address
from forebay.store.wire import connection as connections
from forebay.store.wire.connection import Connection
from forebay.store.wire.frames import encode
from forebay.store.wire.messages import Refused

MAX_CONNECTIONS = 10_000
MAX_STRANGERS = 512
DESCRIPTORS_SHARE = 4  # of this process's descriptors at most one in so many is a stranger's
ACCEPT_AGAIN_S = 0.1
BACKLOG = 1024
_VANISHED = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 30_000),
)


class Listener:
    """Serves from its making until ``close``. ``made`` makes the server's end of one connection; ``registry`` has those that are open.
    Used by the event loop's thread alone."""

    def __init__(
        self,
        sockets: list[socket.socket],
        made: Callable[[], Connection],
        registry: dict[int, Connection],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.port: int = sockets[0].getsockname()[1]
        self._sockets = sockets
        self._made = made
        self._registry = registry
        self._tls = tls
        self._strangers: deque[tuple[Connection, socket.socket]] = (
            deque()
        )  # oldest first; some have introduced themselves since
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limited = descriptors != resource.RLIM_INFINITY
        self._max_strangers = (
            min(MAX_STRANGERS, descriptors // DESCRIPTORS_SHARE) if limited else MAX_STRANGERS
        )
        self._openings: set[asyncio.Task[None]] = set()
        self._accepting = [asyncio.create_task(self._accept(one)) for one in sockets]

    @staticmethod
    async def open(
        address: Address,
        made: Callable[[], Connection],
        registry: dict[int, Connection],
        tls: ssl.SSLContext | None,
    ) -> "Listener":
        """Raises ``OSError``."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sockets: list[socket.socket] = []
        try:
            for family, _, _, _, where in dict.fromkeys(found):
                sockets.append(socket.create_server(where, family=family, backlog=BACKLOG))
                sockets[-1].setblocking(False)
        except OSError as error:
            for one in sockets:
                one.close()
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            raise OSError(error.errno, f"cannot listen on {address}: {reason}") from error
        return Listener(sockets, made, registry, tls)

    async def close(self) -> None:
        """Nobody is let in any more; who is in stays."""
        tasks = [*self._accepting, *self._openings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self._sockets:
            one.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listening)
            except OSError:  # no descriptors left: some can be had back
                made = [self._make_way() for _ in range(1 + len(self._strangers) // 2)]
                await asyncio.sleep(0 if any(made) else ACCEPT_AGAIN_S)
                continue
            if len(self._registry) >= MAX_CONNECTIONS and not self._make_way():
                _refuse(peer)
                continue
            while len(self._strangers) >= self._max_strangers:
                self._make_way()
            connection = self._made()
            self._strangers.append((connection, peer))
            task = asyncio.create_task(self._open(connection, peer))
            self._openings.add(task)
            task.add_done_callback(self._openings.discard)

    def _make_way(self) -> bool:
        """End the oldest stranger; False if there is none."""
        while self._strangers:
            connection, peer = self._strangers.popleft()
            if connection.peer is not None or connection.over:
                continue
            if connection.alive:
                connection.abort()
            else:
                with contextlib.suppress(OSError):  # in the midst of its TLS hand, which notices
                    peer.shutdown(socket.SHUT_RDWR)
            return True
        return False

    async def _open(self, connection: Connection, peer: socket.socket) -> None:
        limit_s = None if self._tls is None else connections.OPENING_S
        try:
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _VANISHED:
                peer.setsockopt(socket.IPPROTO_TCP, option, value)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                peer,
                ssl=self._tls,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=limit_s,
            )
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            peer.close()
            connection.over = True
            if isinstance(error, asyncio.CancelledError):
                raise


def _refuse(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.send(encode(Refused(f"more than {MAX_CONNECTIONS} connections")))
    peer.close()
