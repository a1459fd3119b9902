"""The planner's process: one event loop around the sans-IO core.

        frontend --zmq--> [ drain all sockets -> planner.step -> restart / plan / outputs ] --zmq--> ranks, frontend

The loop never waits for a forward pass and imports no torch. It sleeps until a message, a rank's death, or a timer.
"""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from forebay import compiled
from forebay.core.identity import kv_namespace
from forebay.core.messages import (
    Abort,
    FlushDone,
    GridState,
    Heartbeat,
    Outputs,
    decode_from_worker,
    decode_to_planner,
    encode,
)
from forebay.core.planner import TAINTED, Effects, Event, GridLost, Planner
from forebay.core.replica import PlannerConfig
from forebay.core.residency import CACHE, STAGING
from forebay.core.transfers.store import StoreEmptied, StoreWell
from forebay.models.config import load_config
from forebay.observe.events import Rings
from forebay.observe.figures import Meter, StoreState
from forebay.observe.flight import save_incident, save_timeline
from forebay.observe.output import unhurried_output
from forebay.runtime.boot import (
    PlannerBoot,
    WorkerBoot,
    die_with_parent,
    new_endpoint,
    read_boot,
    ring_names,
)
from forebay.runtime.identity import Identifying
from forebay.runtime.ranks import END_S, Endpoints, Ranks
from forebay.runtime.store_access import StoreDesk, StoreView, layout_of
from forebay.runtime.store_flush import StoreFlushes
from forebay.runtime.telemetry import Telemetry
from forebay.settings import FetchRoute, HostMode, Kernels, Schedule, Settings
from forebay.store.backends.open import StoreURLError
from forebay.store.breaker import State

SNAPSHOT_S = 0.25
NEVER_TOKENS = 1 << 62  # no prefix is that long: pages are stored and never fetched
TICK_S = 0.1
# Prefill tokens of a plan: one stage is fastest with large products; several wait less for each other with small ones (docs/LOG.md).
CHUNK_SIZE, CHUNK_SIZE_OF_STAGES = 512, 256
SAVE_S = 6.0
# Longer between two turns than this: the process was stopped, or the machine slept.
STANDSTILL_S = 1.0
# Frames that may wait for one peer. A rank has at most pp plans in flight, so a full queue means that it is gone.
RANK_QUEUE_FRAMES = 1024
FRONTEND_QUEUE_FRAMES = 100_000


class PlannerProcess:
    """Sockets and processes of one replica."""

    def __init__(
        self,
        boot: PlannerBoot,
        worker: WorkerBoot,
        config: PlannerConfig,
        store: StoreDesk | None,
        telemetry: Telemetry,
        identifying: Identifying,
    ) -> None:
        self._boot = boot
        self._worker = worker
        self._planner = Planner(config)
        self._context = zmq.Context()
        self._endpoints = Endpoints(new_endpoint("plan"), new_endpoint("io"))
        self._frontend = self._router(boot.frontend_endpoint, FRONTEND_QUEUE_FRAMES)
        self._plans = self._router(self._endpoints.plan, RANK_QUEUE_FRAMES)
        self._io = self._router(self._endpoints.io, RANK_QUEUE_FRAMES)
        self._ranks: Ranks | None = None
        self._poller = zmq.Poller()
        self._identifying = identifying
        self._namespace: bytes | None = None  # until the model is identified
        self._store = store
        self._store_view = StoreView()
        self._telemetry = telemetry
        self._store_flushes = StoreFlushes()
        self._store_news: list[Event] = []  # for the next step
        self._store_was_well = True
        self._answered = os.eventfd(0, os.EFD_NONBLOCK)
        self._snapshot_due = 0.0
        self._said_writing = False
        self._turned_at = time.monotonic()
        self._stopping = False
        self._rings = Rings(ring_names(worker.pp * worker.tp), boot.ring_fds)
        self._ring = self._rings.rings["planner"]

    def run(self) -> None:
        """Until SIGTERM. Ranks are ended before it returns, whatever happens."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            self._start_ranks()
            while not self._stopping:
                self._wait()
                self._turn(time.monotonic())
            self._finish_saving()
        finally:
            self._end_ranks("the server ends", END_S)
            self._save_timeline()
            if self._store is not None:
                self._store.close()
            self._context.destroy(linger=200)

    def _finish_saving(self) -> None:
        """What has been computed is worth keeping: pages on their way to the store get there, if they do within `SAVE_S`."""
        planner = self._planner
        aborts = [Abort(request_id) for request_id in planner.replica.requests]
        self._carry_out(planner.step(time.monotonic(), aborts))
        deadline = time.monotonic() + SAVE_S
        while planner.is_saving and time.monotonic() < deadline:
            self._wait()
            self._turn(time.monotonic())

    def _on_sigterm(self, signum: int, frame: object) -> None:
        self._stopping = True

    def _router(self, endpoint: str, frames: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(
            zmq.ROUTER_MANDATORY, 1
        )  # a frame to a peer that is gone or full is an error, never dropped
        socket.setsockopt(zmq.SNDHWM, frames)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(endpoint)
        return socket

    def _start_ranks(self) -> None:
        self._ranks = Ranks(
            self._boot,
            self._worker,
            self._endpoints,
            self._planner.epoch,
            self._namespace,
            time.monotonic(),
        )
        self._watch()

    def _end_ranks(self, reason: str, grace_s: float) -> None:
        if self._ranks is not None:
            self._ranks.end(reason, self._plans, grace_s)
            self._ranks = None
            self._store_view.forget_ranks()
            self._telemetry.end_epoch()
            self._watch()

    def _watch(self) -> None:
        """What wakes the loop: frames, and the death of a rank."""
        self._poller = zmq.Poller()
        for source in (
            self._frontend,
            self._plans,
            self._io,
            self._answered,
            self._identifying.done,
            *(self._ranks.end_fds if self._ranks else ()),
        ):
            self._poller.register(source, zmq.POLLIN)

    # ------------------------------------------------------------------------------------------ one turn

    def _wait(self) -> None:
        due = self._planner.next_deadline()
        left = TICK_S if due is None else min(max(due - time.monotonic(), 0.0), TICK_S)
        self._poller.poll(math.ceil(left * 1000))

    def _turn(self, now: float) -> None:
        if now - self._turned_at > STANDSTILL_S:
            self._planner.resume(now)
        self._turned_at = now
        events = self._drain(now)
        while True:
            effects = self._planner.step(now, events)
            events = self._carry_out(effects)
            if effects.state_changed:
                self._send_snapshot(now)
            if effects.plan is None and not events:
                break
        self._tend_store(now)
        # Whoever has an answer and asks what is still being written is told of its pages.
        if now >= self._snapshot_due or self._is_writing != self._said_writing:
            self._send_snapshot(now)

    def _drain(self, now: float) -> list[Event]:
        """Everything that has arrived. Deaths come last: what a rank said before it died still counts."""
        events, self._store_news = self._store_news, []
        events += self._identify()
        for identity, frame, _ in _frames(self._frontend):
            if identity == self._boot.frontend_identity:
                with _reported("the frontend"):
                    events.append(decode_to_planner(frame))
                    self._store_flushes.arrived(events[-1], now)
        if self._store is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._answered)
            while not self._store.answers.empty():
                events.append(self._store.answers.get())
        for socket in (self._io, self._plans):
            for identity, frame, figures in _frames(socket):
                rank = None if self._ranks is None else self._ranks.rank_of(identity)
                if self._ranks is None or rank is None:
                    continue
                with _reported(f"rank {rank}"):
                    event = self._ranks.take(now, rank, decode_from_worker(frame), self._plans)
                    if event is not None:
                        events.append(event)
                    if isinstance(event, Heartbeat):
                        self._store_view.heard(rank, event.store)
                    if figures:
                        self._telemetry.heard(rank, figures)
        if self._ranks is not None and (lost := self._ranks.watch(now)) is not None:
            events.append(lost)
        if any(isinstance(event, Heartbeat) for event in events):
            events += self._news_of_store()
        return events

    def _identify(self) -> list[Event]:
        """Once: what pages are named by is known, or cannot be, and then nothing can be served."""
        made = self._identifying
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(made.done)
        if made.error and self._planner.state is not GridState.FAILED:
            return [GridLost(self._planner.epoch, made.error, hopeless=True)]
        if made.fingerprint is None or self._namespace is not None:
            return []
        self._planner.name_model(made.fingerprint)
        self._namespace = self._planner.namespace
        self._telemetry.identity_s = made.seconds
        if self._store is not None:
            self._store.name_model(self._namespace)
        if self._ranks is None:
            return []
        lost = self._ranks.name_model(self._namespace, self._plans)
        return [] if lost is None else [lost]

    def _news_of_store(self) -> list[Event]:
        """Whether planner and ranks ask it again, as far as their last words say."""
        was_well, store = self._store_was_well, self._store
        if store is None:
            return []
        self._store_was_well = self._store_view.fold(store.health).state == State.CLOSED
        return [StoreWell()] if self._store_was_well and not was_well else []

    def _carry_out(self, effects: Effects) -> list[Event]:
        """Do what a step asks for; what went wrong comes back as events for the next one."""
        lost: list[Event] = []
        self._ring.record_all(effects.spans)
        if effects.restart is not None:
            self._restart(effects.restart)
        try:
            if effects.plan is not None and self._ranks is not None:
                self._ranks.send(encode(effects.plan), self._plans)
            for order in effects.orders:
                # Orders of a step that lost its grid are for ranks that are gone.
                if self._ranks is not None and order.epoch == self._ranks.epoch:
                    self._ranks.order(order, self._io)
        except zmq.ZMQError as error:
            lost.append(GridLost(self._planner.epoch, f"a rank cannot be reached: {error}"))
        self._telemetry.ended(effects.spans)
        for query in effects.queries:
            assert self._store is not None
            self._store.ask(query, self._wake)
        for hint in effects.hints:
            assert self._store is not None
            self._store.hint(hint)
        for output in effects.outputs:
            if output.message == TAINTED:
                _log(f"request {output.request_id} was ended: {output.message}")
        if effects.outputs:
            self._tell_frontend(encode(Outputs(tuple(effects.outputs))))
        self._answer_flushes(self._store_flushes.settled(effects.flushed))
        if effects.state_changed:
            self._on_state()
        return lost

    def _answer_flushes(self, flushed: list[FlushDone]) -> None:
        if flushed:
            self._send_snapshot(time.monotonic())  # what is reported after a flush knows of it
        for done in flushed:
            self._tell_frontend(encode(done))

    def _tend_store(self, now: float) -> None:
        """What is not the planner's: how the store is, and flushes of it."""
        if self._store is None:
            return
        self._store.look(now)
        start, answers = self._store_flushes.due(now, self._is_writing)
        for call, left_s in start:
            self._store.clear(call, left_s, self._wake)
        while not self._store.cleared.empty():
            self._store_news.append(StoreEmptied())
            done = self._store_flushes.cleared(self._store.cleared.get())
            answers += [] if done is None else [done]
        self._answer_flushes(answers)

    @property
    def _is_writing(self) -> bool:
        """Pages are on their way to host memory or the store."""
        replica = self._planner.replica
        return replica.stores.is_busy or bool(replica.backups.in_flight)

    def _wake(self) -> None:
        """From a query thread: the loop has something to read."""
        os.eventfd_write(self._answered, 1)

    def _on_state(self) -> None:
        planner = self._planner
        if planner.state is not GridState.FAILED:  # the frontend says that one
            _log(
                f"grid {planner.state} (epoch {planner.epoch})"
                + (f": {planner.detail}" if planner.detail else "")
            )
        if planner.state is GridState.FAILED:
            self._end_ranks("the grid has failed", 0)
            if planner.was_ready:
                self._save_incident(planner.detail, planner.epoch)

    def _restart(self, reason: str) -> None:
        self._end_ranks(reason, 0)
        self._save_incident(reason, self._planner.epoch - 1)
        self._start_ranks()

    def _save_incident(self, reason: str, epoch: int) -> None:
        """The flight record: what all processes did before a rank was lost."""
        if not self._boot.flight_dir:  # said at the start
            return
        try:
            path = save_incident(self._rings, Path(self._boot.flight_dir), f"epoch-{epoch}", reason)
        except OSError as error:
            _log(f"no flight record in {self._boot.flight_dir}: {error.strerror}")
        else:
            _log(f"flight record {path}; show it with: forebay timeline {path} -o trace.json")

    def _save_timeline(self) -> None:
        if self._boot.settings.timeline is not None:
            try:
                path = save_timeline(self._rings, self._boot.settings.timeline, "the server ended")
            except OSError as error:
                _log(f"--timeline {self._boot.settings.timeline}: {error.strerror}")
            else:
                _log(f"timeline {path}")

    def _send_snapshot(self, now: float) -> None:
        self._snapshot_due = now + SNAPSHOT_S
        self._said_writing = self._is_writing
        snapshot, store = self._planner.snapshot(), StoreState()
        if self._store is not None:
            snapshot = msgspec.structs.replace(
                snapshot, store=self._store_view.fold(self._store.health)
            )
            store = msgspec.structs.replace(self._store.state, writing=self._is_writing)
        ranks_without = self._ranks.without if self._ranks is not None else ()
        self._tell_frontend(encode(snapshot), self._telemetry.report(store, ranks_without))

    def _tell_frontend(self, frame: bytes, *beside: bytes) -> None:
        """A frontend that has not connected yet has asked for nothing. One that reads nothing any more cannot be served: nothing that
        it waits for may be dropped silently, so this process ends, and the frontend with it."""
        try:
            self._frontend.send_multipart(
                (self._boot.frontend_identity, frame, *beside), zmq.NOBLOCK
            )
        except zmq.Again:
            _log(f"the frontend has not read {FRONTEND_QUEUE_FRAMES} messages; ending")
            self._stopping = True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise


def _frames(socket: "zmq.Socket[bytes]") -> list[tuple[bytes, bytes, bytes]]:
    """(identity, frame, what is beside it) of every message that waits; messages of another shape are dropped."""
    found: list[tuple[bytes, bytes, bytes]] = []
    while True:
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return found
        if len(parts) in (2, 3):
            found.append((parts[0], parts[1], parts[2] if len(parts) == 3 else b""))


@contextlib.contextmanager
def _reported(peer: str) -> Iterator[None]:
    """A frame that is no message is reported and dropped."""
    try:
        yield
    except ValueError as error:
        _log(f"dropped a frame from {peer}: {error}")


def _log(line: str) -> None:
    print(f"forebay planner: {line}", file=sys.stderr, flush=True)


def planner_config(boot: PlannerBoot) -> PlannerConfig:
    settings = boot.settings
    return PlannerConfig(
        pp=settings.pp,
        tp=settings.tp,
        page_size=settings.page_size,
        chunk_size=chunk_size(settings),
        max_context=boot.max_context,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        prefix_first=settings.schedule is Schedule.PREFIX,
        kv_dtype=kv_namespace(boot.kv_dtype, boot.dtype),
        write_policy=settings.write_policy,
        has_store=settings.store != "none",
        fetch_policy=settings.fetch_policy,
        fetch_threshold=NEVER_TOKENS
        if settings.fetch_route is FetchRoute.OFF
        else settings.fetch_threshold,
        staged=settings.fetch_route is FetchRoute.STAGED,
        check_every=settings.check_invariants,
        residency=STAGING if settings.host_mode is HostMode.STAGING else CACHE,
    )


def chunk_size(settings: Settings) -> int:
    """Prefill tokens that one plan may run: as asked, else what suits so many stages."""
    return settings.chunk_size or (CHUNK_SIZE if settings.pp == 1 else CHUNK_SIZE_OF_STAGES)


def open_store_desk(boot: PlannerBoot, config: PlannerConfig, meter: Meter) -> StoreDesk:
    """The store that the settings name. Raises ``StoreURLError`` if it does not answer."""
    own = layout_of(load_config(Path(boot.model_path)), config.pp, config.tp)
    return StoreDesk(boot.settings.store, own, meter)


def must_have_store(settings: Settings) -> bool:
    """Whether somebody asked for the store, or for what is nothing without one."""
    is_named = "store" in settings.given or settings.store != Settings().store
    return is_named or settings.host_mode is HostMode.STAGING


def worker_template(
    boot: PlannerBoot, config: PlannerConfig, store: StoreDesk | None
) -> WorkerBoot:
    """What all ranks are told alike."""
    settings = boot.settings
    return WorkerBoot(
        epoch=0,
        rank=0,
        pp=settings.pp,
        tp=settings.tp,
        model_path=boot.model_path,
        dtype=boot.dtype,
        kv_dtype=boot.kv_dtype,
        kernels=settings.kernels.value,
        device=settings.device,
        threads=boot.threads,
        page_size=settings.page_size,
        device_memory=boot.device_memory,
        host_memory=boot.host_memory,
        store_url=None if store is None else store.address.url,
        store_secret=None if store is None else store.address.secret,
        staged=config.staged,
        marks=boot.marks,
        max_plan_tokens=config.max_plan_tokens,
        max_running=settings.max_running,
        max_context=boot.max_context,
        plan_endpoint="",
        plan_identity=b"",
        io_endpoint="",
        io_identity=b"",
        parent_pid=os.getpid(),
    )


def main() -> None:
    boot = read_boot(PlannerBoot)
    die_with_parent(boot.parent_pid)
    if boot.settings.kernels is Kernels.TORCH:
        compiled.compile_nothing()
    config = planner_config(boot)
    meter = Meter()
    with unhurried_output():
        identifying = Identifying(Path(boot.model_path), boot.marks)
        store, without = None, list(boot.without)
        if config.has_store:
            try:
                store = open_store_desk(boot, config, meter)
            except StoreURLError as error:
                if must_have_store(boot.settings):
                    _log(str(error))
                    raise SystemExit(2) from error
                without.append(f"a private store: {error}")
                _log(f"no private store, so pages are kept in memory alone: {error}")
                config = replace(config, has_store=False)
        PlannerProcess(
            boot,
            worker_template(boot, config, store),
            config,
            store,
            Telemetry(meter, without),
            identifying,
        ).run()


if __name__ == "__main__":
    main()
