"""What tickets and write-through cost when nothing comes of them: CPU time, which neighbours on the machine disturb little.

Each arm is a server of its own that is asked prompts of its own, none of them stored. ``compute``: the main threads of the ranks,
which run the forward passes. ``beside``: all other threads of the ranks (copies, fetches, writes, channels) and the planner. The
store's own process is counted apart. The second half of the prompts is counted: by then every page of every pool has been touched.
"""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from forebay.bench.token_ids import first_token_id
from forebay.bench.ttft.load import Client
from forebay.bench.ttft.plan import Ask, TtftError
from forebay.bench.ttft.server import MODEL_NAME, drain, running
from forebay.models.config import ModelConfig
from forebay.settings import FetchRoute, Settings

TOKENS = 1024
PROMPTS = 16
CONCURRENCY = 2
NS = 1e-9
POOL_PROMPTS = 6  # fewer than are asked, so that pages are used again


@dataclass(frozen=True, slots=True)
class Arm:
    """``given``: settings beside the common ones. ``than``: the arm that it is one thing more than."""

    name: str
    given: dict[str, Any]
    than: str | None = None


@dataclass(frozen=True, slots=True)
class Cpu:
    """Seconds."""

    compute: float = 0.0
    beside: float = 0.0
    store: float = 0.0

    def since(self, earlier: "Cpu") -> "Cpu":
        return Cpu(
            self.compute - earlier.compute, self.beside - earlier.beside, self.store - earlier.store
        )


def arms(directory: Path) -> list[Arm]:
    off = {"fetch_route": FetchRoute.OFF}
    embedded, files = f"embedded:{directory / 'cost'}", f"file:{directory / 'cost-pages'}"
    return [
        Arm("nothing below device memory", {"store": "none", "host_memory": 1}),
        Arm("write-through to host memory", {"store": "none"}, "nothing below device memory"),
        Arm("and on to embedded", {"store": embedded, **off}, "nothing below device memory"),
        Arm("and tickets", {"store": embedded}, "and on to embedded"),
        Arm("write-through to file:", {"store": files, **off}, "nothing below device memory"),
    ]


def measure(
    model: str, settings: Settings, config: ModelConfig, directory: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row an arm, in percent of the forward passes' CPU time. Raises ``TtftError``."""
    rows: dict[str, dict[str, Any]] = {}
    for arm in arms(directory):
        say(f"cost: {arm.name}")
        cpu = _measure(model, _settings(settings, config, arm), config, arm)
        share = 100 * cpu.beside / cpu.compute
        more = None if arm.than is None else share - rows[arm.than]["beside_pct"]
        rows[arm.name] = {
            "arm": arm.name,
            "compute_s": cpu.compute,
            "beside_pct": share,
            "more_pct": more,
            "than": arm.than,
            "store_pct": 100 * cpu.store / cpu.compute,
        }
    return list(rows.values())


def _settings(common: Settings, config: ModelConfig, arm: Arm) -> Settings:
    size = POOL_PROMPTS * TOKENS * 2 * config.layers * config.kv_heads * config.head_dim * 4
    own = {"host": "127.0.0.1", "port": 0, "served_model_name": MODEL_NAME, "chunk_size": TOKENS}
    sizes = {"device_memory": size, "host_memory": size}
    return msgspec.structs.replace(common, **(own | sizes | arm.given))


def _measure(model: str, settings: Settings, config: ModelConfig, arm: Arm) -> Cpu:
    dice = random.Random(f"cost/{arm.name}")  # what another arm has stored would be hit
    with running(model, settings) as server:
        client = Client(server.url, MODEL_NAME, 1)
        _load(client, config, dice, arm)
        before = _cpu(server.pid)
        _load(client, config, dice, arm)
        return _cpu(server.pid).since(before)


def _load(client: Client, config: ModelConfig, dice: random.Random, arm: Arm) -> None:
    prompts = [
        [
            dice.randrange(first_token_id(config.vocab_size), config.vocab_size)
            for _ in range(TOKENS)
        ]
        for _ in range(PROMPTS)
    ]
    answers = client.closed_load(
        [Ask(index, prompt, False) for index, prompt in enumerate(prompts)], CONCURRENCY, "cost"
    )
    if any(answer.cached_store for answer in answers):
        raise TtftError(f"{arm.name}: nothing was to be hit, and the store had some of it")
    drain(client, arm.name)


def _cpu(frontend: int) -> Cpu:
    """Of all processes below ``frontend``, so far."""
    compute = beside = store = 0.0
    for process in psutil.Process(frontend).children(recursive=True):
        words = " ".join(process.cmdline())
        threads = dict(_threads(process.pid))
        if "runtime.worker" in words:
            main = threads.pop(process.pid, 0.0)
            compute += main
            beside += sum(threads.values())
        elif "planner_process" in words:
            beside += sum(threads.values())
        elif "embedded_process" in words:
            store += sum(threads.values())
    return Cpu(compute, beside, store)


def _threads(pid: int) -> Iterator[tuple[int, float]]:
    """(thread, seconds on a core): the scheduler's own count, to the nanosecond."""
    for name in os.listdir(f"/proc/{pid}/task"):
        yield int(name), int(Path(f"/proc/{pid}/task/{name}/schedstat").read_text().split()[0]) * NS
