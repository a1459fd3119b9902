"""`forebay bench kv`: runs the measurement and shows it."""

import json
import sys

from rich.console import Console
from rich.table import Table

from forebay.bench.kv_quality import run
from forebay.cli.errors import UserError
from forebay.models.errors import ModelError
from forebay.settings import DType

TOKENS_MAX = 1 << 16
PAGE_MAX = 4096


def run_bench_kv(model: str, dtype: str, tokens: int, page_size: int, as_json: bool) -> None:
    """Raises ``UserError``."""
    if dtype not in tuple(DType):
        raise UserError(f"--dtype is {dtype!r}; allowed: {', '.join(DType)}")
    for name, value, low, high in (
        ("tokens", tokens, 32, TOKENS_MAX),
        ("page-size", page_size, 1, PAGE_MAX),
    ):
        if not low <= value <= high:
            raise UserError(f"--{name} is {value}; allowed: {low} to {high}")

    def say(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)

    try:
        result = run(model, dtype, tokens, page_size, say)
    except ModelError as error:
        raise UserError(str(error)) from error
    if as_json:
        print(json.dumps(result))
        return
    about = result["config"]
    title = f"{about['model']}, computed in {about['dtype']}: {about['texts']} texts of {about['tokens']} tokens"
    table = Table(title=title)
    for heading in ("KV", "bytes a token", "mean KL, nats", "greedy agreement"):
        table.add_column(heading, justify="left" if heading == "KV" else "right")
    for row in result["rows"]:
        size = f"{about['bytes_per_token'][row['kv_dtype']]:.0f}"
        table.add_row(
            row["kv_dtype"], size, f"{row['mean_kl']:.2e}", f"{100 * row['greedy_agreement']:.2f} %"
        )
    Console().print(table)
