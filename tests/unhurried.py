"""Planners for which no store is late and no fetch slower than computing.

What a planner does in good time depends on the machine: a query that takes more than 0.1 s is a miss,
and a fetch is declined once computing looks quicker. A test whose premise is a hit says so with this.
"""

import json
import os
from pathlib import Path
from typing import Any

INJECTION = Path(__file__).parent / "runtime" / "fault_injection"
PLANNER: dict[str, Any] = {"always_fetch": True, "QUERY_S": 60.0, "patience_s": 60.0}


def unhurried(**more: Any) -> dict[str, str]:
    """Environment of a server's process; ``more``: what else the planner takes as given (`fault_injection`)."""
    path = os.pathsep.join(filter(None, (str(INJECTION), os.environ.get("PYTHONPATH"))))
    return {"TEST_PLANNER": json.dumps(PLANNER | more), "PYTHONPATH": path}
