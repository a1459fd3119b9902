"""Where flight records go: one file an incident, all processes in it, and only the newest kept."""

import contextlib
import os
import time
from pathlib import Path

from forebay.observe.events import Rings, write_flight_record

KEPT = 16
SUFFIX = ".flight"
_INCIDENT = ".incident" + SUFFIX


def save_incident(rings: Rings, directory: Path, what: str, reason: str) -> Path:
    """Something went wrong: write all rings, and let go of incidents beyond the newest `KEPT`. Raises ``OSError``."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{_stamp()}-{what}{_INCIDENT}"
    write_flight_record(rings.flight_record(reason), path)
    for old in sorted(directory.glob(f"*{_INCIDENT}"))[:-KEPT]:
        with contextlib.suppress(OSError):  # another server prunes the same directory
            old.unlink()
    return path


def save_timeline(rings: Rings, directory: Path, reason: str) -> Path:
    """What was asked for: all rings at the end of a server. Raises ``OSError``."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{_stamp()}-timeline{SUFFIX}"
    write_flight_record(rings.flight_record(reason), path)
    return path


def _stamp() -> str:
    """Sorts by time; the process keeps servers apart that end in the same second."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
