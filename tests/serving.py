"""`forebay serve` as a process over the real engine with a tiny random model, for the tests that start it."""

import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from forebay.runtime.boot import set_death_signal
from tests.pace import paced
from tests.warm_cache import warm_cache

DEADLINE_S = paced(90.0)
OPTIONS = ["--pp", "2", "--page-size", "8", "--device-memory", "4MiB", "--threads-per-rank", "1"]
WORKER = "forebay.runtime.worker"
FOREBAY = [sys.executable, "-m", "forebay.cli"]


@dataclass
class Served:
    """A server process; its output is read as it comes."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()

    def wait_line(self, text: str) -> str:
        with self._changed:
            found = self._changed.wait_for(
                lambda: [line for line in self.lines if text in line], DEADLINE_S
            )
        assert found, self.lines
        return found[0]

    @property
    def url(self) -> str:
        match = re.search(r"http://\S+?:\d+", self.wait_line("is ready on"))
        assert match
        return match[0]

    def wait_end(self) -> int:
        return self.process.wait(DEADLINE_S)

    @property
    def planner(self) -> psutil.Process:
        (planner,) = psutil.Process(self.process.pid).children()
        return planner

    @property
    def ranks(self) -> list[psutil.Process]:
        """Of the grid that stands or starts, in the order of their numbers."""
        return [
            child
            for child in oldest_first(self.planner.children())
            if WORKER in command_line(child)
        ]


def oldest_first(processes: list[psutil.Process]) -> list[psutil.Process]:
    """In the order in which they were started, which that of their numbers is not: those start again at the bottom."""
    return sorted(processes, key=lambda process: process.create_time())


def command_line(process: psutil.Process) -> list[str]:
    """Empty for one that has just ended."""
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return words


def start_server(model_dir: Path, cache_dir: Path, *more: str, **environment: str) -> Served:
    """Flight records go below ``cache_dir``."""
    return Served(spawn_server(model_dir, cache_dir, *more, output=subprocess.PIPE, **environment))


def spawn_server(
    model_dir: Path, cache_dir: Path, *more: str, output: int, **environment: str
) -> subprocess.Popen[str]:
    """It ends with this process, also by kill -9, and with the thread that calls this, so let that be the test's own."""
    command = [
        *FOREBAY,
        "serve",
        str(model_dir),
        "--port",
        "0",
        "--served-model-name",
        "tiny",
        *OPTIONS,
        *more,
    ]
    variables = (
        os.environ
        | {"PYTHONUNBUFFERED": "1", "FOREBAY_CACHE_DIR": str(warm_cache(cache_dir))}
        | environment
    )
    return subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
        start_new_session=True,
        preexec_fn=set_death_signal,
    )


def end_servers(servers: list[Served]) -> None:
    for served in servers:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()
