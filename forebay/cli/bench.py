"""`forebay bench engine`: runs the measurement and shows it."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forebay.bench.engine import BenchError, Peer, run
from forebay.cli.errors import UserError
from forebay.frontend.engine import EngineDown
from forebay.frontend.later import refuse_later
from forebay.models.errors import ModelError
from forebay.runtime.start_error import StartError
from forebay.settings import resolve

ANOTHER_FOREBAY = "forebay:"


def run_bench_engine(
    model: str,
    flags: Mapping[str, Any],
    config: Path | None,
    peer: str | None,
    only: str,
    rounds: int,
    as_json: bool,
) -> None:
    """Raises ``SettingsError`` and ``UserError``."""
    given = {"store": "none"} | {
        name: value for name, value in flags.items() if value is not None
    }  # cold is not warm from the last run
    settings = resolve(refuse_later(given), config)
    other = None if peer is None else _peer(peer, given, config)

    def say(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)

    try:
        result = run(
            model, settings, other, rounds, say, [name for name in only.split(",") if name]
        )
    except (BenchError, EngineDown, ModelError, StartError, OSError) as error:
        raise UserError(str(error)) from error
    if as_json:
        print(json.dumps(result))
        return
    about, floors = result["config"], result["floors"]
    title = (
        f"{about['model']}, {about['dtype']}, pp={about['pp']} tp={about['tp']}, "
        f"{about['threads']} threads, {about['rounds']} rounds"
    )
    table = Table(title=title)
    for heading in (
        "what",
        "tokens",
        "batch",
        "forebay",
        about["peer"] or "no peer",
        "ratio",
        "unit",
    ):
        table.add_column(heading, justify="left" if heading in ("what", "unit") else "right")
    for row in result["rows"]:
        peer_text = "" if row["peer"] is None else f"{row['peer']:.1f}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        table.add_row(
            row["what"],
            str(row["tokens"]),
            str(row["batch"]),
            f"{row['forebay']:.1f}",
            peer_text,
            ratio,
            row["unit"],
        )
    console = Console()
    console.print(table)
    for row in result["rows"]:
        for name, figure in row["beside"].items():
            said = (
                f"{about['peer']} with {name} weights: {row['what']}/{row['tokens']}x{row['batch']}"
            )
            console.print(f"{said} {figure:.1f} {row['unit']}")
    for row in result["memory"]:
        rss, weights, pools, over, most = (
            row[what] / 1e6 for what in ("rss", "weights", "pools", "over", "over_max")
        )
        parts = f"{weights:.0f} MB weights, {pools:.0f} MB pages in use, {over:.0f} MB beside them"
        console.print(f"rank {row['rank']}: {rss:.0f} MB resident: {parts} ({most:.0f} allowed)")
    console.print(
        f"floors: {floors['matmul_gflops']:.0f} GFLOP/s in bfloat16, {floors['memcpy_gib_s']:.1f} GiB/s of copies"
    )


def _peer(text: str, given: Mapping[str, Any], config: Path | None) -> Peer:
    """``forebay:pp=1,threads-per-rank=2`` is this engine with those settings instead; anything else is a library's name."""
    if not text.startswith(ANOTHER_FOREBAY):
        return Peer(text)
    changes: dict[str, str] = {}
    for pair in text.removeprefix(ANOTHER_FOREBAY).split(","):
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise UserError(
                f"--peer {text}: {pair!r} is no setting; write forebay:NAME=VALUE,NAME=VALUE, as in forebay:pp=1,threads-per-rank=2"
            )
        changes[name.strip().replace("-", "_")] = value.strip()
    return Peer(text, resolve(refuse_later({**given, **changes}), config))
