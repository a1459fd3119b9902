"""`forebay bench planner`: runs the measurement and shows it."""

import json
import sys

from rich.console import Console
from rich.table import Table

from forebay.bench.planner import run


def run_bench_planner(as_json: bool) -> None:
    def say(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)

    result = run(say)
    if as_json:
        print(json.dumps(result))
        return
    about = result["config"]
    title = f"planner: {about['decodes']} decodes + a chunk of {about['chunk']} + {about['waiting']} waiting, page {about['page_size']}"
    table = Table(title=title)
    for heading in ("what", "tokens", "p50", "p99", "unit"):
        table.add_column(heading, justify="left" if heading in ("what", "unit") else "right")
    for row in result["rows"]:
        table.add_row(
            row["what"], str(row["tokens"]), f"{row['p50']:.3f}", f"{row['p99']:.3f}", row["unit"]
        )
    Console().print(table)
