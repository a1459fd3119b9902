"""`forebay bench tiers`: runs the measurement and shows it."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forebay.bench.tiers.run import PARTS, run
from forebay.bench.ttft.plan import TtftError
from forebay.cli.errors import UserError
from forebay.frontend.later import refuse_later
from forebay.models.errors import ModelError
from forebay.runtime.start_error import StartError
from forebay.settings import ENVIRONMENT_PREFIX, resolve

_DEFAULTS = {"pp": "2", "threads_per_rank": "1", "fetch_policy": "wait"}
_OWN = ("host", "port", "api_key", "served_model_name", "timeline", "store", "fetch_route")
WIDTH = 130


def run_bench_tiers(
    model: str,
    flags: Mapping[str, Any],
    config: Path | None,
    parts: str,
    tokens: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Raises ``SettingsError`` and ``UserError``."""
    chosen = [part.strip() for part in parts.split(",")]
    if unknown := [part for part in chosen if part not in PARTS]:
        raise UserError(f"--parts names {unknown[0]!r}; allowed: {', '.join(PARTS)}")
    if own := [name for name in _OWN if flags.get(name) is not None]:
        raise UserError(
            f"--{own[0].replace('_', '-')} is not for this bench, which starts servers for itself; leave it out"
        )
    defaults = (
        {}
        if config is not None
        else {f"{ENVIRONMENT_PREFIX}{name.upper()}": value for name, value in _DEFAULTS.items()}
    )
    settings = resolve(refuse_later(flags), config, environment=defaults | os.environ)

    def say(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)

    try:
        result = run(model, settings, chosen, tokens, rounds, say)
    except (TtftError, ModelError, StartError, OSError) as error:
        raise UserError(str(error)) from error
    if as_json:
        print(json.dumps(result))
    else:
        _show(result, Console(width=None if sys.stdout.isatty() else WIDTH))


def _show(result: dict[str, Any], console: Console) -> None:
    about = result["config"]
    shape = f"{about['model']}, {about['dtype']}, pp={about['pp']} tp={about['tp']}, {about['rounds']} rounds"
    console.print(shape, highlight=False)
    if "hits" in result:
        console.print(_hits(result["hits"], about["tokens"]))
    if "cost" in result:
        console.print(_cost(result["cost"]))
    if "copies" in result:
        console.print(_copies(result["copies"]))


def _hits(rows: list[dict[str, Any]], tokens: int) -> Table:
    columns = ("p50", "p10", "p90", "over device", "missed")
    table = _table(
        f"{tokens} tokens, all cached: time to first token, ms", ("store", "tier"), columns
    )
    device = {row["store"]: row["ttft_ms"]["p50"] for row in rows if row["tier"] == "device"}
    for row in rows:
        if "gb_s" in row:
            rate, size = row["gb_s"]["p50"], row["bytes"]
            table.add_row(
                row["store"],
                row["tier"],
                f"{size / rate / 1e6:.1f}",
                "",
                "",
                f"{size / 1e6:.0f} MB at {rate:.2f} GB/s",
                "",
            )
            continue
        times = row["ttft_ms"]
        more = times["p50"] - device[row["store"]]
        table.add_row(
            row["store"],
            row["tier"],
            *(f"{times[name]:.1f}" for name in ("p50", "p10", "p90")),
            f"{more:+.1f}",
            str(row["missed"] or ""),
        )
    return table


def _cost(rows: list[dict[str, Any]]) -> Table:
    title = "CPU time beside the forward passes, % of theirs (1,024 tokens cold, nothing to be hit)"
    table = _table(
        title, ("with", "more than"), ("forward, s", "beside", "more", "store's process")
    )
    for row in rows:
        more = "" if row["more_pct"] is None else f"{row['more_pct']:+.2f}"
        table.add_row(
            row["arm"],
            row["than"] or "",
            f"{row['compute_s']:.1f}",
            f"{row['beside_pct']:.2f}",
            more,
            f"{row['store_pct']:.2f}",
        )
    return table


def _copies(rows: list[dict[str, Any]]) -> Table:
    table = _table("copies of one rank, GB/s", ("copy",), ("forebay", "memcpy", "ratio"))
    for row in rows:
        own, floor = row["gb_s"]["p50"], row["memcpy_gb_s"]
        beside = ("", "") if floor is None else (f"{floor['p50']:.2f}", f"{own / floor['p50']:.2f}")
        table.add_row(row["copy"], f"{own:.2f}", *beside)
    return table


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    return table
