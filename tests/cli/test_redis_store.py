"""A server whose pages are in a real Redis or Valkey: warm after a restart, in another grid too, and right on the store's bad days."""

import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.cli.test_served_model import DEADLINE_S, Served
from tests.cli.test_store_faults import (
    PAGE,
    PAGES,
    Start,
    ask,
    check_baseline,
    check_hit,
    prime,
    start,  # noqa: F401 - a fixture
    state,
    until,
)
from tests.store.redis_server import Server, redis_server

PASSWORD = "not for everybody"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis"), "--requirepass", PASSWORD) as one:
        yield one


@pytest.fixture(scope="module")
def url(server: Server) -> str:
    return f"redis://:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{server.port}/1"


@pytest.fixture(scope="module")
def served(start: Start, url: str) -> Served:  # noqa: F811
    return start(url)


def test_what_one_server_stored_the_next_one_reads(served: Served, start: Start, url: str) -> None:  # noqa: F811
    name, text = prime(served, "redis")
    check_hit(served, name, text)
    another = start(url)
    assert ask(another, name) == (text, PAGES * PAGE)
    check_baseline(another)
    another.process.send_signal(signal.SIGTERM)
    assert another.wait_end() == 0


def test_the_password_is_shown_to_nobody(served: Served) -> None:
    for path in ("/health", "/cache", "/metrics"):
        said = httpx.get(f"{served.url}{path}").text
        assert PASSWORD not in said and "not%20for" not in said, path
    store = httpx.get(f"{served.url}/cache").json()["tiers"]["store"]
    assert store["url"].startswith("redis://:***@")
    assert len(httpx.get(f"{served.url}/health").json()["store"]["lost"]) == 3


def test_a_flush_takes_this_models_pages(served: Served) -> None:
    name, text = prime(served, "flushed")
    body = {"tiers": ["device", "host", "store"], "timeout_s": 30}
    answer = httpx.post(f"{served.url}/cache/flush", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    assert ask(served, name) == (text, 0)


def test_a_server_that_stands_still_dies_and_comes_back_empty_costs_pages_and_never_the_text(
    served: Served, server: Server
) -> None:
    name, text = prime(served, "faulty")
    check_hit(served, name, text)
    assert server.child is not None
    server.child.send_signal(signal.SIGSTOP)
    check_baseline(served)
    assert ask(served, name) == (text, 0)
    server.child.send_signal(signal.SIGCONT)
    until(lambda: state(served) == "closed")
    server.kill()
    check_baseline(served)
    assert ask(served, name) == (text, 0)
    until(lambda: state(served) != "closed")
    server.start()
    until(lambda: state(served) == "closed")
    name, text = prime(served, "after it")
    check_hit(served, name, text)
    check_baseline(served)
