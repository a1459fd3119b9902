"""`forebay simulate`: faulty histories of the shipped control code in virtual time."""

import json
import re
import sys
import time

import typer

from forebay.cli.errors import UserError
from forebay.sim.fuzz import Campaign, CampaignError, run_campaign, run_store_campaign
from forebay.sim.preset import Preset


def run_simulation(
    fuzz: int, seed: int, as_json: bool, preset: Preset | None, grid: str | None, store: bool
) -> None:
    """Run ``fuzz`` histories from ``seed`` on; ``preset`` and ``grid`` (PPxTP) are drawn from each seed if None. ``store``: of the
    store alone.

    Raises ``typer.Exit``: 1 at the first that breaks a rule, or if what enough histories must meet was never met; ``BadParameter``.
    """
    if store and grid is not None:
        raise UserError(
            f"--grid {grid} is for histories of a replica; with --store there is no grid"
        )
    shape = None if grid is None else _shape(grid)
    started = time.monotonic()
    shown = started

    def progress(done: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and time.monotonic() - shown > 1:
            shown = time.monotonic()
            print(f"\r{done} of {fuzz} histories", end="", file=sys.stderr, flush=True)

    try:
        campaign = (
            run_store_campaign(seed, fuzz, progress, preset)
            if store
            else run_campaign(seed, fuzz, progress, preset, shape)
        )
    except CampaignError as error:
        given = (
            (f" --preset {preset}" if preset else "")
            + (f" --grid {grid}" if grid else "")
            + " --store" * store
        )
        print(f"\nforebay: {error}", file=sys.stderr)
        print(
            f"forebay: replay it with: forebay simulate --fuzz 1 --seed {error.seed}{given}",
            file=sys.stderr,
        )
        raise typer.Exit(1) from error
    _report(campaign, seed, time.monotonic() - started, as_json)
    if campaign.never and campaign.histories >= campaign.enough:
        print(
            f"forebay: {len(campaign.never)} things that a campaign must meet never happened",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _shape(grid: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-8])x([1-8])", grid)
    if match is None:
        raise typer.BadParameter(
            f"--grid {grid}: stages x TP ranks are wanted, each 1 to 8, as in 4x2"
        )
    return int(match[1]), int(match[2])


def _report(campaign: Campaign, seed: int, seconds: float, as_json: bool) -> None:
    if as_json:
        document = {
            "histories": campaign.histories, "first_seed": seed, "seconds": seconds, "totals": dict(campaign.totals),
            "coverage": {f"{row} x {column}": count for (row, column), count in campaign.met.items()}, "never": campaign.never,
        }  # fmt: skip
        print(json.dumps(document))
        return
    print(
        f"\r{campaign.histories} histories from seed {seed} in {seconds:.1f} s, no failure",
        file=sys.stderr,
    )
    for name, total in sorted(campaign.totals.items()):
        print(f"  {name:28} {total:>12} {total / campaign.histories:>10.1f} a history")
    if campaign.histories < campaign.enough:
        print(f"  fewer than {campaign.enough} histories say nothing about what is never met")
        return
    print(campaign.coverage.text(campaign.met))
    for name in campaign.never:
        print(f"  never met: {name}")
