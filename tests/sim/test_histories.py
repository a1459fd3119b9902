"""The planner survives what it must survive: histories with random traffic, orders, delays and faults."""

import random
import subprocess
import sys
from collections import Counter

import pytest

from forebay.sim.coverage import ENGINE, Cell
from forebay.sim.faults import FaultKind, draw_faults
from forebay.sim.fuzz import ENOUGH_HISTORIES, Campaign, run_campaign, run_seed
from forebay.sim.history import History
from forebay.sim.preset import Preset

FIRST_SEED = 1_000_000


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 5))]
)
@pytest.mark.parametrize("preset", Preset)
def test_30_histories_of_each_preset_and_150_where_there_is_time(part: int, preset: Preset) -> None:
    assert run_campaign(FIRST_SEED + 30 * part, 30, preset=preset).histories == 30


def test_a_campaign_meets_what_it_is_for() -> None:
    """Cells of single faults take thousands of histories; `forebay simulate --fuzz` says which it has not met."""
    campaign = run_campaign(0, 150)
    rare = {f"{row} x {column}" for row, column in ENGINE.cells}
    rare |= {
        "ticket aborted",
        "ticket timeout",
        "ticket joined",
        "ticket no_host_pages",
        "unused anchor_lost",
    }
    assert not set(campaign.never) - rare


@pytest.mark.slow
def test_a_large_campaign_meets_every_reachable_cell() -> None:
    assert not run_campaign(0, 2 * ENOUGH_HISTORIES, preset=Preset.STORM).never


def test_a_request_that_comes_between_a_death_and_the_word_of_it_has_met_that_death() -> None:
    run_seed(20114)  # it ends with an error after four losses, of which it saw three happen


def test_a_rank_that_is_stopped_at_the_very_end_is_noticed_before_the_history_is_over() -> None:
    run_seed(107121, Preset.STORM, (4, 2))  # it owes the word that would free a page


def test_what_was_not_met_is_said_and_what_cannot_be_met_is_not() -> None:
    met: Counter[Cell] = Counter(dict.fromkeys(ENGINE.cells, 1))
    for cell in ENGINE.unreachable:
        met[cell] = 0
    campaign = Campaign(met=met)
    assert not [name for name in campaign.never if " x " in name]
    met[FaultKind.LOST_RANK, "loading"] = 0
    assert [name for name in campaign.never if " x " in name] == ["lost rank x loading"]


def test_unreachable_cells_are_cells_and_have_a_reason() -> None:
    assert set(ENGINE.unreachable) <= set(ENGINE.cells)
    assert all(ENGINE.unreachable.values())


def test_one_seed_is_one_history_whatever_pythonhashseed_is() -> None:
    script = (
        "from forebay.sim.history import History; from forebay.sim.fuzz import run_seed\n"
        "for seed in range(6): print(run_seed(seed))\n"
        "h = History(4); h.run(); print(h.report, h.planner.replica.digest)"
    )
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


def test_histories_are_not_empty() -> None:
    history = History(4)
    report = history.run()
    assert report.plans > 10 and report.messages >= report.plans
    assert run_seed(4) == run_seed(4)


def test_presets_draw_what_they_say() -> None:
    drawn = {
        preset: [draw_faults(random.Random(seed), preset, 1.0) for seed in range(200)]
        for preset in Preset
    }
    assert [] in drawn[Preset.LITE] and max(map(len, drawn[Preset.LITE])) == 1
    assert all(len({fault.kind for fault in faults}) == 1 for faults in drawn[Preset.ONE_FAULT])
    assert {fault.kind for faults in drawn[Preset.STORM] for fault in faults} == set(FaultKind)
    assert all(len({fault.kind for fault in faults}) >= 2 for faults in drawn[Preset.STORM])
