"""A running server as tests see it, and what its scripted planner says."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import openai

from forebay.core.messages import Submit
from tests.frontend.fake_planner import DEADLINE_S, FakePlanner
from tests.frontend.tiny_text import EOS

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
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **body})

    def wait_end(self) -> int:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), "the server did not end"
        return self.status[0]


def until(condition: Callable[[], bool]) -> None:
    """Ask again and again (each asking is a round trip to the server) until it is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass in time"


def wait_ready(server: Server) -> Server:
    until(lambda: server.http.get("/ready").status_code == 200)
    return server
