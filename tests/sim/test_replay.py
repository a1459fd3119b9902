"""The planner that ships on performance models: nothing is lost, order holds, and what is cached is not computed."""

import itertools
import subprocess
import sys
from collections.abc import Mapping

import pytest

from forebay.core.messages import FetchProgress, Plan, PlanDone
from forebay.core.tree import TIERS
from forebay.pages.hashing import hash_chain, root_hash
from forebay.settings import FetchRoute
from forebay.sim.cluster import StagedLook
from forebay.sim.measures import Measures
from forebay.sim.replay import Job, Options, Replay
from forebay.sim.study import Run, jobs_of, outcome
from forebay.sim.trace import TraceRequest
from forebay.sim.validate import Load, run_load
from tests.sim.traffic import conversations, small_cluster

COUNT = 60


def replay(options: Options, turned: Mapping[str, str] | None = None, count: int = COUNT) -> Replay:
    run = Replay(small_cluster(turned), jobs_of(conversations(count), 1.0), options)
    run.run()
    return run


def document(
    options: Options, turned: Mapping[str, str] | None = None, count: int = COUNT
) -> dict[str, object]:
    run = replay(options, turned, count)
    return outcome(Run(options.route, {}, run.cluster), run, 0.0)


@pytest.mark.parametrize("route", list(FetchRoute))
def test_every_request_gets_its_tokens_and_nothing_is_left(route: FetchRoute) -> None:
    run = replay(Options(route=route))
    requests = conversations(COUNT)
    rows = run.measures.rows
    assert len(run.measures.served()) == COUNT == run.measures.ended
    assert run.measures.output_tokens == sum(request.output_tokens for request in requests)
    assert len(run.measures.gaps_s) == run.measures.output_tokens - COUNT
    for row, request in zip(rows, requests, strict=True):
        assert (
            row.computed >= 1
            and row.device + row.host + row.store + row.computed == request.input_tokens
        )
        assert row.ttft_s > 0 and row.first_at <= row.last_at
    replica = run.replicas[0].planner.replica
    assert not replica.requests and replica.tickets.is_idle and replica.cache is not None
    replica.cache.flush(TIERS)
    assert replica.cache.held(TIERS) == 0


@pytest.mark.parametrize("route", list(FetchRoute))
def test_ranks_that_speak_for_themselves_change_nothing(route: FetchRoute) -> None:
    exact, folded = (document(Options(route=route, exact=each)) for each in (True, False))
    for each in (exact, folded):
        each["tickets"].pop("miss", 0)  # type: ignore[attr-defined]  # who missed asks again after so many planner steps
    assert exact == folded


def test_one_seed_is_one_run_whatever_pythonhashseed_is() -> None:
    script = "from tests.sim.test_replay import *; print(document(Options(seed=3), count=25))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(runs) == 1
    assert document(Options(seed=3), count=25) != document(Options(seed=4), count=25)


def test_a_stage_runs_one_plan_at_a_time_in_order_and_after_the_stage_before() -> None:
    measures = replay(Options(window=(0.0, 1e9))).measures
    stages = [measures.passes[0, stage] for stage in range(4)]
    for passes in stages:
        assert [one.plan for one in passes] == list(range(1, measures.plans + 1))
        for one, following in itertools.pairwise(passes):
            assert one.taken <= one.start < one.end <= following.start
    for before, after in itertools.pairwise(stages):
        assert all(one.end < following.start for one, following in zip(before, after, strict=True))


def test_a_plan_retires_after_it_ran_and_at_most_pp_are_in_flight() -> None:
    run = replay(Options(journal=True, window=(0.0, 1e9)))
    ends = {one.plan: one.end for one in run.measures.passes[0, 3]}
    open_plans: set[int] = set()
    for at, word in run.measures.journal:
        if isinstance(word, Plan):
            open_plans.add(word.number)
            assert len(open_plans) <= 4
        elif isinstance(word, PlanDone) and word.rank == 3:
            assert at > ends[word.number]
            open_plans.discard(word.number)


def test_off_stores_and_never_fetches() -> None:
    run = replay(Options(route=FetchRoute.OFF))
    assert sum(row.store for row in run.measures.rows) == 0 and run.store.read_from == {
        "dram": 0,
        "ssd": 0,
    }
    assert run.replicas[0].planner.snapshot().stored_pages > 0


def test_what_the_upper_tiers_lost_comes_from_the_store() -> None:
    tight = {"engine.device_memory": "4MiB", "engine.host_memory": "4MiB"}
    served = replay(Options(), tight).measures.served()
    without = replay(Options(), tight | {"store.holders": "0"}).measures.served()
    assert sum(row.store for row in served) > 0
    assert sum(row.computed for row in served) < sum(row.computed for row in without)


@pytest.mark.parametrize(("nic_gb_s", "words"), [("0.5", 40), ("100", 6)])
def test_a_fetch_asks_for_more_at_once_while_that_comes_quickly(nic_gb_s: str, words: int) -> None:
    """40 pages of 8 MiB: one by one where each takes longer than a batch may, and eight at a time after the first where not."""
    dials = {
        "model.kv_bytes_per_token": "1MiB", "engine.device_memory": "1GiB", "engine.host_memory": "1GiB", "store.dram": "8GiB",
        "store.nic_gb_s": "100", "network.nic_gb_s": nic_gb_s, "engine.fetch_policy": "wait",
    }  # fmt: skip
    cluster = small_cluster(dials)
    config = cluster.planner_config()
    prompt = TraceRequest(0.0, 40 * 64 + 1, 1, (1, 2, 3, 4, 5, 6)).prompt
    stored = hash_chain(
        root_hash(config.fingerprint, config.kv_dtype, config.page_size), prompt(), config.page_size
    )
    run = Replay(cluster, [Job(0.0, 40 * 64 + 1, 1, prompt)], Options(journal=True, stored=stored))
    run.run()
    assert run.measures.rows[0].store == 40 * 64
    assert (
        len(
            [
                1
                for _, word in run.measures.journal
                if isinstance(word, FetchProgress) and word.rank == 0
            ]
        )
        == words
    )


def test_a_store_that_is_too_small_brings_less() -> None:
    tight = {"engine.device_memory": "4MiB", "engine.host_memory": "4MiB", "store.ssd": "0"}
    hits = [
        sum(row.store for row in replay(Options(), tight | {"store.dram": size}).measures.rows)
        for size in ("2MiB", "64MiB")
    ]
    assert hits[0] < hits[1]


def test_replicas_share_the_load_and_the_store() -> None:
    run = replay(Options(replicas=2))
    plans = [replica.planner.replica.built for replica in run.replicas]
    assert all(plans) and sum(plans) == run.measures.plans and len(run.measures.served()) == COUNT


def test_a_full_queue_rejects_and_says_so() -> None:
    found = document(Options(), {"engine.max_waiting": "0", "engine.max_running": "1"})
    assert found["rejected"] == {"rejected_full": COUNT - 1 - _waited(found)}


def _waited(found: dict[str, object]) -> int:
    """Requests that came when nothing ran, beside the first."""
    requests, rejected = found["requests"], found["rejected"]
    assert isinstance(requests, int) and isinstance(rejected, dict)
    return requests - 1 - sum(rejected.values())


def mean_ttft(measures: Measures) -> float:
    return sum(row.ttft_s for row in measures.served()) / len(measures.served())


def test_under_load_a_ticket_is_sooner_than_the_staged_route_hit_or_miss() -> None:
    cluster = small_cluster({"engine.chunk_size": "2048", "forward.jitter": "0"})
    for group in ("miss", "mixed"):
        load = Load(group, 2048, 1, 24, 4)
        ticket = mean_ttft(run_load(cluster, load, FetchRoute.TICKET, 0))
        assert ticket < 0.9 * mean_ttft(run_load(cluster, load, FetchRoute.STAGED, 0))


def test_a_stage_that_looks_less_often_is_later() -> None:
    means = []
    for look in (StagedLook.FORWARD, StagedLook.PLAN):
        cluster = small_cluster({"engine.chunk_size": "4096", "engine.staged_look": look.value})
        means.append(
            mean_ttft(run_load(cluster, Load("miss", 2048, 1, 24, 4), FetchRoute.STAGED, 0))
        )
    assert means[0] < means[1]


def test_an_idle_cluster_takes_what_its_dials_say() -> None:
    """One request alone: its forwards on all stages, three hops, and the messages around them."""
    still = {
        "forward.jitter": "0",
        "network.control_jitter": "0",
        "engine.chunk_size": "4096",
        "store.holders": "0",
    }
    cluster = small_cluster(
        still
        | {"network.control_s": "0.001", "network.hop_s": "0.002", "network.frontend_s": "0.5"}
    )
    (row,) = run_load(cluster, Load("miss", 2048, 1, 1, 1), FetchRoute.TICKET, 0).rows
    forward_s = 2048 * 50e-6 + 4e-3
    hidden_s = 3 * (0.002 + 2048 * 1024 / 10e9)
    assert row.ttft_s == pytest.approx(0.5 + 0.001 + forward_s + hidden_s + 0.001)
