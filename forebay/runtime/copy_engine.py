"""Copies between device and host pages of one rank, on threads of their own: loads and backups never wait for each other.

    plan.loads  --> load thread, layer by layer --> LoadGate: the forward pass waits for each layer before it touches it
    plan.backup --> backup thread, page by page, after the forward pass --> TransferDone

The interpreter lock is free while bytes move (`runtime.page_copy`). A copy in memory cannot fail short of a lost rank, so an error here
is raised where the plan waits for it (loads) or ends the rank (backups), and rule R3 does the rest.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue

import torch

from forebay.core.messages import Backup, Plan
from forebay.core.spans import SpanKind
from forebay.models.kv import KVPool
from forebay.observe.events import SpanRing
from forebay.observe.figures import Meter
from forebay.runtime.host_pool import HostPool
from forebay.runtime.page_copy import PagePairs, Piece

COPY_DEADLINE_S = 60.0


class LoadGate:
    """Opens layer by layer. Every reader of a layer's pages passes through `wait` first, with the stage-local layer."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._done = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def open_next(self) -> None:
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def is_open(self, layer: int) -> bool:
        return self._done > layer  # only ever rises

    def wait(self, layer: int) -> None:
        """Until ``layer`` is loaded. Raises what the copy raised, or ``TimeoutError``: nobody waits for ever."""
        if self.is_open(layer):
            return
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._done > layer or self._error is not None, COPY_DEADLINE_S
            ):
                raise TimeoutError(f"layer {layer} was not loaded within {COPY_DEADLINE_S:.0f} s")
            if self._error is not None:
                raise RuntimeError(f"loading layer {layer} failed: {self._error}") from self._error


class CopyEngine:
    """The two copy threads. ``saved``: called on the backup thread with (transfer, pages done)."""

    def __init__(
        self,
        device: KVPool,
        host: HostPool,
        ring: SpanRing,
        meter: Meter,
        saved: Callable[[int, int], None],
    ) -> None:
        self._device = device
        pieces = [
            zip(device.pieces(layer), host.pieces(layer), strict=True)
            for layer in range(device.layers)
        ]
        self._layers = [[Piece(*pair) for pair in layer] for layer in pieces]
        self._block_bytes = host.block_bytes
        self._ring = ring
        self._meter = meter
        self._saved = saved
        self._loads: SimpleQueue[tuple[Plan, LoadGate] | None] = SimpleQueue()
        self._backups: SimpleQueue[Backup | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_loads, name="copy-load", daemon=True),
            threading.Thread(target=self._run_backups, name="copy-backup", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def load(self, plan: Plan) -> LoadGate | None:
        """Start the plan's loads; None if it has none."""
        if not plan.loads:
            return None
        gate = LoadGate(self._device.layers)
        self._loads.put((plan, gate))
        return gate

    def back_up(self, backup: Backup) -> None:
        """Start a backup; what it reads has been written."""
        self._backups.put(backup)

    def stop(self) -> None:
        """Finish what was started and end the threads."""
        self._loads.put(None)
        self._backups.put(None)
        for thread in self._threads:
            thread.join()

    def _run_loads(self) -> None:
        while (work := self._loads.get()) is not None:
            plan, gate = work
            whole = time.monotonic_ns()
            try:
                pairs = PagePairs(plan.loads)
                for layer in range(self._device.layers):
                    began = time.monotonic_ns()
                    self._load_layer(pairs, layer)
                    self._ring.record(SpanKind.LOAD, began, plan.number, len(plan.loads), layer)
                    gate.open_next()
            except BaseException as error:  # the plan that waits for it raises it
                gate.fail(error)
            self._count("load", len(plan.loads), whole)

    def _run_backups(self) -> None:
        while (backup := self._backups.get()) is not None:
            began = time.monotonic_ns()
            try:
                self._save(PagePairs(backup.copies))
            except BaseException:  # nobody waits for a backup, so nobody else would notice
                traceback.print_exc()
                os._exit(1)
            self._ring.record(SpanKind.BACKUP, began, backup.transfer, len(backup.copies))
            self._count("backup", len(backup.copies), began)
            self._saved(backup.transfer, len(backup.copies))

    def _count(self, kind: str, pages: int, began_ns: int) -> None:
        self._meter.transfer(
            kind, pages * self._block_bytes, (time.monotonic_ns() - began_ns) / 1e9
        )

    def _save(self, pairs: PagePairs) -> None:
        for layer in self._layers:
            for piece in layer:
                piece.save(pairs)
        self._synchronize()

    def _load_layer(self, pairs: PagePairs, layer: int) -> None:
        for piece in self._layers[layer]:
            piece.load(pairs)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.device.type == "cuda":
            torch.cuda.synchronize(self._device.device)
