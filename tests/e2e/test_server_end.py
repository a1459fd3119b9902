"""A server ends when its planner is gone or it is told to, within a bound and with nothing left, whatever else is wrong."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.serving import DEADLINE_S, spawn_server

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


def test_a_server_whose_reader_has_gone_ends_with_its_planner(unread: tuple[subprocess.Popen[str], IO[str]]) -> None:
    process, lines = unread
    everybody = psutil.Process(process.pid).children(recursive=True)
    lines.close()
    planner_of(process).kill()
    assert process.wait(DEADLINE_S) == 1
    assert not psutil.wait_procs(everybody, DEADLINE_S)[1]


def test_a_server_whose_reader_has_gone_outlives_a_rank(unread: tuple[subprocess.Popen[str], IO[str]]) -> None:
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


@pytest.mark.parametrize("what", ["planner", "server"])
def test_a_server_whose_reader_has_stopped_reading_ends(unread: tuple[subprocess.Popen[str], IO[str]], what: str) -> None:
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
