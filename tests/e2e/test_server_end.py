"""A server ends when its planner is gone or it is told to, within a bound and with nothing left, whatever else is wrong."""

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest

from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.serving import DEADLINE_S, Served, command_line, end_servers, spawn_server, start_server

PAGE = 4096


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(write_text_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def unread(model_dir: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A server that is ready, and the end of its output that nobody has read since."""
    reading, writing = os.pipe()
    process = spawn_server(model_dir, tmp_path, output=writing)
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert any("is ready on" in line for line in lines)
        yield process, lines
    process.kill()
    process.wait()


def planner_of(process: subprocess.Popen[str]) -> psutil.Process:
    (planner,) = psutil.Process(process.pid).children()
    return planner


def fill(lines: IO[str]) -> None:
    """The pipe, through a description of its own: the server's stays a blocking one."""
    writing = os.open(f"/proc/self/fd/{lines.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, bytes(PAGE))
    os.close(writing)


def test_a_server_whose_reader_has_gone_ends_with_its_planner(
    unread: tuple[subprocess.Popen[str], IO[str]],
) -> None:
    process, lines = unread
    everybody = psutil.Process(process.pid).children(recursive=True)
    lines.close()
    planner_of(process).kill()
    assert process.wait(DEADLINE_S) == 1
    assert not psutil.wait_procs(everybody, DEADLINE_S)[1]


@pytest.mark.slow
def test_a_server_whose_reader_has_gone_outlives_a_rank(
    unread: tuple[subprocess.Popen[str], IO[str]],
) -> None:
    """What the planner has to say of a lost rank was once its own end."""
    process, lines = unread
    lines.close()
    planner = planner_of(process)
    before = planner.children()
    before[0].kill()
    psutil.wait_procs(before, DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while len(planner.children()) < len(before):
        assert time.monotonic() < deadline
    process.terminate()
    assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("what", ["planner", pytest.param("server", marks=pytest.mark.slow)])
def test_a_server_whose_reader_has_stopped_reading_ends(
    unread: tuple[subprocess.Popen[str], IO[str]], what: str
) -> None:
    process, lines = unread
    everybody = psutil.Process(process.pid).children(recursive=True)
    fill(lines)
    if what == "planner":
        planner_of(process).kill()
    else:
        everybody[-1].kill()  # something to say before
        process.terminate()
    assert process.wait(DEADLINE_S) == (1 if what == "planner" else 0)
    assert not psutil.wait_procs(everybody, DEADLINE_S)[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(10))
def test_a_server_ends_at_whatever_moment_it_loses_its_planner_or_is_told_to(
    model_dir: Path, tmp_path: Path, seed: int
) -> None:
    """While it starts, under load, and while it ends already."""
    chance = random.Random(seed)
    store = f"embedded:{tmp_path / 'store'}?dram=16MiB&ssd=32MiB"
    served = start_server(model_dir, tmp_path, "--store", store, "--host-memory", "4MiB")
    try:
        end_somehow(served, chance)
    finally:
        end_servers([served])
    deadline = time.monotonic() + DEADLINE_S
    while left := of_cache(tmp_path):
        assert time.monotonic() < deadline, left


def end_somehow(served: Served, chance: random.Random) -> None:
    clients: list[threading.Thread] = []
    if chance.random() < 0.6:
        clients = [threading.Thread(target=ask, args=(served.url, number)) for number in range(4)]
        for client in clients:
            client.start()
        time.sleep(chance.uniform(0, 1.5))  # the moment is what is tried
    else:
        time.sleep(chance.uniform(0, 5))
    what = chance.choice(
        ["planner", "stopped planner", "end", "end, then planner", "stopped server, planner"]
    )
    statuses = hit(served.process, what, chance)
    assert served.process.wait(DEADLINE_S) in statuses, served.lines
    for client in clients:
        client.join(DEADLINE_S)


def ask(url: str, seed: int) -> None:
    body = {
        "model": "tiny",
        "prompt": "The water gathers before it falls. " * 8,
        "max_tokens": 150,
        "seed": seed,
        "ignore_eos": True,
    }
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as answer,
    ):
        for _ in answer.iter_lines():
            pass


def hit(process: subprocess.Popen[str], what: str, chance: random.Random) -> set[int]:
    """Do ``what`` to the server; the statuses that it may end with. Before it has a planner it can only be told to end."""
    planners = [
        child
        for child in psutil.Process(process.pid).children()
        if "forebay.runtime.planner_process" in command_line(child)
    ]
    if what.startswith("end") or not planners:
        process.terminate()
        if "planner" in what and planners:
            time.sleep(chance.uniform(0, 1))
            with contextlib.suppress(psutil.NoSuchProcess):
                planners[0].kill()
        return {0, -signal.SIGTERM}  # the latter before it serves
    if what == "stopped planner":
        planners[0].suspend()
    elif what == "planner":
        planners[0].kill()
    else:
        process.send_signal(signal.SIGSTOP)
        planners[0].kill()
        time.sleep(chance.uniform(0, 1))
        process.send_signal(signal.SIGCONT)
    return {1, 2}


def of_cache(directory: Path) -> list[psutil.Process]:
    """Every process that was started with this cache directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FOREBAY_CACHE_DIR") == str(directory):
                found.append(process)
    return found
