"""Stages that share cores: who waits for whom, and that with cores enough nothing changes."""

import pytest

from forebay.settings import FetchRoute
from forebay.sim.cores import Cores
from forebay.sim.heap import EventHeap
from forebay.sim.study import Run, outcome
from forebay.sim.validate import Load, run_load
from tests.sim.test_replay import Options, replay
from tests.sim.traffic import small_cluster

STILL = {"forward.jitter": "0", "network.control_jitter": "0", "network.jitter": "0"}


def ends(cores: Cores, heap: EventHeap, jobs: list[tuple[float, float]]) -> list[float]:
    """When jobs (begin, seconds of work) end."""
    found = [0.0] * len(jobs)
    for index, (at, work_s) in enumerate(jobs):
        heap.at(
            at,
            lambda index=index, work_s=work_s: cores.run(
                work_s, lambda: found.__setitem__(index, heap.now)
            ),
        )  # type: ignore[misc]
    while len(heap):
        heap.run_next()
    return found


@pytest.mark.parametrize(
    ("count", "contention", "expected"),
    [
        (0, 0.0, [2.0, 3.0, 3.0]),  # everyone has a core
        (2, 0.0, [2.5, 3.5, 3.5]),  # three share two from 1 to 2.5
        (1, 0.0, [4.0, 6.0, 6.0]),
        (4, 0.5, [3.0, 4.5, 4.5]),  # each slows the others by half
    ],
)
def test_everyone_gets_an_equal_part(count: int, contention: float, expected: list[float]) -> None:
    heap = EventHeap()
    jobs = [(0.0, 2.0), (1.0, 2.0), (1.0, 2.0)]
    assert ends(Cores(heap, count, contention), heap, jobs) == pytest.approx(expected)


@pytest.mark.parametrize("route", list(FetchRoute))
def test_with_a_core_for_every_stage_nothing_changes(route: FetchRoute) -> None:
    """Plans are then run as they are where each stage has cores of its own, but for jitter, which is drawn in another order."""
    found = []
    for cores in ("0", "64"):
        run = replay(Options(route=route), STILL | {"forward.cores": cores})
        found.append(outcome(Run(route, {}, run.cluster), run, 0.0))
        found[-1]["tickets"].pop("miss", 0)
    assert found[0] == found[1]


def test_stages_that_share_a_core_take_turns() -> None:
    load = Load("miss", 2048, 1, 8, 4)
    means = []
    for cores in ("4", "2", "1"):
        served = run_load(
            small_cluster(STILL | {"forward.cores": cores}), load, FetchRoute.TICKET, 0
        ).served()
        means.append(sum(row.ttft_s for row in served) / len(served))
    assert means[0] < means[1] < means[2]
    forward_s = 4 * (2048 * 50e-6 + 4 * 4e-3)  # of the four requests that are in flight
    assert means[2] == pytest.approx(forward_s, rel=0.2)


def test_what_lockstep_means_needs_no_cores() -> None:
    with pytest.raises(ValueError, match="lockstep"):
        small_cluster({"forward.cores": "2", "engine.staged_look": "lockstep"})
