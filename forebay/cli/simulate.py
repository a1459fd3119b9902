"""`forebay simulate`: faulty histories of the shipped control code in virtual time."""

import json
import sys
import time
from typing import Annotated

import typer

from forebay.sim.fuzz import Campaign, CampaignError, run_campaign


def simulate(
    fuzz: Annotated[int, typer.Option("--fuzz", min=1, help="Number of histories to run, each from its own seed.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="First seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Run the real planner through random traffic, orders, delays and faults, and check every rule after every step."""
    started = time.monotonic()
    shown = started

    def progress(done: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > 1:
            shown = time.monotonic()
            print(f"\r{done} of {fuzz} histories", end="", file=sys.stderr, flush=True)

    try:
        campaign = run_campaign(seed, fuzz, progress)
    except CampaignError as error:
        print(f"\nforebay: {error}", file=sys.stderr)
        print(f"forebay: replay it with: forebay simulate --fuzz 1 --seed {error.seed}", file=sys.stderr)
        raise typer.Exit(1) from error
    _report(campaign, seed, time.monotonic() - started, as_json)


def _report(campaign: Campaign, seed: int, seconds: float, as_json: bool) -> None:
    if as_json:
        document = {
            "histories": campaign.histories, "first_seed": seed, "seconds": seconds,
            "totals": dict(campaign.totals), "never": campaign.never,
        }  # fmt: skip
        print(json.dumps(document))
        return
    print(f"\r{campaign.histories} histories from seed {seed} in {seconds:.1f} s, no failure", file=sys.stderr)
    for name, total in sorted(campaign.totals.items()):
        print(f"  {name:28} {total}")
    for name in campaign.never:
        print(f"  {name:28} never happened: too few histories to say anything about it")
