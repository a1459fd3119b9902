"""Tickets under faults, with real processes: whatever happens, the text is right, and pages, pins and tickets go back to none."""

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay import LLM
from forebay.frontend.generation import collect
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.runtime.faulty_ranks import (
    DEADLINE_S,
    HIT,
    PAGES,
    SETTINGS,
    Served,
    greedy,
    make_prompts,
    serving,
    until,
)


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


@pytest.fixture
def serve(
    model: Path, plain: LLM, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """A server of the settings that the test names, over an empty directory, whose ranks obey orders."""
    settings = dict(request.param)
    with serving(model, plain, tmp_path, settings, settings.pop("planner", {})) as served:
        yield served


@pytest.mark.parametrize("serve", [{"pp": 3, "tp": 2}], indirect=True)
def test_failed_allocations_in_a_rank_cost_computing_and_nothing_else(serve: Served) -> None:
    """On all ranks of stage 1, then on one rank of stage 2: every request computes; later tickets still work."""
    prompts = make_prompts(8, seed=1)
    serve.prime(prompts)
    for ranks in ([2, 3], [4]):
        before = len(serve.obeyed("fail_fetch"))
        serve.order(fail_fetch=ranks)
        assert [output.cached_store for output in serve.check(prompts)] == [0] * 8
        assert len(serve.obeyed("fail_fetch")) - before >= 8 * len(ranks), (
            "every ticket was tried, once a rank"
        )
        serve.order()
        serve.check_baseline()
    assert len(serve.obeyed("fail_fetch")) >= 20
    assert [output.cached_store for output in serve.check(prompts)] == [HIT] * 8
    serve.check_baseline()


@pytest.mark.parametrize(
    "serve",
    [{"pp": 2, "max_running": 1, "max_waiting": 1}, {"pp": 2, "host_mode": "staging"}],
    indirect=True,
)
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
def test_rejected_and_aborted_requests_leave_no_ticket_even_where_a_rank_has_not_heard_of_it(
    serve: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        serve.llm._host, "_places", 10
    )  # it waits for room itself, and the planner is to refuse
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
        assert serve.snapshot.host.held, (
            "their pages stay the transfers' until the stopped rank has said its last word"
        )
    finally:
        rank.send_signal(signal.SIGCONT)
    serve.check_baseline()
    assert [output.cached_store for output in serve.check(prompts[:1])] == [HIT]


@pytest.mark.parametrize(
    "serve",
    [{"pp": 2, "device_memory": "112KiB", "chunk_size": 32, "planner": {"MAX_RETRIES": 0}}],
    indirect=True,
)
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
    answered = {
        name: after.get(name, 0) - before.get(name, 0)
        for name in ("issued", "miss", "slower_than_compute", "no_host_pages")
    }
    assert answered == {"issued": 8, "miss": 8, "slower_than_compute": 0, "no_host_pages": 0}, (
        "each asked once, retracted or not"
    )
    assert after.get("complete", 0) == len(hits)
    assert sum(output.cached_store for output in outputs) == HIT * answered["issued"], (
        "each ticket was used once"
    )
    serve.check_baseline()


RETRACT, REFUSE = 3, 4  # the last token of a prompt to which that is to happen
FORCED = {"retract_after": RETRACT, "refuse_after": REFUSE}


@pytest.mark.parametrize(
    "serve", [{"pp": 2, "max_running": 1, "host_memory": "4MiB", "planner": FORCED}], indirect=True
)
def test_what_is_retracted_or_asks_again_has_one_ticket_and_uses_it_once(serve: Served) -> None:
    """Sixteen requests, half of them hits, of which two hits and two misses are retracted, and eight hits more whose first answer finds
    no host pages. All ask while another has the only slot, so who runs when decides nothing; and pages are plenty, so that nothing is
    retracted or refused but who is made to be."""
    hits, misses, refused = (
        make_prompts(8, seed=8),
        make_prompts(8, seed=9),
        make_prompts(8, seed=10),
    )
    for prompt in hits[:2] + misses[:2]:
        prompt[-1] = RETRACT
    for prompt in refused:
        prompt[-1] = REFUSE
    prompts = refused + hits + misses
    serve.prime([[*prompt[:HIT], 7] for prompt in refused + hits])
    before, logged = (
        serve.snapshot,
        {what: len(serve.logged(what)) for what in ("query", "ticket", "used")},
    )
    host = serve.llm._host
    serve.order(hold_decode=[1])
    first = serve.submit([7] * 8, greedy(4))
    until(lambda: bool(serve.obeyed("hold_decode")), "the first has the slot")
    sent = [host.call(host.submit(prompt, greedy())) for prompt in prompts]
    answered = Counter(before.tickets) + Counter(complete=16, miss=8)
    until(
        lambda: Counter(serve.snapshot.tickets) >= answered,
        "all hits are fetched, and the misses have asked",
    )
    serve.order()
    results = [host.call(collect(generation))[0] for generation in sent]
    first.result(DEADLINE_S)
    names = [f"{generation.work.request_id}-0" for generation in sent]
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == serve.plain.generate([prompt], greedy())[0].outputs[0].token_ids
    assert sorted(serve.retracted) == sorted(names[8:10] + names[16:18]), (
        "two hits and two misses, once each"
    )
    queries = Counter(serve.logged("query")[logged["query"] :])
    assert sorted(queries.values()) == [1] * 16 + [2] * 8, (
        "who was refused asked once more, and nobody else"
    )
    assert sorted(serve.logged("ticket")[logged["ticket"] :]) == sorted(names[:16]), (
        "one ticket for each hit"
    )
    after = serve.snapshot
    assert Counter(after.tickets) - Counter(before.tickets) == {
        "issued": 16,
        "complete": 16,
        "no_host_pages": 8,
        "miss": 8,
    }
    assert len(serve.logged("used")) - logged["used"] == 16 * PAGES, "each page was used once"
    assert after.unused_tokens == before.unused_tokens
    usages = [generation.usages[0] for generation in sent]
    assert [usage and usage.cached_store for usage in usages] == [HIT] * 16 + [0] * 8
    serve.check_baseline()


@pytest.mark.parametrize(
    "serve", [{"pp": 2, "max_running": 1, "host_memory": "40KiB"}], indirect=True
)
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
    used = sum(output.cached_store for output in outputs)
    assert used + serve.snapshot.unused_tokens["no_host_pages"] == HIT * len(prompts), (
        "each token is used once, or says why not"
    )
    serve.check_baseline()


@pytest.mark.parametrize(
    "serve",
    [{"pp": 2, "max_running": 4, "fetch_policy": policy} for policy in ("wait", "timeout")],
    indirect=True,
)
def test_aborts_at_any_moment_leave_nothing(serve: Served) -> None:
    """In every second round a rank stays in its reads until aborts have met their tickets; in the
    others the moments are left to chance."""
    prompts = make_prompts(6, seed=6)
    serve.prime(prompts)
    chance = random.Random(7)
    for number in range(8):
        serve.llm.flush_cache()
        abort_eight(serve, prompts, chance, forced=number % 2 == 0)
    serve.check_baseline()
    serve.check(prompts)


def abort_eight(
    serve: Served, prompts: list[list[int]], chance: random.Random, forced: bool
) -> None:
    host = serve.llm._host
    aborted, held = serve.snapshot.tickets.get("aborted", 0), len(serve.obeyed("hold_fetch"))
    serve.order(hold_fetch=[1] if forced else [])
    running = [host.call(host.submit(chance.choice(prompts), greedy(20))) for _ in range(8)]
    if forced:
        until(lambda: len(serve.obeyed("hold_fetch")) > held, "rank 1 is in a read")
    for generation in chance.sample(running, len(running)):
        # The rate of the loop's own round trips spreads the aborts over all states, without a clock.
        for _ in range(chance.choice([0, 1, 5])):
            host.call(serve_nothing())
        host._loop.call_soon_threadsafe(generation.close)
    if forced:
        until(lambda: serve.snapshot.tickets.get("aborted", 0) > aborted, "a ticket was met")
    serve.order()


async def serve_nothing() -> None:
    return None
