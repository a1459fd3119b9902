"""`bench ttft` without a server: what is asked, what counts, and what the figures mean."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from forebay.bench.ttft import summary
from forebay.bench.ttft.judge import Rules, judge
from forebay.bench.ttft.load import Answer, Position
from forebay.bench.ttft.plan import (
    Arm,
    Block,
    Experiment,
    Group,
    Shape,
    TtftError,
    arrivals,
    blocks,
    check,
    draw,
    parse_arms,
    parse_groups,
)
from forebay.bench.ttft.summary import Sample
from forebay.bench.ttft.timeline import PHASES, phases
from forebay.settings import FetchRoute, HostMode, resolve

TICKET, STAGED, OFF = Arm(FetchRoute.TICKET), Arm(FetchRoute.STAGED), Arm(FetchRoute.OFF)
SHAPE = Shape(input_len=1024, output_len=1, requests=16, concurrency=2, rounds=4)


def experiment(
    shape: Shape = SHAPE, groups: tuple[Group, ...] = tuple(Group), **settings: Any
) -> Experiment:
    common = resolve({"pp": 2, "store": "embedded", **settings}, environment={})
    return Experiment("demo", common, (TICKET, STAGED), groups, shape, seed=3)


# ------------------------------------------------------------------------------------------------ what is asked


def test_both_arms_are_asked_the_same_and_take_turns_at_going_first() -> None:
    rounds = list(blocks(experiment(), 300, 49_152))
    assert len(rounds) == 4
    for found in rounds:
        assert [block.group for block in found] == [group for group in Group for _ in range(2)]
        for first, second in zip(found[::2], found[1::2], strict=True):
            assert first.asks == second.asks and {first.arm, second.arm} == {TICKET, STAGED}
    openers = [block.arm for found in rounds for block in found[::2]]
    assert openers.count(TICKET) == openers.count(STAGED)
    prompts = [tuple(ask.prompt) for found in rounds for block in found[::2] for ask in block.asks]
    assert len(set(prompts)) == len(prompts) == 4 * 3 * 4, "fresh keys in every block"


def test_groups_say_which_requests_hit() -> None:
    hits = {group: [ask.is_hit for ask in draw("x", group, 4, 8, 0, 100)] for group in Group}
    assert hits == {
        Group.MISS: [False] * 4,
        Group.MIXED: [True, False, True, False],
        Group.HIT: [True] * 4,
    }


def test_rounds_that_are_done_are_not_asked_again_and_the_rest_is_as_it_would_have_been() -> None:
    assert (
        list(blocks(experiment(), 300, 49_152, done_rounds=3))
        == list(blocks(experiment(), 300, 49_152))[3:]
    )


def test_an_open_load_has_the_rate_that_was_asked_for_and_the_same_times_for_both_arms() -> None:
    asks = draw("x", Group.MISS, 2000, 1, 0, 100)
    timed = arrivals(asks, 5.0, "seed")
    assert timed == arrivals(asks, 5.0, "seed")
    assert timed[0].at_s == 0
    gaps = np.diff([ask.at_s for ask in timed])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.1)
    assert gaps.std() == pytest.approx(0.2, rel=0.15), "exponential, not even"


def test_arms_and_groups_are_read() -> None:
    assert parse_arms("ticket:staging, staged:cache") == (
        Arm(FetchRoute.TICKET, HostMode.STAGING),
        Arm(FetchRoute.STAGED, HostMode.CACHE),
    )
    assert [arm.name for arm in parse_arms("ticket,off,staged:cache")] == [
        "ticket",
        "off",
        "staged:cache",
    ]
    assert parse_groups("hit,miss") == (Group.HIT, Group.MISS)
    for parse, bad in (
        (parse_arms, "tickets"),
        (parse_arms, "ticket:ram"),
        (parse_arms, "ticket,ticket"),
        (parse_groups, "hits"),
    ):
        with pytest.raises(TtftError, match=bad.split(",")[0]):
            parse(bad)


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({"input_len": 0}, {}, "--input-len is 0"),
        ({"concurrency": 0}, {}, "--concurrency is 0"),
        ({"requests": 12}, {}, "multiple of 8"),
        ({"requests": 0}, {}, "multiple of 8"),
        ({"input_len": 8192}, {}, "the context is 8192"),
        ({"input_len": 64}, {"fetch_threshold": 1}, "no full page"),
        ({"input_len": 200}, {}, "below --fetch-threshold 256"),
        ({"rate": 1.0, "utilisation": 0.5}, {}, "give one of them"),
        ({"rate": 0.0}, {}, "--rate is 0.0"),
        ({"utilisation": 1.0}, {}, "--utilisation is 1.0"),
        ({"concurrency": 9}, {"max_running": 4, "max_waiting": 4}, "let in fewer"),
    ],
)
def test_what_cannot_give_a_result_is_refused(
    changes: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(TtftError, match=said):
        check(experiment(dataclasses.replace(SHAPE, **changes), **settings), 8192)
    check(experiment(), 8192)


# ------------------------------------------------------------------------------------------------ what counts


def answer(
    index: int,
    device: int = 0,
    host: int = 0,
    store: int = 0,
    output: tuple[Position, ...] = (Position("a", 1.0),),
) -> Answer:
    return Answer(index, "", 0, 0.1, 0.1, device, host, store, output)


def problems(
    answers: list[Answer],
    arm: Arm = TICKET,
    strict: bool = True,
    computed: tuple[Position, ...] = (Position("a", 1.0),),
) -> list[str]:
    """Of a mixed block of two requests of 130 tokens: a hit, a miss. Pages of 64."""
    block = Block(0, Group.MIXED, arm, draw("x", Group.MIXED, 2, 130, 0, 100))
    return judge(block, [answer(0, output=computed)], answers, Rules(64, strict))


def test_requests_that_did_as_intended_are_no_problem() -> None:
    assert problems([answer(0, store=128), answer(1)]) == []
    assert problems([answer(0), answer(1)], arm=OFF) == [], "without a route nothing can hit"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (
            [answer(0, store=64), answer(1)],
            "request 0: 64 tokens came from the store; 128 are there",
        ),
        (
            [answer(0, store=128), answer(1, store=64)],
            "request 1: 64 tokens came from the store; it was to miss",
        ),
        ([answer(0, host=128), answer(1)], "128 from host memory"),
        ([answer(0, store=64, device=64), answer(1)], "64 tokens came from device"),
        (
            [answer(0, store=128, output=(Position("b", 1.0),)), answer(1)],
            "output token 0 is 'b', computed it was 'a'",
        ),
    ],
)
def test_requests_that_did_otherwise_are(answers: list[Answer], said: str) -> None:
    (found,) = problems(answers)
    assert said in found


def test_outputs_may_part_only_where_the_computed_run_was_undecided_and_only_in_low_precision() -> (
    None
):
    other = [
        answer(0, store=128, output=(Position("a", 1.0), Position("x", 1.0), Position("y", 1.0))),
        answer(1),
    ]
    for gap, strict, count in ((0.2, False, 0), (0.3, False, 1), (None, False, 1), (0.2, True, 1)):
        computed = (Position("a", 1.0), Position("b", gap), Position("c", 1.0))
        assert len(problems(other, strict=strict, computed=computed)) == count, (gap, strict)


# ------------------------------------------------------------------------------------------------ what figures mean


def sample(
    route: str, index: int, ttft_ms: float, is_hit: bool = True, group: str = "mixed"
) -> Sample:
    return Sample(0, group, route, index, is_hit, 128 * is_hit, ttft_ms, ttft_ms, 0, "")


def test_groups_are_told_by_kind_and_route() -> None:
    samples = [
        sample(route, index, 10.0 * (index + 1), index % 2 == 0)
        for route in ("ticket", "staged")
        for index in range(4)
    ]
    found = {
        (entry["group"], entry["kind"], entry["route"]): entry
        for entry in summary.groups(samples, ["ticket", "staged"])
    }
    assert set(found) == {
        ("mixed", kind, route) for kind in ("hit", "miss", "all") for route in ("ticket", "staged")
    }
    entry = found["mixed", "hit", "ticket"]
    assert (entry["n"], entry["storage_hits"]) == (2, 2)
    assert entry["ttft_ms"] == {"mean": 20.0, "p50": 20.0, "p90": 28.0, "p99": pytest.approx(29.8)}
    assert found["mixed", "all", "ticket"]["storage_hits"] == 2


def test_a_change_is_against_the_last_route_and_negative_when_sooner() -> None:
    samples = [sample("ticket", index, 80.0) for index in range(4)] + [
        sample("staged", index, 100.0) for index in range(4)
    ]
    first, second = summary.changes(samples, ["ticket", "staged"], seed=0)
    assert (first["kind"], second["kind"]) == ("hit", "all")
    assert (first["route"], first["baseline"]) == ("ticket", "staged")
    assert first["mean_pct"] == first["p50_pct"] == pytest.approx(-20.0)
    assert first["mean_ci"] == pytest.approx([-20.0, -20.0])


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """40 experiments of 64 pairs, 10 % sooner in truth, with noise that both routes share and noise of their own."""
    dice = np.random.default_rng(1)
    covered = 0
    for _ in range(40):
        shared = dice.gamma(4, 25, 64)
        pairs = np.stack(
            [0.9 * shared * dice.normal(1, 0.1, 64), shared * dice.normal(1, 0.1, 64)], axis=1
        )
        low, high = summary.change(pairs, seed=0)["mean_ci"]
        covered += low <= -10 <= high
        assert high - low < 15, "what both share does not widen it"
    assert 34 <= covered <= 40


def test_the_phases_of_a_hit_add_up_to_its_time_to_first_token() -> None:
    def span(
        kind: str, start: float, ms: float, id: int = 0, own: bool = True
    ) -> dict[str, object]:
        return {
            "process": "",
            "kind": kind,
            "start_ms": start,
            "ms": ms,
            "id": id,
            "value": 0,
            "own": own,
        }

    spans = [
        span("queue", 2, 20), span("query", 2, 1), span("ticket", 4, 16, 9), span("prefill", 22, 30, 5),
        span("forward", 23, 4, 5), span("forward", 40, 6, 5), span("forward", 27, 100, 6, own=False),
    ]  # fmt: skip
    found = phases(spans, 55.0)
    assert list(found) == list(PHASES)
    assert list(found.values()) == [2, 2, 16, 2, 10, 20, 3] and sum(found.values()) == 55
    assert phases(spans[1:], 55.0) == {}
