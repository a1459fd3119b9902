"""A real server (uvicorn, uvloop, sockets) over a planner that follows the test's script."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvloop

from forebay.frontend.model import ServedModel, load_served_model
from forebay.frontend.server import listen_all, serve_on
from forebay.settings import Settings
from tests.frontend.fake_planner import DEADLINE_S, FakePlanner
from tests.frontend.served import MODEL, Server, says, wait_ready
from tests.frontend.tiny_text import CONTEXT, write_text_model


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    path: Path = write_text_model(tmp_path_factory.mktemp("text_model"))
    return load_served_model(path, MODEL, CONTEXT)


@pytest.fixture(scope="session")
def start_server(text_model: ServedModel) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(
        settings: Settings | None = None,
        planner: FakePlanner | None = None,
        model: ServedModel = text_model,
    ) -> Server:
        socks = listen_all("127.0.0.1", 0)
        port = socks[0].getsockname()[1]
        planner = planner or FakePlanner(says("hello"), CONTEXT)
        status: list[int] = []

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                status.append(
                    runner.run(serve_on(socks, planner, model, settings or Settings(store="none")))
                )

        thread = threading.Thread(target=run)
        thread.start()
        url = f"http://127.0.0.1:{port}"
        server = Server(
            planner, url, port, httpx.Client(base_url=url, timeout=DEADLINE_S), thread, status
        )
        started.append(server)
        return server

    yield start
    for server in started:
        server.http.close()
        server.planner.stop()
        server.wait_end()


@pytest.fixture(scope="session")
def shared_server(start_server: Callable[..., Server]) -> Server:
    return wait_ready(start_server())


@pytest.fixture
def server(shared_server: Server) -> Server:
    """One server for all tests that leave it alive, with a planner that starts every test afresh."""
    shared_server.planner.reset(says("hello"))
    return shared_server
