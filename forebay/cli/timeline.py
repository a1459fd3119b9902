"""`forebay timeline`: flight records in, one Chrome trace out."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from forebay.cli.errors import UserError
from forebay.observe.events import FlightRecord, read_flight_record
from forebay.observe.flight import SUFFIX
from forebay.observe.timeline import chrome_trace


def merge_timeline(paths: Sequence[Path], output: Path, as_json: bool) -> None:
    """Write the trace of ``paths`` (files, or directories of flight records) to ``output``. Raises ``UserError``."""
    records = [_read(file) for path in paths for file in _files(path)]
    trace = chrome_trace(records)
    try:
        output.write_bytes(msgspec.json.encode(trace))
    except OSError as error:
        raise UserError(
            f"{output} cannot be written: {error.strerror}; give another file with -o"
        ) from None
    spans = Counter(event["name"] for event in trace["traceEvents"] if event["ph"] == "X")
    if as_json:
        print(json.dumps({"output": str(output), "records": len(records), "spans": dict(spans)}))
    else:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(spans.items())) or "none"
        print(
            f"{output}: {spans.total()} spans ({kinds}); open it in https://ui.perfetto.dev or chrome://tracing"
        )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob(f"*{SUFFIX}"))
    if not found:
        raise UserError(
            f"{path} holds no flight record (*{SUFFIX}); a server writes them with --timeline, and when a rank is lost"
        )
    return found


def _read(path: Path) -> FlightRecord:
    try:
        return read_flight_record(path)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; give a flight record that `serve --timeline` or a lost rank has left"
        ) from None
    except ValueError as error:
        if path.read_bytes()[:1] == b"{":
            raise UserError(
                f"{path} is JSON, as of `GET /timeline`, so a trace already; open it in https://ui.perfetto.dev"
            ) from None
        raise UserError(
            f"{error}; give a flight record that `serve --timeline` or a lost rank has left"
        ) from None
