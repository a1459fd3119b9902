"""The store's roles as real processes, started by the command line, which may be killed and stopped."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.runtime.boot import set_death_signal
from tests.pace import paced

START_S = paced(30.0)


class Process:
    """``forebay store ARGS --json``; ``said`` is what it printed when it had started. ``prelude``: code that it runs first, which
    makes its disk or its clock another one."""

    def __init__(self, *args: str, prelude: str = "") -> None:
        self.args = args
        self.prelude = prelude
        command = [
            sys.executable,
            "-c",
            prelude + "\nfrom forebay.cli.store import app; app(prog_name='forebay store')",
        ]
        self.child = subprocess.Popen(
            [*command, *args, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=set_death_signal,
        )
        assert self.child.stdout is not None and self.child.stderr is not None
        ready, _, _ = select.select([self.child.stdout], [], [], START_S)
        line = self.child.stdout.readline() if ready else b""
        if not line:
            self.child.kill()
            raise AssertionError(f"{args} did not start: {self.child.stderr.read().decode()}")
        self.said: dict[str, object] = json.loads(line)

    @property
    def url(self) -> str:
        return str(self.said["url"])

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.child.send_signal(signal.SIGCONT)
        self.child.kill()
        self._reap()

    def stop(self) -> None:
        os.kill(self.child.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.child.pid, signal.SIGCONT)

    def end(self) -> str:
        """SIGTERM, and what it said on standard error."""
        if self.child.returncode is None:
            self.child.send_signal(signal.SIGCONT)
            self.child.terminate()
            try:
                self.child.wait(20)
            except subprocess.TimeoutExpired:
                self.child.kill()
        return self._reap()

    def again(self) -> "Process":
        """The same role anew, on the address that it had."""
        args = list(self.args)
        if "url" in self.said:
            args[args.index("--listen") + 1] = self.url.removeprefix("forebay://")
        return Process(*args, prelude=self.prelude)

    def _reap(self) -> str:
        _, errors = self.child.communicate(timeout=paced(20))
        return errors.decode()


class Farm:
    """Starts processes and ends every one of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prelude = ""  # of every process started from now on
        self.processes: list[Process] = []

    def run(self, *args: str) -> Process:
        self.processes.append(Process(*args, prelude=self.prelude))
        return self.processes[-1]

    def again(self, process: Process) -> Process:
        self.processes.append(process.again())
        return self.processes[-1]

    def master(self, *args: str) -> Process:
        return self.run("master", "--listen", "127.0.0.1:0", "--lease-s", "1", *args)

    def holder(self, master: Process, name: str = "h", dram: str = "64MiB", *args: str) -> Process:
        return self.run(
            "holder", "--master", master.url, "--dram", dram, "--ssd", str(self.path / name), *args
        )


@contextmanager
def farm(path: Path) -> Iterator[Farm]:
    made = Farm(path)
    try:
        yield made
    finally:
        errors = [process.end() for process in made.processes if process.child.returncode is None]
        assert not any("Traceback" in text for text in errors), errors
