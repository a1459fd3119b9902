"""One arm's server, from start to end, and the little that a bench asks of it beside completions.

Both arms' servers live through the whole run, so that rounds can take turns; the one that is not measured sleeps in poll calls.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from forebay.bench.ttft.load import Client
from forebay.bench.ttft.plan import Arm, Experiment, TtftError
from forebay.bench.ttft.server_process import ServerBoot
from forebay.runtime.boot import frame_boot
from forebay.settings import Settings

START_S = 180.0
STOP_S = 40.0
DRAIN_S = 120.0
FLUSH_S = 60.0
LOOK_S = 0.05
MODEL_NAME = "bench"


class ArmServer:
    """A running server. ``timeline``: the directory that its span rings go to when it ends."""

    def __init__(self, arm: Arm, client: Client, timeline: Path) -> None:
        self.arm = arm
        self.client = client
        self.timeline = timeline

    def drain(self) -> None:
        """Until nothing runs and everything computed has reached the store. Raises ``TtftError`` if that takes too long."""
        drain(self.client, self.arm.name)

    def flush(self, tiers: Sequence[str]) -> None:
        flush(self.client, tiers)


def drain(client: Client, name: str) -> None:
    """Until everything that the server has computed has reached its store. Raises ``TtftError`` if that takes too long."""
    deadline = time.monotonic() + DRAIN_S
    while client.get("/cache")["tiers"]["store"]["writing"]:
        if time.monotonic() > deadline:
            raise TtftError(
                f"{name}: pages have been on their way to the store for more than {DRAIN_S:.0f} s"
            )
        time.sleep(LOOK_S)


def flush(client: Client, tiers: Sequence[str]) -> None:
    client.post("/cache/flush", {"tiers": list(tiers), "timeout_s": FLUSH_S})


@contextlib.contextmanager
def servers(
    experiment: Experiment, directory: Path, sizes: dict[str, int]
) -> Iterator[list[ArmServer]]:
    """One server for each arm, ready; ended when the block is left. ``directory`` takes stores and span rings; ``sizes``: device and
    host memory where the settings name none.

    Raises ``TtftError`` with the server's own words if one does not come up.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for number, arm in enumerate(experiment.arms):
            place = directory / f"arm-{number}"
            place.mkdir()
            settings = arm_settings(experiment.settings, arm, place, sizes)
            server = stack.enter_context(running(experiment.model, settings))
            started.append(
                ArmServer(
                    arm,
                    Client(server.url, MODEL_NAME, experiment.shape.output_len),
                    place / "timeline",
                )
            )
        yield started


def arm_settings(common: Settings, arm: Arm, place: Path, sizes: dict[str, int]) -> Settings:
    """The server's settings: a private store is kept in ``place``, so that each arm has one of its own."""
    given: dict[str, Any] = {
        name: size for name, size in sizes.items() if getattr(common, name) is None
    }
    if arm.host_mode is not None:
        given["host_mode"] = arm.host_mode
    store = common.store
    if store == "embedded" or store.startswith("embedded?"):
        store = f"embedded:{place / 'store'}{store.removeprefix('embedded')}"
    return msgspec.structs.replace(
        common,
        **given,
        host="127.0.0.1",
        port=0,
        api_key=None,
        served_model_name=MODEL_NAME,
        fetch_route=arm.route,
        store=store,
        timeline=place / "timeline",
    )


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready. ``pid``: of its frontend, which all its other processes descend from."""

    url: str
    pid: int


@contextlib.contextmanager
def running(model: str, settings: Settings) -> Iterator[Running]:
    """A server for as long as the block lasts. Raises ``TtftError`` with its own words if it does not come up."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "forebay.bench.ttft.server_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,  # Ctrl-C is for us; we end it in good order
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(frame_boot(ServerBoot(model, settings, os.getpid())))
                process.stdin.flush()
            yield Running(_wait_ready(process, errors), process.pid)
        finally:
            _end(process)


def _wait_ready(process: "subprocess.Popen[bytes]", errors: IO[str]) -> str:
    """Raises ``TtftError`` with the server's last line if it ends, or is not ready in time."""
    found: list[str] = []
    settled = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            match = re.search(r"is ready on (http://\S+?:\d+)", line.decode(errors="replace"))
            if match:
                found.append(match[1])
                settled.set()
        settled.set()

    threading.Thread(target=read, daemon=True).start()
    settled.wait(START_S)
    if found:
        return found[0]
    errors.seek(0)
    said = errors.read().strip().splitlines()
    raise TtftError(
        f"the server did not start: {said[-1].removeprefix('forebay: ') if said else f'not ready after {START_S:.0f} s'}"
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
