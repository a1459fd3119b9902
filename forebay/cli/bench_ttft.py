"""`forebay bench ttft`: what was asked for, checked; the measurement with progress; its table, documents and report."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from forebay.bench.ttft.plan import Experiment, Group, Shape, TtftError, parse_arms, parse_groups
from forebay.bench.ttft.report import render
from forebay.bench.ttft.run import run
from forebay.bench.ttft.timeline import PHASES
from forebay.cli.errors import UserError
from forebay.frontend.later import refuse_later
from forebay.models.errors import ModelError
from forebay.runtime.start_error import StartError
from forebay.settings import ENVIRONMENT_PREFIX, resolve

INVALID = 1
SHOWN_PROBLEMS = 5
FILE_WIDTH = 130
# Settings that the bench gives each server itself.
_OWN = {
    "host": "servers listen on 127.0.0.1",
    "port": "servers take free ports",
    "api_key": "servers are private",
    "served_model_name": "nobody sees it",
    "timeline": "--html draws it",
    "fetch_route": "use --routes",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """The command's own options, as given."""

    model: str
    routes: str
    groups: str
    input_len: int
    output_len: int
    requests: int
    concurrency: int
    repeat: int
    rate: float | None
    utilisation: float | None
    output: Path | None
    resume: bool
    html: Path | None
    as_json: bool


def run_bench_ttft(asked: Asked, flags: Mapping[str, Any], config: Path | None) -> int:
    """The exit status: 0, or 1 if the result is not valid. Raises ``SettingsError`` and ``UserError``."""
    experiment = _experiment(asked, flags, config)
    before = _before(asked)
    for path in (asked.output, asked.html):
        _check_writable(path)
    try:
        with _progress(experiment, before) as progress:
            result = run(
                experiment,
                progress,
                lambda document: _write(asked.output, json.dumps(document)),
                before,
            )
    except (TtftError, ModelError, StartError, OSError) as error:
        raise UserError(str(error)) from error
    _write(asked.output, json.dumps(result))
    if asked.html is not None:
        _write(asked.html, render(result))
    if asked.as_json:
        print(json.dumps(result))
    else:
        _show(result, Console(width=None if sys.stdout.isatty() else FILE_WIDTH))
    if not result["valid"]:
        _complain(result["problems"])
    return 0 if result["valid"] else INVALID


def _experiment(asked: Asked, flags: Mapping[str, Any], config: Path | None) -> Experiment:
    for name, why in _OWN.items():
        if flags.get(name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} is not for this bench: {why}; leave it out"
            )
    settings = resolve(
        refuse_later(flags), config, environment=_defaults(asked, config) | os.environ
    )
    try:
        arms, groups = parse_arms(asked.routes), parse_groups(asked.groups)
    except TtftError as error:
        raise UserError(str(error)) from error
    if settings.store == "none" and groups != (Group.MISS,):
        raise UserError(
            "--store is none, so nothing can be stored and hit; allowed: embedded, file:DIR, forebay://HOST:PORT; leave it out"
        )
    shape = Shape(
        asked.input_len,
        asked.output_len,
        asked.requests,
        asked.concurrency,
        asked.repeat,
        asked.rate,
        asked.utilisation,
    )
    return Experiment(asked.model, settings, arms, groups, shape, settings.seed)


def _defaults(asked: Asked, config: Path | None) -> dict[str, str]:
    """This bench's own, below the environment and flags; a settings file says all that it wants."""
    own = {"pp": "2", "chunk_size": str(max(asked.input_len, 1)), "fetch_policy": "wait"}
    return (
        {}
        if config is not None
        else {f"{ENVIRONMENT_PREFIX}{name.upper()}": value for name, value in own.items()}
    )


def _before(asked: Asked) -> Any:
    """The document to go on from, None if there is none."""
    if not asked.resume:
        return None
    if asked.output is None:
        raise UserError("--resume needs --output FILE: the file to go on from")
    try:
        return json.loads(asked.output.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"--resume: {asked.output} cannot be read: {error}; give another --output"
        ) from error


def _check_writable(path: Path | None) -> None:
    """Before minutes of work, not after."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(
            f"{path}: there is no directory {path.absolute().parent}; make it, or give another path"
        )
    if path is not None and path.is_dir():
        raise UserError(f"{path} is a directory; give a file")


def _write(path: Path | None, text: str) -> None:
    """Beside it, then renamed: a run that is cut off never leaves half a file."""
    if path is None:
        return
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another path") from error


@contextmanager
def _progress(experiment: Experiment, before: Any) -> Iterator[Any]:
    """A bar on standard error over all requests, primed ones too."""
    shape = experiment.shape
    primed = {Group.MISS: 0.0, Group.MIXED: 0.5, Group.HIT: 1.0}
    done = before.get("rounds_done", 0) if isinstance(before, dict) else 0
    each = shape.requests / max(shape.rounds, 1) * len(experiment.arms)
    total = sum(each * (1 + primed[group]) for group in experiment.groups) * (shape.rounds - done)
    console = Console(stderr=True)
    count = TextColumn("{task.completed:.0f}/{task.total:.0f} requests")
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        count,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting the servers", total=total)

        def progress(doing: str, answered: int) -> None:
            bar.update(task, description=doing or None, advance=answered)

        yield progress


def _show(result: dict[str, Any], console: Console) -> None:
    about = result["config"]
    load = f"{about['concurrency']} in flight"
    if result["rates_per_s"]:
        load = ", ".join(
            f"{group} {rate:.2f} requests/s" for group, rate in result["rates_per_s"].items()
        )
    console.print(
        f"{about['model']}, {about['dtype']}, pp={about['pp']} tp={about['tp']}, {about['input_len']} tokens in and "
        f"{about['output_len']} out, chunks of {about['chunk_size']}, {load}, {about['fetch_policy']}, {about['store']}",
        highlight=False,
    )
    console.print(_times(result["groups"]))
    if result["change"]:
        console.print(_changes(result["change"]))
    if shares := [entry for entry in result["timeline"] if entry.get("phases_ms")]:
        console.print(_phases(shares))


def _times(groups: list[dict[str, Any]]) -> Table:
    table = Table(title="time to first token, ms")
    for heading in ("group", "kind", "route", "n", "hits", "mean", "p50", "p90", "p99"):
        table.add_column(
            heading, justify="left" if heading in ("group", "kind", "route") else "right"
        )
    for entry in groups:
        times = [f"{entry['ttft_ms'][name]:.1f}" for name in ("mean", "p50", "p90", "p99")]
        table.add_row(
            entry["group"],
            entry["kind"],
            entry["route"],
            str(entry["n"]),
            str(entry["storage_hits"]),
            *times,
        )
    return table


def _changes(changes: list[dict[str, Any]]) -> Table:
    table = Table(title="change of the time to first token (negative: sooner)")
    for heading in ("group", "kind", "route", "mean", "95 % interval", "median"):
        table.add_column(
            heading, justify="left" if heading in ("group", "kind", "route") else "right"
        )
    for entry in changes:
        low, high = entry["mean_ci"]
        against = f"{entry['route']} against {entry['baseline']}"
        interval = f"{low:+.1f} to {high:+.1f} %"
        table.add_row(
            entry["group"],
            entry["kind"],
            against,
            f"{entry['mean_pct']:+.1f} %",
            interval,
            f"{entry['p50_pct']:+.1f} %",
        )
    return table


def _phases(timelines: list[dict[str, Any]]) -> Table:
    table = Table(title="where the time of the hit of median time to first token went, ms")
    table.add_column("it")
    for entry in timelines:
        table.add_column(f"{entry['route']} ({entry['group']})", justify="right")
    table.add_column("that is")
    for name, text in PHASES.items():
        table.add_row(name, *(f"{entry['phases_ms'][name]:.1f}" for entry in timelines), text)
    table.add_row("in all", *(f"{entry['ttft_ms']:.1f}" for entry in timelines), "")
    return table


def _complain(problems: list[str]) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(
        f"forebay: the result is not valid: {len(problems)} requests were not as intended; the first of them:"
    )
    for problem in problems[:SHOWN_PROBLEMS]:
        console.print(f"  {problem}", markup=False, soft_wrap=True)
