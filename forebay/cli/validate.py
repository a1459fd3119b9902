"""`forebay simulate --validate`: what the simulator says beside what was measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forebay.cli.errors import UserError
from forebay.sim.cluster import ClusterError
from forebay.sim.validate import validate_bench, validate_loops, validate_published


def run_validation(measured: Path | None, cluster: str, as_json: bool) -> None:
    """``measured``: a result of `bench ttft`, compared on ``cluster``; without it the published figures and the loops are. Raises
    ``UserError``."""
    console = Console(stderr=True)
    with console.status("simulating"):
        found: dict[str, Any] = (
            _bench(measured, cluster)
            if measured is not None
            else {"published": validate_published(), "loops": validate_loops()}
        )
    if as_json:
        print(json.dumps(found))
        return
    output = Console()
    if measured is not None:
        output.print(_table(f"{measured} on {cluster}", found["bench"]))
        return
    published, loops = found["published"], found["loops"]
    output.print(
        _table(
            f"published: 16 GPUs, 16,384-token prompts, on {published['cluster']}",
            published["cells"],
        )
    )
    output.print(
        "fitted: " + ", ".join(f"{dial} = {value}" for dial, value in published["fitted"].items())
    )
    output.print(_loops(loops))


def _bench(measured: Path, cluster: str) -> dict[str, Any]:
    try:
        document = json.loads(measured.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise UserError(
            f"--bench {measured}: {reason}; give a result of `forebay bench ttft --json`"
        ) from error
    try:
        return {"cluster": cluster, "bench": validate_bench(document, cluster)}
    except ClusterError as error:
        raise UserError(f"--bench {measured}: {error}") from error


def _table(title: str, cells: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for head in ("group", "kind", "route", "TTFT", "measured ms", "simulated ms", "error", ""):
        table.add_column(
            head, justify="right" if head.endswith("ms") or head == "error" else "left"
        )
    for cell in cells:
        figures = (
            f"{cell['measured_ms']:.1f}",
            f"{cell['simulated_ms']:.1f}",
            f"{cell['error_pct']:+.1f} %",
        )
        table.add_row(
            cell["group"], cell["kind"], cell["route"], cell["statistic"], *figures, cell["use"]
        )
    return table


def _loops(loops: dict[str, dict[str, float]]) -> Table:
    table = Table(title="until a copy counts as done, two batches in flight")
    for head in (
        "loop",
        "a load, from its issue",
        "a write, from its batch's launch",
        "a write, from the end of its forward",
    ):
        table.add_column(head, justify="left" if head == "loop" else "right")
    for name, unit in (("usual", "iterations"), ("forebay", "plans")):
        lag = loops[name]
        table.add_row(
            name,
            f"{lag['load']} {unit}",
            f"{lag['write']} {unit}",
            f"{lag['write_wait']:.2f} forwards",
        )
    return table
