"""`forebay config`: the settings table, for people and for programs."""

import io
import os
import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.settings import ENVIRONMENT_PREFIX, Field, fields, unknown_variables

WIDTH_MIN = 100


def print_config(as_json: bool) -> None:
    """On stdout; on stderr, what the environment has that is no setting."""
    rows = [_row(field) for field in fields()]
    for warning in unknown_variables(os.environ):
        print(f"forebay: {warning}", file=sys.stderr)
    if as_json:
        sys.stdout.buffer.write(
            msgspec.json.format(msgspec.json.encode({"settings": rows})) + b"\n"
        )
        return
    print(_table(rows))
    print(
        f"In a TOML file (--config FILE): page_size = 32. In the environment: {ENVIRONMENT_PREFIX}PAGE_SIZE=32. Flags win."
    )


def _table(rows: list[dict[str, Any]]) -> str:
    """Names and values are copied from here, so they are never cut; reasons are folded."""
    table = Table(header_style="bold")
    longest = max(len(flag) for row in rows for flag in (row["flag"], *row["aliases"]))
    table.add_column("flag", no_wrap=True, min_width=longest)
    for name in ("default", "unit", "range", "why"):
        table.add_column(name, overflow="fold")
    for row in rows:
        flags = "\n".join([row["flag"], *row["aliases"]])
        default = "-" if row["default"] is None else str(row["default"])
        table.add_row(*map(Text, (flags, default, row["unit"], row["range"], row["why"])))
    out = Console()
    console = Console(
        file=io.StringIO(), width=max(out.width, WIDTH_MIN), force_terminal=out.is_terminal
    )
    console.print(table)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue().rstrip("\n")


def _row(field: Field) -> dict[str, Any]:
    return {
        "name": field.name,
        "flag": field.flag,
        "aliases": list(field.setting.aliases),
        "default": field.default,
        "unit": field.setting.unit,
        "range": field.range,
        "why": field.setting.why,
    }
