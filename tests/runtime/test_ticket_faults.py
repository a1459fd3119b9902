"""Tickets under faults, with real processes: whatever happens, the text is right, and pages, pins and tickets go back to none."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay import LLM, RequestOutput, SamplingParams
from forebay.core.messages import Snapshot
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.serving import WORKER, command_line, oldest_first

PAGE = 16
PAGES = 5
HIT = PAGES * PAGE
DEADLINE_S = 60.0
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
INJECTION = Path(__file__).parent / "fault_injection"


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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("model")
    write_text_model(path)
    write_random_weights(path)
    yield path


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    """Says what is right."""
    with LLM(str(model), **(SETTINGS | {"host_memory": 1, "store": "none"})) as llm:
        yield llm


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
        log = self.orders.with_name(self.orders.name + ".log")
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [(int(rank), int(pid)) for kind, rank, pid in lines if kind == what]

    @property
    def snapshot(self) -> Snapshot:
        engine = self.llm._host._engine
        assert engine is not None and engine.snapshot is not None
        return engine.snapshot

    @property
    def ranks(self) -> list[psutil.Process]:
        planners = [child for child in psutil.Process().children() if "planner_process" in " ".join(command_line(child))]
        return [child for child in oldest_first(oldest_first(planners)[-1].children()) if WORKER in command_line(child)]

    def prime(self, prompts: list[list[int]]) -> None:
        """Compute them, let all of their pages reach the store, and forget them above it."""
        stored = self.snapshot.stored_pages + PAGES * len(prompts)
        self.check(prompts)
        until(lambda: self.snapshot.stored_pages >= stored, "all pages are stored")
        self.llm.flush_cache()

    def check(self, prompts: list[list[int]], params: SamplingParams | None = None) -> list[RequestOutput]:
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


@pytest.fixture
def serve(model: Path, plain: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server of the settings that the test names, over an empty directory, whose ranks obey orders."""
    orders = tmp_path / "orders"
    orders.write_text("{}")
    monkeypatch.setenv("TEST_RANK_FAULTS", str(orders))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(INJECTION), os.environ.get("PYTHONPATH")))))
    with LLM(str(model), **(SETTINGS | {"store": f"file:{tmp_path / 'pages'}"} | request.param)) as llm:
        yield Served(llm, plain, orders)


@pytest.mark.parametrize("serve", [{"pp": 3, "tp": 2}], indirect=True)
def test_failed_allocations_in_a_rank_cost_computing_and_nothing_else(serve: Served) -> None:
    """On all ranks of stage 1, then on one rank of stage 2: every request computes; later tickets still work."""
    prompts = make_prompts(8, seed=1)
    serve.prime(prompts)
    for ranks in ([2, 3], [4]):
        before = len(serve.obeyed("fail_fetch"))
        serve.order(fail_fetch=ranks)
        assert [output.cached_store for output in serve.check(prompts)] == [0] * 8
        assert len(serve.obeyed("fail_fetch")) - before >= 8 * len(ranks), "every ticket was tried, once a rank"
        serve.order()
        serve.check_baseline()
    assert len(serve.obeyed("fail_fetch")) >= 20
    # Later ones may be declined, when a busy machine has made fetching look slower than computing.
    assert sum(output.cached_store for output in serve.check(prompts)) >= HIT
    serve.check_baseline()


@pytest.mark.parametrize("serve", [{"pp": 2, "max_running": 1, "max_waiting": 1}, {"pp": 2, "host_mode": "staging"}], indirect=True)
def test_a_rank_killed_in_its_fetch_costs_a_restart_and_nothing_else(serve: Served) -> None:
    (prompt,) = make_prompts(1, seed=2)
    serve.prime([prompt])
    serve.order(hold_fetch=[1])
    answer = serve.submit(prompt, greedy())
    until(lambda: bool(serve.obeyed("hold_fetch")), "rank 1 is in its read")
    _, pid = serve.obeyed("hold_fetch")[0]
    os.kill(pid, signal.SIGKILL)
    serve.order()
    serve.check_text([answer.result(DEADLINE_S)], greedy())
    assert serve.snapshot.worker_restarts == 1
    serve.check_baseline()


@pytest.mark.parametrize("serve", [{"pp": 2, "max_running": 1, "max_waiting": 1}], indirect=True)
def test_rejected_and_aborted_requests_leave_no_ticket_even_where_a_rank_has_not_heard_of_it(serve: Served) -> None:
    prompts = make_prompts(10, seed=3)
    for prompt in prompts:
        serve.prime([prompt])
    rank = serve.ranks[-1]
    rank.send_signal(signal.SIGSTOP)
    try:
        host = serve.llm._host
        taken = [host.call(host.submit(prompt, greedy())) for prompt in prompts[:2]]
        until(lambda: serve.snapshot.tickets.get("issued", 0) == 2, "both have their tickets")
        refused = [serve.submit(prompt, greedy()) for prompt in prompts[2:]]
        for future in refused:
            with pytest.raises(Exception, match="waiting already"):
                future.result(DEADLINE_S)
        for generation in taken:
            host._loop.call_soon_threadsafe(generation.close)
        until(lambda: not serve.snapshot.waiting, "both are gone")
        assert serve.snapshot.tickets["aborted"] == 2
        assert serve.snapshot.host.held, "their pages stay the transfers' until the stopped rank has said its last word"
    finally:
        rank.send_signal(signal.SIGCONT)
    serve.check_baseline()
    assert [output.cached_store for output in serve.check(prompts[:1])] == [HIT]


@pytest.mark.parametrize("serve", [{"pp": 2, "device_memory": "112KiB", "chunk_size": 32}], indirect=True)
def test_retractions_ask_and_fetch_nothing_twice(serve: Served) -> None:
    """Sixteen requests, every second one stored, over device pages that are too few for their answers."""
    prompts = make_prompts(16, seed=4)
    hits = prompts[::2]
    for prompt in hits:
        serve.prime([prompt])
    before = serve.snapshot.tickets
    outputs = serve.check(prompts, greedy(40))
    after = serve.snapshot.tickets
    assert serve.snapshot.retractions >= 4
    answered = {name: after.get(name, 0) - before.get(name, 0) for name in ("issued", "miss", "slower_than_compute", "no_host_pages")}
    # A miss may be asked for again while pages of others are on their way to the store.
    assert sum(answered.values()) >= 16
    assert answered["issued"] == after.get("complete", 0) <= len(hits)
    assert sum(output.cached_store for output in outputs) == HIT * answered["issued"], "each ticket was used once"
    serve.check_baseline()


@pytest.mark.parametrize("serve", [{"pp": 2, "max_running": 1, "host_memory": "40KiB"}], indirect=True)
def test_a_ticket_that_finds_no_host_pages_is_asked_for_again_and_used_once(serve: Served) -> None:
    """Eight hits wait behind a long answer; host pages are there for one ticket at a time."""
    prompts = make_prompts(8, seed=5)
    for prompt in prompts:
        serve.prime([prompt])
    with ThreadPoolExecutor(9) as threads:
        long = threads.submit(serve.llm.generate, [[7] * 20], greedy(200))
        until(lambda: serve.snapshot.running == 1, "the long answer runs")
        serve.order(hold_fetch=[1])  # the first one's ticket, and with it the pages
        answers = [threads.submit(serve.llm.generate, [prompt], greedy(30)) for prompt in prompts]
        until(lambda: serve.snapshot.tickets.get("no_host_pages", 0) > 8, "some have asked again")
        serve.order()
        outputs = [answer.result(DEADLINE_S)[0] for answer in answers]
        long.result(DEADLINE_S)
    serve.check_text(outputs, greedy(30))
    tickets = serve.snapshot.tickets
    assert tickets["issued"] >= 2
    fetched = HIT * tickets["complete"] - serve.snapshot.unused_tokens.get("no_host_pages", 0)  # some are for a part of the hit
    assert sum(output.cached_store for output in outputs) == fetched, "each ticket was used once"
    serve.check_baseline()


@pytest.mark.parametrize(
    "serve", [{"pp": 2, "max_running": 4, "fetch_policy": policy} for policy in ("wait", "timeout")], indirect=True
)
def test_aborts_at_any_moment_leave_nothing(serve: Served) -> None:
    prompts = make_prompts(6, seed=6)
    serve.prime(prompts)
    randomness = random.Random(7)
    host = serve.llm._host
    for _ in range(8):
        serve.llm.flush_cache()
        running = [host.call(host.submit(randomness.choice(prompts), greedy(20))) for _ in range(8)]
        for generation in randomness.sample(running, len(running)):
            # The rate of the loop's own round trips spreads the aborts over all states, without a clock.
            for _ in range(randomness.choice([0, 1, 5])):
                host.call(serve_nothing())
            host._loop.call_soon_threadsafe(generation.close)
    serve.check_baseline()
    assert serve.snapshot.tickets["aborted"] > 0
    serve.check(prompts)


async def serve_nothing() -> None:
    return None
