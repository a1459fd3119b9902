"""What `serve` does with no `--store`: a private store under the cache directory, warm after every kind of end."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from forebay.runtime.boot import set_death_signal
from forebay.settings import Settings
from tests.cli.test_served_model import DEADLINE_S, FOREBAY, OPTIONS, Served
from tests.frontend.served import until
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.pace import paced
from tests.unhurried import unhurried
from tests.warm_cache import warm_cache

PROMPT = "The water that gathers ahead of the turbines is called the forebay."


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    model = write_random_weights(write_text_model(tmp_path / "model"))
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "FOREBAY_CACHE_DIR": str(tmp_path / "cache"),
        **unhurried(),
    }
    del environment["FOREBAY_STORE"]
    started: list[Served] = []

    def start(*more: str) -> Served:
        if not (tmp_path / "cache").is_file():
            warm_cache(tmp_path / "cache")
        command = [
            *FOREBAY,
            "serve",
            str(model),
            "--port",
            "0",
            "--served-model-name",
            "tiny",
            "--fetch-threshold",
            "8",
            *OPTIONS,
            *more,
        ]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=set_death_signal,
        )
        started.append(Served(process))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()


def ask(served: Served) -> tuple[str, int]:
    """The text, and how many prompt tokens came from the store."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=DEADLINE_S).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_store"]


def stored(served: Served) -> float:
    match = re.search(
        r"^forebay_stored_pages_total (\S+)$", httpx.get(f"{served.url}/metrics").text, re.MULTILINE
    )
    assert match
    return float(match[1])


def end(served: Served, number: signal.Signals, status: int, children: int = 4) -> None:
    """Nothing is left running, and the store writes what memory has before it goes. ``children``:
    planner, two ranks, the store."""
    family = psutil.Process(served.process.pid).children(recursive=True)
    assert len(family) >= children
    served.process.send_signal(number)
    assert served.wait_end() == status
    _, alive = psutil.wait_procs(family, timeout=paced(15))
    assert not alive


def test_the_default_store_is_private_and_warm_after_kill_9(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    assert Settings().store == "embedded"
    first = serve()
    text, cached = ask(first)
    assert cached == 0
    pages = len(PROMPT) // 8
    until(lambda: stored(first) >= pages)
    assert httpx.get(f"{first.url}/health").json()["store"]["state"] == "closed"
    end(first, signal.SIGKILL, -signal.SIGKILL)
    fsck = subprocess.run(
        [*FOREBAY, "store", "fsck", str(tmp_path / "cache" / "store")],
        capture_output=True,
        text=True,
    )
    assert fsck.returncode == 0, fsck.stdout + fsck.stderr
    second = serve()
    assert ask(second) == (text, pages * 8)
    end(second, signal.SIGINT, 130)


def no_place(directory: Path) -> None:
    (directory / "cache").mkdir()
    (directory / "cache" / "store").write_text("a file")


def test_a_place_that_was_asked_for_and_cannot_be_is_one_line(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    no_place(tmp_path)
    served = serve("--store", "embedded")
    assert served.wait_end() == 2
    said = [line for line in served.lines if "store 'embedded'" in line]
    assert len(said) == 1 and "--store none" in said[0] and "Traceback" not in "".join(served.lines)


def test_a_default_place_that_cannot_be_is_done_without(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    no_place(tmp_path)
    served = serve()
    text, _ = ask(served)
    assert text
    said = [line for line in served.lines if "private store" in line]
    assert len(said) == 1 and "Traceback" not in "".join(served.lines)
    health = httpx.get(f"{served.url}/health").json()
    assert health["store"]["state"] == "none"
    assert [line for line in health["without"] if line.startswith("a private store: ")]
    flush = httpx.post(f"{served.url}/cache/flush", json={"tiers": ["store"]})
    assert flush.status_code == 400 and "no --store" in flush.json()["error"]["message"]
    end(served, signal.SIGTERM, 0, children=3)


def test_a_cache_that_cannot_be_is_done_without(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    """No store, no flight records and no compiled kernels: each is said, at the start and in /health."""
    (tmp_path / "cache").write_text("a file")
    served = serve()
    assert ask(served)[0]
    without = httpx.get(f"{served.url}/health").json()["without"]
    kinds = [line.partition(":")[0] for line in without]
    assert kinds == ["flight records", "a private store", "compiled kernels"]
    for kind in ("no flight records: ", "no private store, ", "no compiled kernels: "):
        assert [line for line in served.lines if kind in line]
    end(served, signal.SIGTERM, 0, children=3)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--store", "embedded"), "store 'embedded'"),
        (("--host-mode", "staging"), "store 'embedded'"),
        (("--kernels", "native"), "--kernels native"),
        (("--timeline", "{}/cache/below"), "--timeline"),
    ],
)
def test_what_was_asked_for_is_not_done_without(
    serve: Callable[..., Served], tmp_path: Path, asked: tuple[str, str], said: str
) -> None:
    (tmp_path / "cache").write_text("a file")
    served = serve(*(word.format(tmp_path) for word in asked))
    assert served.wait_end() == 2
    assert [line for line in served.lines if said in line]
    assert "Traceback" not in "".join(served.lines)
