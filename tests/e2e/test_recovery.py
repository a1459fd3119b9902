"""Ranks that die, stand still or differ under a real server: every accepted request gets the text that it would have got (rule R3)."""

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from forebay.observe.events import read_flight_record, spans_of
from forebay.observe.timeline import chrome_trace
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.observe.trace_checks import check_trace
from tests.pace import paced
from tests.serving import DEADLINE_S, Served, end_servers, start_server
from tests.unhurried import unhurried

START = ("--chunk-size", "8")  # a long prompt is many plans
TOKENS = 150
SEEDS = (1, 2, 3)
PROMPT = "The water gathers before it falls. " * 8
PLANT = """
import os, sys
from pathlib import Path
if "forebay.runtime.worker" in sys.orig_argv:
    from forebay.runtime.execute import Executor
    run = Executor.run
    def damaged(self, plan):
        at = {0: 40, 1: 120}.get(self._stage_number)  # the passes of a warm-up have small numbers
        flag = Path(os.environ["PLANT_FLAGS"]) / f"stage-{self._stage_number}"
        if at is not None and plan.number >= at and not flag.exists():
            flag.write_text(str(plan.number))
            self._mirror.digest = bytes(8)
        return run(self, plan)
    Executor.run = damaged
"""
CRASH = """
import os, signal, sys
if "forebay.runtime.worker" in sys.orig_argv:
    from forebay.runtime.execute import Executor
    run = Executor.run
    def crashing(self, plan):
        if any(piece.start > 440 and len(piece.tokens) > 4 for piece in plan.pieces):
            os.kill(os.getpid(), signal.SIGSEGV)
        return run(self, plan)
    Executor.run = crashing
"""

Start = Callable[..., Served]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not true before the deadline"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    model_dir = write_random_weights(write_text_model(tmp_path_factory.mktemp("model")))
    cache_dir = tmp_path_factory.mktemp("cache")
    started: list[Served] = []

    def run(*more: str, **environment: str) -> Served:
        started.append(start_server(model_dir, cache_dir, *START, *more, **environment))
        return started[-1]

    yield run
    end_servers(started)


@pytest.fixture(scope="module")
def served(start: Start) -> Served:
    return start()


@pytest.fixture(scope="module")
def texts(served: Served) -> dict[int, str]:
    """What an undisturbed server says: sampled, so that no two tokens of it are alike by habit."""
    answers = {
        seed: httpx.post(f"{served.url}/v1/completions", json=body(seed), timeout=DEADLINE_S)
        for seed in SEEDS
    }
    return {seed: answer.json()["choices"][0]["text"] for seed, answer in answers.items()}


def body(seed: int) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "seed": seed,
        "ignore_eos": True,
    }


@dataclass
class Streams:
    """One stream for each seed, read by a thread of its own. ``pieces``: what has come so far."""

    served: Served
    salt: str
    pieces: dict[int, list[str]] = field(default_factory=lambda: {seed: [] for seed in SEEDS})
    errors: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        client = openai.OpenAI(
            base_url=f"{self.served.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )
        self._threads = [threading.Thread(target=self._read, args=(client, seed)) for seed in SEEDS]
        for thread in self._threads:
            thread.start()

    def _read(self, client: openai.OpenAI, seed: int) -> None:
        extra = {"ignore_eos": True, "cache_salt": self.salt}
        try:
            stream = client.completions.create(
                model="tiny",
                prompt=PROMPT,
                max_tokens=TOKENS,
                seed=seed,
                stream=True,
                extra_body=extra,
            )
            for chunk in stream:
                self.pieces[seed].append(chunk.choices[0].text)
        except Exception as error:
            self.errors.append(error)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.pieces.values()))

    def wait_tokens(self, count: int) -> None:
        wait_until(
            lambda: self.tokens >= count or not any(thread.is_alive() for thread in self._threads)
        )

    def join(self) -> dict[int, str]:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a stream did not end"
        assert self.errors == []
        return {seed: "".join(pieces) for seed, pieces in self.pieces.items()}


def new_ranks(served: Served, old: list[psutil.Process]) -> list[psutil.Process]:
    """The ranks of the next epoch, as soon as they are there."""
    found: list[psutil.Process] = []

    def there() -> bool:
        found[:] = [rank for rank in served.ranks if rank not in old]
        return len(found) == 2

    wait_until(there)
    return found


def restarts(served: Served) -> int:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return next(
        int(float(line.split()[1]))
        for line in lines
        if line.startswith("forebay_worker_restarts_total")
    )


def check_flight_record(line: str) -> str:
    """What every process did is in it. Returns its reason."""
    record = read_flight_record(Path(line.split("flight record ")[1].split(";")[0]))
    assert {name for name, spans in spans_of(record).items() if spans} == {
        "frontend",
        "planner",
        "rank 0",
        "rank 1",
    }
    check_trace(chrome_trace([record]))
    return record.reason


def test_all_ranks_at_once_and_again_while_they_start(
    served: Served, texts: dict[int, str]
) -> None:
    streams = Streams(served, "all at once")
    streams.wait_tokens(100)
    ranks = served.ranks
    for rank in ranks:
        rank.kill()
    new_ranks(served, ranks)[1].kill()
    assert streams.join() == texts
    assert restarts(served) == 2
    assert httpx.get(f"{served.url}/ready").status_code == 200
    assert "was ended by SIGKILL" in check_flight_record(served.wait_line("flight record"))


def test_a_rank_that_is_stopped_before_its_first_word_is_replaced(start: Start) -> None:
    served = start()
    wait_until(lambda: len(psutil.Process(served.process.pid).children()) == 1)
    first = new_ranks(served, [])
    first[1].suspend()
    assert (
        f"rank 1 (process {first[1].pid}) has been stopped for 5 s while it started"
        in served.wait_line("has been stopped")
    )
    assert (
        httpx.post(f"{served.url}/v1/completions", json=body(1), timeout=DEADLINE_S).status_code
        == 200
    )
    assert not any(rank.is_running() for rank in first)
    assert restarts(served) == 1


def test_beyond_the_retries_health_and_requests_say_why_and_then_the_server_ends(
    start: Start, tmp_path: Path
) -> None:
    """No rank does anything from the first decode on, so that no token comes between the losses."""
    orders = tmp_path / "orders"
    orders.write_text(json.dumps({"hold_decode": [1]}))
    served = start(TEST_RANK_FAULTS=str(orders), **unhurried())
    url = served.url
    streams = Streams(served, "none")
    wait_until((tmp_path / "orders.log").exists)
    (tmp_path / "all").write_text(json.dumps({"hold_plan": [0, 1], "hold_decode": [1]}))
    (tmp_path / "all").rename(orders)
    ranks = served.ranks
    for _ in range(3):  # the retries
        ranks[0].kill()
        ranks = new_ranks(served, ranks)
    ranks[1].kill()
    with pytest.raises(AssertionError):
        streams.join()
    assert len(streams.errors) == len(SEEDS)
    assert all("3 restarts in a row brought no token" in str(error) for error in streams.errors)
    for route in ("/health", "/ready"):
        answer = httpx.get(f"{url}{route}")
        assert answer.status_code == 503
        assert (
            answer.json()["state"] == "failed" and "was ended by SIGKILL" in answer.json()["detail"]
        )
    refused = httpx.post(f"{url}/v1/completions", json=body(1), timeout=DEADLINE_S)
    assert (
        refused.status_code == 503 and "3 restarts in a row" in refused.json()["error"]["message"]
    )
    served.process.send_signal(signal.SIGTERM)
    assert served.wait_end() == 1
    assert "Traceback" not in "".join(served.lines)


def test_a_digest_that_differs_is_named_and_requests_are_kept(
    start: Start, texts: dict[int, str], tmp_path: Path
) -> None:
    """Planted in the first stage and later in the last one, in processes that are otherwise the real ones."""
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    served = start(PYTHONPATH=path, PLANT_FLAGS=str(tmp_path))
    assert Streams(served, "planted").join() == texts
    assert restarts(served) == 2
    for stage in (0, 1):
        number = (tmp_path / f"stage-{stage}").read_text()
        served.wait_line(f"rank {stage}: plan {number} is the first to differ from the planner's")
    reasons = [check_flight_record(line) for line in served.lines if "flight record " in line]
    assert [reason.split(":")[0] for reason in reasons] == ["rank 0", "rank 1"]
    assert all("is the first to differ" in reason for reason in reasons)


def test_a_prompt_that_crashes_ranks_at_its_end_is_ended_alone(
    start: Start, texts: dict[int, str], tmp_path: Path
) -> None:
    """Its first chunks always retire, and the others' tokens come: neither is progress of its own."""
    (tmp_path / "sitecustomize.py").write_text(CRASH)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    served = start(PYTHONPATH=path)
    streams = Streams(served, "crash")
    streams.wait_tokens(20)
    crashing = body(1) | {"prompt": (PROMPT * 2)[:490], "max_tokens": 8}
    answer = httpx.post(f"{served.url}/v1/completions", json=crashing, timeout=DEADLINE_S)
    assert (
        answer.status_code == 503
        and "times on this request: rank" in answer.text
        and "was ended by SIGSEGV" in answer.text
    )
    assert streams.join() == texts
    assert restarts(served) <= 4
    wait_until(lambda: httpx.get(f"{served.url}/ready").status_code == 200)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_losses_at_any_moment_cost_time_and_nothing_else(
    start: Start, texts: dict[int, str], seed: int
) -> None:
    """Killed and stopped, in prefill, decode and start-up, one and several at once; progress between, so it never ends."""
    chance = random.Random(seed)
    served = start()
    assert served.url
    losses = 0
    for turn in range(4):
        streams = Streams(served, f"{seed} {turn}")
        if chance.random() < 0.6:
            streams.wait_tokens(chance.randrange(1, 300))
        ranks = served.ranks
        for rank in chance.sample(ranks, chance.choice([1, 1, 2])):
            with contextlib.suppress(
                psutil.NoSuchProcess
            ):  # the first loss may have ended the second rank already
                rank.send_signal(chance.choice([signal.SIGKILL, signal.SIGSTOP]))
        losses += 1
        if chance.random() < 0.5:
            chance.choice(new_ranks(served, ranks)).send_signal(
                chance.choice([signal.SIGKILL, signal.SIGSTOP])
            )
            losses += 1
        assert streams.join() == texts, (seed, turn)
    assert restarts(served) == losses


@pytest.mark.slow
def test_a_planner_that_stands_still_ends_the_server_with_all_its_processes(start: Start) -> None:
    served = start()
    assert served.url
    planner, ranks = served.planner, served.ranks
    planner.suspend()
    served.wait_line("the planner has not been heard for 5 s")
    assert served.wait_end() == 1
    _, alive = psutil.wait_procs([planner, *ranks], timeout=paced(10))
    assert not alive
    assert served.wait_line("flight record")
