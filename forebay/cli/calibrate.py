"""`forebay simulate --calibrate`: prints the cluster file of this machine."""

import json
import sys
import tomllib

from rich.console import Console

from forebay.bench.calibrate import CalibrationError, calibrate
from forebay.bench.ttft.plan import TtftError
from forebay.cli.errors import UserError
from forebay.frontend.engine import EngineDown
from forebay.models.errors import ModelError
from forebay.runtime.start_error import StartError
from forebay.sim.cluster import make_cluster

MODEL = "demo"


def run_calibration(as_json: bool) -> None:
    """TOML on stdout, or the same tables as JSON. Raises ``UserError``."""
    console = Console(stderr=True)
    try:
        text = calibrate(
            MODEL,
            lambda line: (
                console.print(f"forebay: {line}", highlight=False) if sys.stderr.isatty() else None
            ),
        )
    except (CalibrationError, TtftError, EngineDown, ModelError, StartError, OSError) as error:
        raise UserError(f"--calibrate: {error}") from error
    tables = tomllib.loads(text)
    make_cluster(tables, {}, "as calibrated")
    print(json.dumps(tables) if as_json else text, end="" if not as_json else "\n")
