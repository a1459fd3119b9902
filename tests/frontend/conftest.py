"""A real server (uvicorn, uvloop, sockets) over a planner that follows the test's script."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import uvloop
from fake_planner import DEADLINE_S, FakePlanner
from tiny_text import CONTEXT, EOS, write_text_model

from forebay.core.messages import Submit
from forebay.frontend.model import ServedModel, load_served_model
from forebay.frontend.server import listen, serve_on
from forebay.settings import Settings

MODEL = "tiny"


def says(text: str, end: bool = True) -> Callable[[Submit], list[int]]:
    """Every sequence gets this text, then its end, or the text again and again."""
    tokens = list(text.encode())
    return lambda _: [*tokens, EOS] if end else tokens * 1000


@dataclass
class Server:
    """``status``: the exit status, once it has ended."""

    planner: FakePlanner
    url: str
    port: int
    http: httpx.Client
    thread: threading.Thread
    status: list[int]

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **body})

    def wait_end(self) -> int:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), "the server did not end"
        return self.status[0]


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    path: Path = write_text_model(tmp_path_factory.mktemp("text_model"))
    return load_served_model(path, MODEL, CONTEXT)


@pytest.fixture(scope="session")
def start_server(text_model: ServedModel) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(settings: Settings | None = None, planner: FakePlanner | None = None) -> Server:
        sock = listen("127.0.0.1", 0)
        port = sock.getsockname()[1]
        planner = planner or FakePlanner(says("hello"), CONTEXT)
        status: list[int] = []

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                status.append(runner.run(serve_on(sock, planner, text_model, settings or Settings())))

        thread = threading.Thread(target=run)
        thread.start()
        url = f"http://127.0.0.1:{port}"
        server = Server(planner, url, port, httpx.Client(base_url=url, timeout=DEADLINE_S), thread, status)
        started.append(server)
        return server

    yield start
    for server in started:
        server.http.close()
        server.planner.stop()
        server.wait_end()


def wait_ready(server: Server) -> Server:
    deadline = time.monotonic() + DEADLINE_S
    while server.http.get("/ready").status_code != 200:
        assert time.monotonic() < deadline, "the server did not become ready"
    return server


@pytest.fixture(scope="session")
def shared_server(start_server: Callable[..., Server]) -> Server:
    return wait_ready(start_server())


@pytest.fixture
def server(shared_server: Server) -> Server:
    """One server for all tests that leave it alive, with a planner that starts every test afresh."""
    shared_server.planner.reset(says("hello"))
    return shared_server
