"""`forebay serve`: listens, starts the planner, serves until it is told to stop or the planner is gone, and leaves nothing behind.

bind (a port in use is known before anything is loaded) -> model files -> planner -> serve -> streams end -> planner ends
"""

import asyncio
import contextlib
import errno
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
import uvloop

from forebay.frontend.engine import Engine, EngineDown, Planner
from forebay.frontend.model import ServedModel, load_served_model
from forebay.models.resolve import resolve_model
from forebay.observe.flight import save_incident
from forebay.observe.metrics import Metrics
from forebay.observe.output import unhurried_output
from forebay.runtime.child_end import ChildEnd
from forebay.runtime.launch import start_planner
from forebay.settings import Settings, listed

BACKLOG = 2048
STALL_MS = 60_000  # a client that takes none of what was sent to it
DRAIN_S = 5
LAST_WORD_S = 30.0  # a few rounds of any health check
PLANNER_STOP_S = 25.0  # ranks, then a private store that writes what memory has and its log has not
FORCE_S = DRAIN_S + PLANNER_STOP_S + 10.0
EXIT_INTERRUPTED = 130
EXIT_NEVER_READY = 2
EXIT_ENGINE_LOST = 1


class ListenError(Exception):
    """There is no listening as asked; one line: what was given, why not, what to do."""


def serve(model: str, settings: Settings) -> int:
    """Serve until a signal or the planner's end; the exit status.

    Raises, before anything runs, one-line errors of the user's making: ``ListenError``, ``models.errors.ModelError``,
    ``runtime.launch.StartError``.
    """
    _allow_many_connections()
    with unhurried_output(), contextlib.ExitStack() as stack:
        socks = [stack.enter_context(sock) for sock in listen_all(settings.host, settings.port)]
        resolved = resolve_model(model)
        planner = start_planner(resolved, settings)
        bound = _EndBound(planner.process.pid)
        bound.start()
        try:
            name = listed(settings.served_model_name or resolved.name)[0]
            served = load_served_model(
                resolved.path, name, planner.max_context, settings.generation_config
            )
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(serve_on(socks, planner, served, settings, bound.begin))
        finally:
            bound.begin()
            planner.stop(PLANNER_STOP_S)


def listen_all(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of ``host``, all with one port. `localhost` is the loopback of both families, whatever
    this machine's table of hosts says (RFC 6761, 6.3).

    Raises ``ListenError``.
    """
    addresses = _addresses(host, port)
    socks: list[socket.socket] = []
    refusals: list[OSError] = []
    for family, address in addresses:
        if port == 0 and socks:
            address = (address[0], socks[0].getsockname()[1], *address[2:])
        try:
            socks.append(_listen(family, address))
        except OSError as error:
            refusals.append(error)
    in_use = next((error for error in refusals if error.errno == errno.EADDRINUSE), None)
    if socks and (in_use is None or port == 0):  # a family that this machine has not is no loss
        return socks
    for sock in socks:
        sock.close()
    hint = "give another --host or --port, or port 0 for a free one"
    reason = (in_use or refusals[0]).strerror
    raise ListenError(f"cannot listen on {host} port {port}: {reason}; {hint}")


def _addresses(host: str, port: int) -> list[tuple[int, Any]]:
    """Families and what to bind in them. Raises ``ListenError``."""
    if host.rstrip(".").lower() == "localhost":
        return [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET6, ("::1", port, 0, 0))]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise ListenError(f"--host is {host!r}: {why}; give an address of this machine") from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _listen(family: int, address: Any) -> socket.socket:
    """Raises ``OSError``."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_MS)  # connections inherit it
    try:
        sock.bind(address)
        sock.listen(BACKLOG)  # binding alone would not notice a port in use that allows reuse
    except OSError:
        sock.close()
        raise
    return sock


async def serve_on(
    socks: list[socket.socket],
    planner: Planner,
    model: ServedModel,
    settings: Settings,
    on_ending: Callable[[], None] = lambda: None,
) -> int:
    """Serve over listening sockets until SIGINT, SIGTERM or the engine's death; the exit status. ``on_ending``: called as soon as
    one of them has come."""
    # FastAPI takes long to import: the planner and its ranks start meanwhile.
    from forebay.frontend.app import build_app
    from forebay.frontend.connection import Connection
    from forebay.frontend.service import Service

    started_at = time.monotonic()
    metrics = Metrics()
    engine = Engine(planner, metrics)
    service = Service(engine, model, settings, metrics)
    server = _Server(
        uvicorn.Config(
            build_app(service),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_s,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    ending = _Ending(server, engine, planner, on_ending)
    if (
        threading.current_thread() is threading.main_thread()
    ):  # no other thread can be told of signals
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, ending.on_signal, EXIT_INTERRUPTED)
        loop.add_signal_handler(signal.SIGTERM, ending.on_signal, 0)
    engine.death.add_done_callback(ending.on_death)
    host, port = socks[0].getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    _say(f"listening on {address}; loading {model.name}")
    announcement = asyncio.create_task(_announce(engine, model.name, address, started_at))
    try:
        await server.serve(sockets=socks)
    finally:
        announcement.cancel()
        engine.close()
        service.encoder.close()
        await service.grammars.close()
    return ending.status


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `_Ending`'s: uvicorn's own way would wait for streams to run to their end."""
        yield


class _Ending:
    """Why and how the server ends. ``status`` becomes the exit status."""

    def __init__(
        self,
        server: uvicorn.Server,
        engine: Engine,
        planner: Planner,
        on_ending: Callable[[], None],
    ) -> None:
        self._server = server
        self._on_ending = on_ending
        self._engine = engine
        self._planner = planner
        self.status = 0
        self._ending = False

    def on_signal(self, status: int) -> None:
        if self._ending:  # asked twice: no more waiting for clients
            self._server.force_exit = True
            return
        if not self._engine.death.done():
            self.status = status
        self._end()
        self._engine.close("the server is shutting down")

    def on_death(self, death: asyncio.Future[str]) -> None:
        """The planner has ended, or the grid is beyond its retries. In that case health checks are still told why for a while."""
        if self._ending:
            return
        self.status = EXIT_ENGINE_LOST if self._engine.was_ready else EXIT_NEVER_READY
        at_once = self._engine.planner_lost or not self._engine.was_ready
        asyncio.get_running_loop().call_later(
            0 if at_once else LAST_WORD_S, self._end
        )  # whatever goes wrong with the words below
        if (
            self._engine.planner_lost and self._engine.was_ready
        ):  # otherwise the planner has written it
            _save_incident(self._planner, death.result())
        print(f"forebay: {death.result()}", file=sys.stderr, flush=True)
        if not at_once:
            print(
                f"forebay: answering 503 for {LAST_WORD_S:.0f} s, then ending",
                file=sys.stderr,
                flush=True,
            )

    def _end(self) -> None:
        self._ending = True
        self._server.should_exit = True
        self._on_ending()


class _EndBound(threading.Thread):
    """Once the planner is gone or the end has begun, the process has `FORCE_S` to end by itself: a thread that never comes back (a
    chat template that does not end, say) or an error on the way must not leave a server that serves nothing."""

    def __init__(self, planner_pid: int) -> None:
        super().__init__(name="end-bound", daemon=True)
        self._begun = os.eventfd(0)
        self._planner = ChildEnd(planner_pid)

    def begin(self) -> None:
        os.eventfd_write(self._begun, 1)

    def run(self) -> None:
        select.select([self._begun, self._planner.fileno()], (), ())
        time.sleep(FORCE_S)
        os._exit(EXIT_ENGINE_LOST)


def _save_incident(planner: Planner, reason: str) -> None:
    if planner.flight_dir is None:  # said at the start
        return
    try:
        path = save_incident(planner.rings, planner.flight_dir, "planner", reason)
    except OSError as error:
        print(
            f"forebay: no flight record in {planner.flight_dir}: {error.strerror}",
            file=sys.stderr,
            flush=True,
        )
    else:
        print(
            f"forebay: flight record {path}; show it with: forebay timeline {path} -o trace.json",
            file=sys.stderr,
            flush=True,
        )


async def _announce(engine: Engine, name: str, address: str, started_at: float) -> None:
    with contextlib.suppress(EngineDown):  # `_Ending` reports that
        await engine.wait_ready()
        _say(f"{name} is ready on {address} after {time.monotonic() - started_at:.1f} s")


def _allow_many_connections() -> None:
    """As many open connections as the system lets this user have; the default soft limit is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(text: str) -> None:
    print(f"forebay: {text}", flush=True)
