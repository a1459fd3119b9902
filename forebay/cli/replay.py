"""`forebay simulate TRACE --cluster FILE`: what a cluster would make of a trace, before anybody buys it."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forebay.cli.errors import UserError
from forebay.settings import FetchRoute
from forebay.sim.cluster import ClusterError
from forebay.sim.replay import Options
from forebay.sim.report import html_report
from forebay.sim.study import Finished, Run, jobs_of, parse_sweep, settings, study
from forebay.sim.trace import TraceError, read_trace

WINDOW_S = 20.0
PLAIN_WIDTH = 160  # of a table that goes to a file or a pipe


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command's options as given."""

    trace: Path
    cluster: str
    routes: str
    speed: float
    limit: int | None
    sweep: Sequence[str]
    turned: Sequence[str]
    replicas: int
    exact: bool
    seed: int
    window: str | None
    html: Path | None
    as_json: bool


def run_replay(asked: Asked) -> None:
    """Raises ``UserError``."""
    if not (math.isfinite(asked.speed) and asked.speed > 0):
        raise UserError(
            f"--speed is {asked.speed}; give a number above 0: 2 lets requests arrive twice as fast"
        )
    try:
        runs = settings(
            asked.cluster, _routes(asked.routes), _turned(asked.turned), parse_sweep(asked.sweep)
        )
        trace = read_trace(asked.trace, asked.limit)
    except (ClusterError, TraceError) as error:
        raise UserError(str(error)) from error
    jobs = jobs_of(trace, asked.speed)
    window = _window(asked.window, jobs[-1].at_s)
    options = Options(
        replicas=asked.replicas,
        seed=asked.seed,
        exact=asked.exact,
        window=window if asked.html else None,
    )
    if asked.html is not None:
        _writable(asked.html)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    finished: list[Finished] = []
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        tasks = {id(run): bars.add_task(run.name, total=len(jobs), start=False) for run in runs}

        def show(run: Run, ended: int) -> None:
            bars.start_task(tasks[id(run)])
            bars.update(tasks[id(run)], completed=ended)

        finished += study(runs, jobs, options, show)
    _show(asked, len(jobs), window, finished)


def _show(
    asked: Asked, requests: int, window: tuple[float, float], finished: Sequence[Finished]
) -> None:
    about = f"{requests:,} requests at {asked.speed:g} x the trace's pace, {asked.replicas} replica(s) of {asked.cluster}"
    if asked.html is not None:
        try:
            asked.html.write_text(
                html_report(f"Forebay simulation of {asked.trace.name}", about, finished, window)
            )
        except OSError as error:
            raise UserError(f"--html {asked.html}: {error.strerror}") from error
    if asked.as_json:
        document = {
            "trace": str(asked.trace), "cluster": asked.cluster, "requests": requests, "speed": asked.speed,
            "replicas": asked.replicas, "seed": asked.seed, "exact": asked.exact, "runs": [one.outcome for one in finished],
        }  # fmt: skip
        print(json.dumps(document))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    console.print(_table(about, finished))
    if asked.html is not None:
        console.print(f"report: {asked.html}")


def _table(title: str, finished: Sequence[Finished]) -> Table:
    table = Table(title=title)
    heads = (
        "run",
        "rejected",
        "TTFT mean",
        "p50",
        "p99",
        "gap p50",
        "hit",
        "L1",
        "L2",
        "L3",
        "SSD writes",
        "busy",
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "run" else "right", no_wrap=head != "run")
    for one in finished:
        table.add_row(one.run.name, *_cells(one.outcome))
    return table


def _cells(outcome: dict[str, Any]) -> list[str]:
    ttft, gaps, hits, prompt = (
        outcome["ttft_ms"],
        outcome["inter_token_ms"],
        outcome["hit_tokens"],
        outcome["prompt_tokens"] or 1,
    )
    busy = [share for replica in outcome["utilisation"] for share in replica]
    return [
        f"{sum(outcome['rejected'].values()):,}",
        *(f"{ttft[name] / 1e3:.3f} s" if ttft else "-" for name in ("mean", "p50", "p99")),
        f"{gaps['p50']:.1f} ms" if gaps else "-",
        *(
            f"{100 * share / prompt:.1f} %"
            for share in (prompt - hits["computed"], hits["device"], hits["host"], hits["store"])
        ),
        f"{outcome['bytes']['ssd_writes'] / 1e9:.1f} GB",
        f"{100 * sum(busy) / len(busy):.0f} %",
    ]


def _routes(text: str) -> list[FetchRoute]:
    routes = []
    for name in text.split(","):
        if name.strip() not in list(FetchRoute):
            raise UserError(
                f"--routes has {name.strip()!r}; allowed: {', '.join(FetchRoute)}, with commas between"
            )
        routes.append(FetchRoute(name.strip()))
    if len(set(routes)) < len(routes):
        raise UserError(f"--routes names a route twice: {text}")
    return routes


def _turned(texts: Sequence[str]) -> dict[str, str]:
    turned = {}
    for text in texts:
        dial, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text!r} is not DIAL=VALUE; write engine.max_running=128")
        turned[dial.strip()] = value.strip()
    return turned


def _window(text: str | None, last_arrival_s: float) -> tuple[float, float]:
    """The middle of the arrivals if none is given."""
    if text is None:
        begin = max(last_arrival_s / 2 - WINDOW_S / 2, 0.0)
        return round(begin, 3), round(begin + WINDOW_S, 3)
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        low, high = 1.0, 0.0
    if not (0 <= low < high < math.inf):
        raise UserError(
            f"--window is {text!r}; give FROM:TO in seconds of the simulated time, such as 100:120"
        )
    return low, high


def _writable(path: Path) -> None:
    """Better now than after minutes of work."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(
            f"--html {path}: not a file that can be written; give a name in a directory that exists"
        )
