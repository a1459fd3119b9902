"""`forebay config`: the settings table, for people and for programs."""

import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from forebay.settings import ENVIRONMENT_PREFIX, Field, fields


def print_config(as_json: bool) -> None:
    rows = [_row(field) for field in fields()]
    if as_json:
        sys.stdout.buffer.write(
            msgspec.json.format(msgspec.json.encode({"settings": rows})) + b"\n"
        )
        return
    table = Table("flag", "default", "unit", "range", "why", header_style="bold")
    for row in rows:
        flags = "\n".join([row["flag"], *row["aliases"]])
        default = "-" if row["default"] is None else str(row["default"])
        table.add_row(flags, default, row["unit"], row["range"], row["why"])
    Console().print(table)
    print(
        f"In a TOML file (--config FILE): page_size = 32. In the environment: {ENVIRONMENT_PREFIX}PAGE_SIZE=32. Flags win."
    )


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
