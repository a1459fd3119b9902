"""What a rank's process does from its first word to its last.

    Hello --> load weights --> Loaded --> wait for Allocate --> pool, groups, warm-up --> Ready --> plans, one by one --> Stop
                |                            |                      |                                |
                '-------------- any error: one Fault with one clear line, exit status 1 -------------'

It holds bytes and does work; it decides nothing. Its life ends with its parent's, with a Stop, or with a Fault.
Two threads: this one computes, `worker_io` keeps in touch with the planner meanwhile.
"""

import os
import traceback
from contextlib import nullcontext

import torch
import zmq

from forebay.core.messages import (
    Allocate,
    Fault,
    FromWorker,
    Hello,
    Loaded,
    Plan,
    PlanDone,
    Ready,
    Stop,
    TransferDone,
    decode_to_worker,
    encode,
)
from forebay.models.errors import ModelError
from forebay.observe.events import SpanRing
from forebay.observe.figures import Meter
from forebay.observe.output import unhurried_output
from forebay.pages.layouts import Manifest
from forebay.pages.reader import PageReader
from forebay.runtime.boot import WorkerBoot
from forebay.runtime.execute import Executor
from forebay.runtime.grid import DeviceError
from forebay.runtime.mirror import PlanError
from forebay.runtime.page_io import PageIo
from forebay.runtime.rank import LoadedRank, MemoryShortage, ReadyRank, load
from forebay.runtime.stage_link import LinkError, NeighbourGone
from forebay.runtime.store_access import StoreAddress, layout_of, open_for_rank
from forebay.runtime.worker_io import WorkerIo, connect

# Errors that say themselves, in one line, what is wrong and what to do.
_HOPELESS = (DeviceError, ModelError, MemoryShortage)
_CLEAR = (*_HOPELESS, PlanError, LinkError)
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


class Worker:
    """The compute loop and what it needs to speak with the planner."""

    def __init__(self, boot: WorkerBoot) -> None:
        self._boot = boot
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = connect(self._context, boot.plan_endpoint, boot.plan_identity)
        self._meter = Meter()
        self._io = WorkerIo(
            self._context, boot.io_endpoint, boot.io_identity, boot.epoch, boot.rank, self._meter
        )
        name = f"rank {boot.rank}"
        self._ring = SpanRing(name) if boot.ring_fd < 0 else SpanRing.at(name, boot.ring_fd)

    def run(self) -> int:
        """Serve until Stop; returns the exit status. Every failure becomes one Fault."""
        self._io.start()
        try:
            self._serve()
        except Exception as error:  # the supervisor of this process: it reports and ends
            self._report(error)
            return 1
        self._io.stop()
        self._close()
        return 0

    def _serve(self) -> None:
        """From Hello to Stop."""
        boot = self._boot
        self._send(Hello(boot.epoch, boot.rank, os.getpid()))
        loaded = load(boot)
        address = loaded.rendezvous.address if loaded.rendezvous is not None else ""
        self._send(
            Loaded(
                boot.epoch,
                boot.rank,
                loaded.affordable_pages(),
                loaded.weight_bytes,
                address,
                loaded.host_pages(),
                loaded.stage.without,
            )
        )
        message = self._receive()
        if isinstance(message, Stop):
            return
        if not isinstance(message, Allocate):
            raise PlanError(f"{type(message).__name__} came before Allocate")
        ready = loaded.allocate(message, self._ring, self._meter, self._saved)
        page_io = self._open_store(loaded, ready, message.namespace)
        staged = page_io.staged.forward if boot.staged and page_io is not None else nullcontext
        executor = ready.executor(self._ring, staged)
        self._send(Ready(boot.epoch, boot.rank, ready.s_per_token))
        self._run_plans(executor)
        executor.settle()
        ready.copier.stop()
        if page_io is not None:
            page_io.stop()
        ready.grid.leave()

    def _run_plans(self, executor: Executor) -> None:
        """Until Stop."""
        boot = self._boot
        while not isinstance(message := self._receive(), Stop):
            if not isinstance(message, Plan):
                raise PlanError(f"{type(message).__name__} came where plans are run")
            self._io.applied = message.number
            outcome = executor.run(message)
            self._send(
                PlanDone(
                    boot.epoch,
                    boot.rank,
                    message.number,
                    outcome.samples,
                    outcome.forward_s,
                    outcome.scores,
                    outcome.tainted,
                )
            )

    def _open_store(self, loaded: LoadedRank, ready: ReadyRank, namespace: bytes) -> PageIo | None:
        """From here on the I/O thread takes the planner's orders."""
        boot = self._boot
        if boot.store_url is None:
            return None
        store = open_for_rank(
            StoreAddress(boot.store_url, boot.store_secret, ready.host.lent), boot.rank, self._meter
        )
        own = layout_of(loaded.config, boot.pp, boot.tp)
        block = loaded.block
        manifest = Manifest(store, namespace, own)
        reader = PageReader(store, ready.host, block, own, manifest)
        is_last = ready.grid.place.is_last
        page_io = PageIo(
            store,
            reader,
            ready.host,
            manifest.name(block.part),
            boot.epoch,
            boot.rank,
            is_last,
            self._ring,
            self._meter,
            self._io.send,
        )
        self._io.serve_orders(page_io)
        return page_io

    def _saved(self, transfer: int, pages: int) -> None:
        """On the backup thread: sockets are not its own, so the I/O thread says it."""
        self._io.send(TransferDone(self._boot.epoch, self._boot.rank, transfer, pages))

    def _receive(self) -> Allocate | Plan | Stop:
        """The next message of this epoch; others are dropped (rule R1)."""
        while True:
            message = decode_to_worker(self._channel.recv())
            if message.epoch == self._boot.epoch:
                return message

    def _send(self, message: FromWorker) -> None:
        self._channel.send(encode(message))

    def _report(self, error: Exception) -> None:
        """Tell the planner in one line, and hand it over before the process ends."""
        text, neighbour = str(error), _is_neighbours_end(error)
        if not isinstance(error, _CLEAR):
            if not neighbour:
                traceback.print_exception(error)
            text = f"{type(error).__name__}: {error}"
        fault = Fault(
            self._boot.epoch,
            self._boot.rank,
            self._io.applied,
            " ".join(text.split()),
            hopeless=isinstance(error, _HOPELESS),
            neighbour=neighbour,
        )
        self._send(fault)
        self._io.stop()
        self._close()

    def _close(self) -> None:
        self._channel.close()
        self._context.term()


def _is_neighbours_end(error: Exception) -> bool:
    """Collectives of a TP group raise plain errors; gloo's text says what happened."""
    if isinstance(error, RuntimeError):
        return any(said in str(error) for said in _PEER_GONE)
    return isinstance(error, NeighbourGone)


def serve(boot: WorkerBoot) -> int:
    """Returns the exit status: 0 after Stop, 1 after a Fault."""
    torch.set_num_threads(boot.threads)
    torch.set_num_interop_threads(1)
    with unhurried_output():
        return Worker(boot).run()
