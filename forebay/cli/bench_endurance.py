"""`forebay bench endurance`: runs it and shows what each process had at the beginning and the end."""

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from forebay.bench.endurance import EnduranceError, run
from forebay.bench.scratch import scratch_directory
from forebay.cli.errors import UserError
from forebay.frontend.later import refuse_later
from forebay.settings import Settings, resolve

_OWN = ("host", "port", "api_key", "served_model_name")
# Small, so that it is full, and its index as large as it gets, before the load is over a third.
_STORE = "embedded:{directory}?dram=32MiB&ssd=192MiB"


def run_bench_endurance(
    model: str,
    flags: Mapping[str, Any],
    config: Path | None,
    load_minutes: float,
    idle_minutes: float,
    as_json: bool,
) -> None:
    """Where no store is named, it is a small one of its own. Raises ``SettingsError`` and ``UserError``, and ``typer.Exit`` (1) if
    something was not flat."""
    settings = resolve(
        refuse_later(flags), config
    )  # what is wrong with them is said here, and not by the server
    if own := [name for name in _OWN if name in flags]:
        raise UserError(
            f"--{own[0].replace('_', '-')} is not for this bench, which starts a server for itself; leave it out"
        )
    arguments = [
        word
        for name, value in flags.items()
        for word in ("--" + name.replace("_", "-"), str(value))
    ]
    if config is not None:
        arguments += ["--config", str(config)]

    def say(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)

    try:
        with contextlib.ExitStack() as stack:
            if "store" not in flags and settings.store == Settings().store:
                directory = stack.enter_context(scratch_directory("endurance"))
                arguments += ["--store", _STORE.format(directory=directory)]
            result = run(model, arguments, load_minutes, idle_minutes, seed=0, say=say)
    except (EnduranceError, OSError) as error:
        raise UserError(str(error)) from error
    if as_json:
        print(json.dumps(result))
    else:
        _show(result)
    if not result["flat"]:
        raise typer.Exit(1)


def _show(result: dict[str, Any]) -> None:
    console = Console()
    for phase in result["phases"]:
        table = Table(
            title=f"{phase['phase']}, {phase['minutes']} minutes, {sum(phase['requests'].values())} requests"
        )
        for heading in (
            "process",
            "resident MiB: first",
            "last",
            "max",
            "growth",
            "descriptors",
            "threads",
            "CPU s",
        ):
            table.add_column(heading, justify="left" if heading == "process" else "right")
        for process in phase["processes"]:
            rss, name = process["rss_mib"], process["name"]
            pairs = [
                f"{process[what]['first']} -> {process[what]['last']}"
                for what in ("fds", "threads")
            ]
            sizes = [
                f"{rss['first']:.1f}",
                f"{rss['last']:.1f}",
                f"{rss['max']:.1f}",
                f"{process['growth_mib']:+.2f}",
            ]
            table.add_row(name, *sizes, *pairs, f"{phase['cpu_s'][name]:.1f}")
        console.print(table)
    for problem in result["problems"]:
        console.print(f"not flat: {problem}")
    console.print("flat" if result["flat"] else f"{len(result['problems'])} problems")
