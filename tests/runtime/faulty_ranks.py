"""A server whose ranks and planner obey orders (`fault_injection`), beside a plain one that says what is right."""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay import LLM, RequestOutput, SamplingParams
from forebay.core.messages import Snapshot
from tests.pace import paced
from tests.serving import WORKER, command_line, oldest_first
from tests.unhurried import unhurried

PAGE = 16
PAGES = 5
HIT = PAGES * PAGE
DEADLINE_S = paced(60.0)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": PAGE,
    "threads_per_rank": 1,
    "fetch_threshold": PAGE,
    "fetch_policy": "wait",
    "chunk_size": 64,
    "device_memory": "512KiB",
    "host_memory": "1MiB",
}


def greedy(tokens: int = 6) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Five full pages and a token, nothing shared."""
    randomness = random.Random(seed)
    return [[randomness.randrange(5, 250) for _ in range(HIT + 1)] for _ in range(count)]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"in {DEADLINE_S:.0f} s not: {what}"
        time.sleep(0.01)


@dataclass
class Served:
    llm: LLM
    plain: LLM
    orders: Path

    def order(self, **orders: Sequence[int]) -> None:
        """What the ranks are to do from now on."""
        fresh = self.orders.with_suffix(".new")
        fresh.write_text(json.dumps(orders))
        fresh.rename(self.orders)

    def obeyed(self, what: str) -> list[tuple[int, int]]:
        """(rank, process) each time that a rank did ``what``."""
        return [(int(rank), int(pid)) for kind, rank, pid in self._log() if kind == what]

    @property
    def retracted(self) -> list[str]:
        """Requests that the planner has retracted."""
        return self.logged("retracted")

    def logged(self, what: str) -> list[str]:
        """Whom it was about, each time that the planner did ``what``: "retracted", "ticket", "query" or "used"."""
        return [
            kind.removeprefix(what + "/")
            for kind, _, _ in self._log()
            if kind.startswith(what + "/")
        ]

    def _log(self) -> list[list[str]]:
        log = self.orders.with_name(self.orders.name + ".log")
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    @property
    def snapshot(self) -> Snapshot:
        engine = self.llm._host._engine
        assert engine is not None and engine.snapshot is not None
        return engine.snapshot

    @property
    def ranks(self) -> list[psutil.Process]:
        planners = [
            child
            for child in psutil.Process().children()
            if "planner_process" in " ".join(command_line(child))
        ]
        return [
            child
            for child in oldest_first(oldest_first(planners)[-1].children())
            if WORKER in command_line(child)
        ]

    def prime(self, prompts: list[list[int]]) -> None:
        """Compute them, let all of their pages reach the store, and forget them above it."""
        stored = self.snapshot.stored_pages + PAGES * len(prompts)
        self.check(prompts)
        until(lambda: self.snapshot.stored_pages >= stored, "all pages are stored")
        self.llm.flush_cache()

    def check(
        self, prompts: list[list[int]], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """All at once; the text is right."""
        params = params or greedy()
        outputs = self.llm.generate(prompts, params)
        self.check_text(outputs, params)
        return outputs

    def check_text(self, outputs: list[RequestOutput], params: SamplingParams) -> None:
        for output in outputs:
            (expected,) = self.plain.generate([output.prompt_token_ids], params)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids

    def check_baseline(self) -> None:
        """Nothing is held: a flush finds every page free. (It waits for what ranks still have to say.)"""
        self.llm.flush_cache()
        until(lambda: not self.snapshot.running and not self.snapshot.waiting, "no request is left")
        use = self.snapshot
        assert use.device.free == use.device.capacity and use.host.free == use.host.capacity

    def submit(self, prompt: list[int], params: SamplingParams) -> "Future[RequestOutput]":
        future: Future[RequestOutput] = Future()

        def run() -> None:
            try:
                future.set_result(self.llm.generate([prompt], params)[0])
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


@contextmanager
def serving(
    model: Path, plain: LLM, directory: Path, settings: dict[str, Any], planner: dict[str, Any]
) -> Iterator[Served]:
    """A server of these settings over an empty ``directory``; ``planner``: what it takes as given (`fault_injection`)."""
    orders = directory / "orders"
    orders.write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_RANK_FAULTS", str(orders))
        for name, value in unhurried(**planner).items():
            patch.setenv(name, value)
        with LLM(
            str(model), **(SETTINGS | {"store": f"file:{directory / 'pages'}"} | settings)
        ) as llm:
            yield Served(llm, plain, orders)
