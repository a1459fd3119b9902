"""One authenticated connection to one server, and a few of them kept for whoever calls next.

    pipeline(commands) --encode, send all--> server --replies in order--> targets        one deadline for all of it

A connection that failed in the middle of a pipeline is out of step and is closed. A pool tries once more, on a new
connection, what a kept connection did not answer at all: servers and proxies close idle connections as they like,
and every command of ours may be sent twice.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from itertools import islice

from forebay.store.address import Address
from forebay.store.backends.redis.resp import (
    Argument,
    Piece,
    ProtocolError,
    Reader,
    Reply,
    ReplyError,
    Target,
    encode,
)
from forebay.store.backends.redis.url import RedisUrl

CONNECT_S = 2.0
IDLE_PROBE_S = 30
_IOV_MAX = 512
Command = Sequence[Argument]


class Refused(Exception):
    """The server took the connection and refused us: wrong password, no such database, no permission. One line."""


class Connection:
    """Connects at once. Raises ``OSError``, `ProtocolError` or `Refused`."""

    def __init__(self, url: RedisUrl, address: Address, deadline: float) -> None:
        self.is_fresh = True
        self._deadline = min(deadline, time.monotonic() + CONNECT_S)
        self._socket = socket.create_connection((address.host, address.port), self._left())
        try:
            _keep_alive(self._socket)
            if url.is_tls:
                context = ssl.create_default_context(cafile=url.ca)
                self._socket = context.wrap_socket(self._socket, server_hostname=address.host)
            self._reader = Reader(self._receive)
            self._greet(url)
        except BaseException:
            self._socket.close()
            raise

    def pipeline(
        self, commands: Sequence[Command], targets: Sequence[Target | None], deadline: float
    ) -> list[Reply]:
        """The replies, in order; of bulk replies what their target made of them.

        Raises ``OSError`` (also when the time is over) or `ProtocolError`; the connection is then of no more use.
        """
        self._deadline = deadline
        pieces: list[Piece] = []
        for command in commands:
            encode(command, pieces)
        self._send(pieces)
        replies = []
        for target in targets:
            replies.append(self._reader.reply(target))
            self.is_fresh = False
        return replies

    def close(self) -> None:
        self._socket.close()

    def _greet(self, url: RedisUrl) -> None:
        first: list[list[Argument]] = []
        if url.password or url.user:
            first.append(
                [b"AUTH", *([url.user.encode()] if url.user else []), url.password.encode()]
            )
        if url.db:
            first.append([b"SELECT", b"%d" % url.db])
        first.append([b"PING"])
        for reply in self.pipeline(first, [None] * len(first), self._deadline):
            if isinstance(reply, ReplyError) and reply.code != "LOADING":
                raise Refused(str(reply))
        self.is_fresh = True

    def _send(self, pieces: list[Piece]) -> None:
        rest = iter(pieces)
        while some := list(islice(rest, _IOV_MAX)):
            views = [memoryview(piece) for piece in some]
            while views:
                self._socket.settimeout(self._left())
                sent = self._write(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]

    def _write(self, views: list[memoryview]) -> int:
        if isinstance(self._socket, ssl.SSLSocket):  # it has no sendmsg
            return self._socket.send(views[0])
        return self._socket.sendmsg(views)

    def _receive(self, view: memoryview) -> int:
        self._socket.settimeout(self._left())
        count = self._socket.recv_into(view)
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time is over")
        return left


class Pool:
    """Connections to one server. Thread-safe. At most ``url.connections`` calls at a time; more wait for their turn."""

    def __init__(self, url: RedisUrl, address: Address) -> None:
        self.address = address
        self._url = url
        self._turns = threading.BoundedSemaphore(url.connections)
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    def pipeline(
        self, commands: Sequence[Command], targets: Sequence[Target | None], deadline: float
    ) -> list[Reply]:
        """As `Connection.pipeline`. Raises also `Refused`."""
        if not self._turns.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise TimeoutError(f"no connection to {self.address} became free in time")
        try:
            return self._on_one(commands, targets, deadline)
        finally:
            self._turns.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _on_one(
        self, commands: Sequence[Command], targets: Sequence[Target | None], deadline: float
    ) -> list[Reply]:
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            connection = kept or Connection(self._url, self.address, deadline)
            connection.is_fresh = True  # until it answers
            try:
                replies = connection.pipeline(commands, targets, deadline)
            except (OSError, ProtocolError) as error:
                connection.close()
                is_stale = kept is not None and kept.is_fresh and isinstance(error, ConnectionError)
                if not is_stale:
                    raise
                continue  # the next kept one, or a new one, which is tried once
            except BaseException:
                connection.close()
                raise
            self._keep(connection)
            return replies

    def _keep(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()


def _keep_alive(link: socket.socket) -> None:
    """A connection whose other end is gone without a word is noticed within a minute, also while it is idle."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", IDLE_PROBE_S),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, option):
            link.setsockopt(socket.IPPROTO_TCP, int(vars(socket)[option]), value)
