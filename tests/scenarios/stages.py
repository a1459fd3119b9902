"""What a scenario plays on, by its first command."""

from tests.scenarios.replica_stage import ReplicaStage
from tests.scenarios.script import ScriptError, Stage


def new_stage(first: str) -> Stage:
    if first == "replica":
        return ReplicaStage()
    raise ScriptError(f"a scenario begins with replica, not {first!r}")
