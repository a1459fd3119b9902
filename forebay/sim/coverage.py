"""What a campaign has met, as tables; what it should have met and has not fails it.

    grid state x event        the planner's four states, every kind of event
    request point x event     where requests stood when an event came that may concern them
    fault kind x activity     what the replica was at when the fault struck

`UNREACHABLE` names the cells that no history can meet, each with its reason. A zero anywhere else means that the simulator has gone
blind there.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forebay.core.messages import (
    Abort,
    FetchProgress,
    Flush,
    GridState,
    Heartbeat,
    PlanDone,
    StagedTaken,
    StoreDone,
    Submit,
    TransferDone,
)
from forebay.core.planner import Event, GridLost, GridReady
from forebay.core.transfers.lookup import QueryDone
from forebay.sim.faults import Activity, FaultKind, RequestPoint

EVENTS: tuple[type[Event], ...] = (
    Submit, Abort, Flush, PlanDone, TransferDone, FetchProgress, StagedTaken, StoreDone, QueryDone, Heartbeat, GridReady, GridLost,
)  # fmt: skip
CONCERNING: tuple[type[Event], ...] = (
    Abort,
    Flush,
    TransferDone,
    FetchProgress,
    StagedTaken,
    StoreDone,
    QueryDone,
    GridLost,
)

Cell = tuple[str, str]
_ENDS = "no grid is there or will be: a planner that has failed has ended every request and told its process to end"
_NOTHING_RAN = "before the first grid is up nothing has been asked of any rank or of the store"
_NOBODY_ASKS = "on the staged route nobody asks ahead: a request is not asked, fetching or settled"
_WOULD_WAIT = "a request that waits while nothing goes on would wait for ever: the progress checker's business"
_AT_A_START = "by its name it strikes while a grid starts, and nothing else goes on then"

UNREACHABLE: dict[Cell, str] = {
    (GridState.FAILED, GridReady.__name__): _ENDS,
    **{
        (GridState.STARTING, event.__name__): _NOTHING_RAN
        for event in (PlanDone, TransferDone, FetchProgress, StagedTaken, StoreDone)
    },
    (GridState.STARTING, QueryDone.__name__): _NOTHING_RAN,
    (RequestPoint.ASKING, StagedTaken.__name__): _NOBODY_ASKS,
    (FaultKind.CLIENT_ABORT, Activity.IDLE): _WOULD_WAIT,
    **{
        (FaultKind.STORE_DOWN_AT_START, activity): _AT_A_START
        for activity in Activity
        if activity is not Activity.STARTING
    },
}


@dataclass(frozen=True)
class Coverage:
    """Tables of cells (row, column), and why some of them cannot be met."""

    tables: tuple[list[Cell], ...]
    unreachable: Mapping[Cell, str]

    @property
    def cells(self) -> list[Cell]:
        return [cell for cells in self.tables for cell in cells]

    def never(self, met: Counter[Cell]) -> list[Cell]:
        """Reachable cells that were not met."""
        return [cell for cell in self.cells if not met[cell] and cell not in self.unreachable]

    def text(self, met: Counter[Cell]) -> str:
        """``-`` marks an unreachable cell."""
        return "\n\n".join(self._table(cells, met) for cells in self.tables)

    def _table(self, cells: list[Cell], met: Counter[Cell]) -> str:
        rows, columns = (
            list(dict.fromkeys(row for row, _ in cells)),
            list(dict.fromkeys(column for _, column in cells)),
        )
        width = max(map(len, rows))
        lines = [" " * width + "".join(f"  {column:>{max(len(column), 7)}}" for column in columns)]
        for row in rows:
            counts = [
                "-" if (row, column) in self.unreachable else str(met[row, column])
                for column in columns
            ]
            lines.append(
                f"{row:{width}}"
                + "".join(
                    f"  {count:>{max(len(c), 7)}}" for count, c in zip(counts, columns, strict=True)
                )
            )
        return "\n".join(lines)


def table(names: Iterable[str], columns: Iterable[str]) -> list[Cell]:
    columns = list(columns)
    return [(name, column) for name in names for column in columns]


ENGINE = Coverage(
    (
        table(GridState, (event.__name__ for event in EVENTS)),
        table(RequestPoint, (event.__name__ for event in CONCERNING)),
        table(FaultKind, Activity),
    ),
    UNREACHABLE,
)
