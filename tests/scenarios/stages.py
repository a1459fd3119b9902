"""What a scenario plays on, by its first command."""

from tests.scenarios.replica_stage import ReplicaStage
from tests.scenarios.script import ScriptError, Stage
from tests.scenarios.store_stage import StoreStage


def new_stage(first: str) -> Stage:
    if first == "replica":
        return ReplicaStage()
    if first == "store":
        return StoreStage()
    raise ScriptError(f"a scenario begins with replica or store, not {first!r}")
