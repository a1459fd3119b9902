"""The worker's I/O thread: it speaks with the planner while the compute loop is in a long forward.

It says once a second that the process lives, which plan it has begun and what it has measured, takes tickets and store orders
(`runtime.page_io` carries them out), passes on acknowledgements of other threads, and notices when the planner's socket is gone. It
has a channel of its own, since a zmq socket belongs to one thread, and torch releases the interpreter lock in kernels.
"""

import contextlib
import os
import sys
import threading
import time
from queue import SimpleQueue
from typing import Protocol

import zmq

from forebay.core.messages import (
    FromWorker,
    Heartbeat,
    StoreHealth,
    ToWorkerIo,
    decode_to_worker_io,
    encode,
)
from forebay.observe.figures import Meter

HEARTBEAT_S = 1.0
# Time for the compute loop to read a Stop that the planner sent just before it closed its sockets.
_ORPHAN_GRACE_S = 5.0
_LAST_WORD_S = 0.1  # for a line to be written
_QUEUE_MESSAGES = 4096
_LINGER_MS = 2000


class Orders(Protocol):
    """Who carries out what comes on the ticket channel: `runtime.page_io`."""

    @property
    def store_health(self) -> StoreHealth: ...

    def take(self, order: ToWorkerIo) -> None:
        """On the I/O thread; it must return at once."""


class WorkerIo(threading.Thread):
    """Start it once; ``applied`` may be set at any time by the compute loop; ``stop`` ends it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        identity: bytes,
        epoch: int,
        rank: int,
        meter: Meter,
    ) -> None:
        super().__init__(name="worker-io", daemon=True)
        self._context = context
        self._endpoint = endpoint
        self._identity = identity
        self._epoch = epoch
        self._rank = rank
        self._meter = meter
        self._wake = os.eventfd(0)
        self._ended = threading.Event()
        self._outgoing: SimpleQueue[FromWorker] = SimpleQueue()
        self._orders: Orders | None = None  # while the rank loads no order can come
        self.applied = -1
        """The last plan that the compute loop has begun."""

    def run(self) -> None:
        socket = connect(self._context, self._endpoint, self._identity)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        beat_due = 0.0
        try:
            while not self._ended.is_set():
                if time.monotonic() >= beat_due:
                    self._beat(socket)
                    beat_due = time.monotonic() + HEARTBEAT_S
                found = dict(poller.poll(max(int((beat_due - time.monotonic()) * 1000), 0)))
                if self._wake in found:
                    os.eventfd_read(self._wake)
                    self._send_all(socket)
                if socket in found:
                    self._take_all(socket)
                if monitor in found:
                    self._end_as_orphan()
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def send(self, message: FromWorker) -> None:
        """Say it from this thread's channel; callable from any thread, in order."""
        self._outgoing.put(message)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._ended.set()
        os.eventfd_write(self._wake, 1)
        self.join()  # the descriptor stays open: other threads may still want to say something

    def serve_orders(self, orders: Orders) -> None:
        """The rank has loaded: ``orders`` gets what comes on the ticket channel; once."""
        assert self._orders is None
        self._orders = orders

    def _take_all(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            order = decode_to_worker_io(frame)
            assert self._orders is not None, "an order came before Ready was said"
            self._orders.take(order)

    def _send_all(self, socket: zmq.Socket[bytes]) -> None:
        while not self._outgoing.empty():
            socket.send(encode(self._outgoing.get()))

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        # A full queue means that the planner reads nothing: one heartbeat more would not tell it anything.
        with contextlib.suppress(zmq.Again):
            store = StoreHealth() if self._orders is None else self._orders.store_health
            beat = encode(Heartbeat(self._epoch, self._rank, self.applied, store))
            socket.send_multipart((beat, self._meter.encoded()), zmq.NOBLOCK)

    def _end_as_orphan(self) -> None:
        """The planner has left us, and the compute loop may be waiting for a neighbour that is ending too."""
        if not self._ended.wait(_ORPHAN_GRACE_S):
            print(f"rank {self._rank}: the planner's socket is gone; ending", file=sys.stderr)
            self._ended.wait(_LAST_WORD_S)
            os._exit(1)


def connect(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes
) -> zmq.Socket[bytes]:
    """A DEALER of ours to the planner's ROUTER. Its queues hold far more messages than plans can be in flight (rule R1)."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES)
    # A message of the end, a Fault say, still goes out; but nothing waits long for a planner that is gone.
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.connect(endpoint)
    return socket
