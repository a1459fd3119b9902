"""`forebay simulate`: faulty histories of the shipped control code in virtual time."""

import json
import sys
import time

import typer

from forebay.sim.fuzz import Campaign, CampaignError, run_campaign


def run_simulation(fuzz: int, seed: int, as_json: bool) -> None:
    """Run ``fuzz`` histories from ``seed`` on. Raises ``typer.Exit`` (1) at the first that breaks a rule."""
    started = time.monotonic()
    shown = started

    def progress(done: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and time.monotonic() - shown > 1:
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
    for name in campaign.never if campaign.histories > 1 else ():
        print(f"  {name:28} never happened: too few histories to say anything about it")
