"""A real `redis-server` (or `valkey-server`) for a test, on a port of its own, with nothing kept on disk."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

START_S = 20.0


@dataclass
class Server:
    """``child`` is the process now; `start` after `kill` begins a new, empty one on the same port."""

    port: int
    directory: Path
    options: tuple[str, ...] = ()
    child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        own = ("--port", str(self.port)) if "--tls-port" not in self.options else ("--port", "0")
        command = [
            program(), *own, "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", "",
            "--appendonly", "no", "--loglevel", "warning", *self.options,
        ]  # fmt: skip
        self.child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while True:
            assert self.child.poll() is None, f"redis-server ended: {command}"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < deadline, "redis-server does not listen"
            time.sleep(0.01)

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child = None


def program() -> str:
    """Skips the test where neither server is installed; CI installs one and counts skips."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    return found


@contextlib.contextmanager
def redis_server(directory: Path, *options: str, **fields: int) -> Iterator[Server]:
    program()
    server = Server(fields.get("port") or free_port(), directory, options)
    directory.mkdir(parents=True, exist_ok=True)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
