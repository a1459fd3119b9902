"""A server whose pages are in a real Redis or Mooncake: the next server is warm, and the text is right on the store's bad days."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.cli.test_served_model import DEADLINE_S, Served
from tests.cli.test_store_faults import (
    PAGE,
    PAGES,
    Start,
    ask,
    check_baseline,
    is_warm,
    prime,
    start,  # noqa: F401 - a fixture
    state,
    until,
)
from tests.store.mooncake_cluster import mooncake_cluster
from tests.store.redis_server import redis_server

PASSWORD = "not for everybody"


@dataclass
class Other:
    """A store that is not ours. ``main``: the process that answers; `start` begins an empty one after `kill`."""

    url: str
    main: Callable[[], subprocess.Popen[bytes] | None]
    kill: Callable[[], None]
    start: Callable[[], None]


@pytest.fixture(scope="module", params=["redis", pytest.param("mooncake", marks=pytest.mark.slow)])
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Other]:
    if request.param == "redis":
        path = tmp_path_factory.mktemp("redis")
        with redis_server(path, "--requirepass", PASSWORD) as redis:
            url = f"redis://:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{redis.port}/1"
            yield Other(url, lambda: redis.child, redis.kill, redis.start)
    else:
        with mooncake_cluster() as mooncake:
            yield Other(mooncake.url, lambda: mooncake.master, mooncake.kill, mooncake.start)


@pytest.fixture(scope="module")
def served(start: Start, other: Other) -> Served:  # noqa: F811
    return start(other.url)


def test_what_one_server_stored_the_next_one_reads_with_another_grid(
    served: Served,
    start: Start,  # noqa: F811
    other: Other,
) -> None:
    name, text = prime(served, "first")
    until(lambda: is_warm(served, name, text))
    another = start(other.url, "--pp", "1")
    assert ask(another, name) == (text, PAGES * PAGE)
    check_baseline(another)
    another.process.send_signal(signal.SIGTERM)
    assert another.wait_end() == 0


def test_the_password_is_shown_to_nobody(served: Served) -> None:
    for path in ("/health", "/cache", "/metrics"):
        said = httpx.get(f"{served.url}{path}").text
        assert PASSWORD not in said and "not%20for" not in said, path
    store = httpx.get(f"{served.url}/cache").json()["tiers"]["store"]
    assert store["url"].startswith(("redis://:***@", "mooncake://"))
    assert len(httpx.get(f"{served.url}/health").json()["store"]["lost"]) == 3


def test_a_flush_takes_this_models_pages(served: Served) -> None:
    name, text = prime(served, "flushed")
    body = {"tiers": ["device", "host", "store"], "timeout_s": 30}
    answer = httpx.post(f"{served.url}/cache/flush", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    assert ask(served, name) == (text, 0)


def test_a_server_that_stands_still_dies_and_comes_back_empty_costs_pages_and_never_the_text(
    served: Served, other: Other
) -> None:
    name, text = prime(served, "faulty")
    until(lambda: is_warm(served, name, text))
    main = other.main()
    assert main is not None
    main.send_signal(signal.SIGSTOP)
    check_baseline(served)
    assert ask(served, name) == (text, 0)
    main.send_signal(signal.SIGCONT)
    until(lambda: state(served) == "closed")
    other.kill()
    check_baseline(served)
    assert ask(served, name) == (text, 0)
    until(lambda: state(served) != "closed")
    other.start()
    until(lambda: state(served) == "closed")
    name, text = prime(served, "after it")
    until(
        lambda: is_warm(served, name, text)
    )  # another project's client takes a while to find its new master
    check_baseline(served)
