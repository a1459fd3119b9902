"""What a replay measures: one row a request, gaps between tokens, and the passes inside a chosen window."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forebay.core.messages import FinishReason, Output, Plan
from forebay.sim.stages import Acknowledgement, Pass

REJECTED = frozenset(
    {
        FinishReason.REJECTED_FULL,
        FinishReason.REJECTED_TOO_LONG,
        FinishReason.ERROR,
        FinishReason.TAINTED,
    }
)


@dataclass(slots=True)
class Row:
    """One request. Times in seconds; -1: it never came to that. ``computed``: prompt tokens that no tier had."""

    input_tokens: int
    kind: str
    arrived_at: float
    first_at: float = -1.0
    last_at: float = -1.0
    device: int = 0
    host: int = 0
    store: int = 0
    queue_s: float = 0.0
    rejected: str = ""

    @property
    def computed(self) -> int:
        return self.input_tokens - self.device - self.host - self.store

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrived_at


@dataclass
class Measures:
    """``window``: (from, to) of virtual time whose passes are kept."""

    window: tuple[float, float] | None = None
    keeps_journal: bool = False
    journal: list[tuple[float, Plan | Acknowledgement]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    passes: dict[tuple[int, int], list[Pass]] = field(
        default_factory=dict
    )  # (replica, stage) -> passes inside the window
    ended: int = 0
    plans: int = 0
    output_tokens: int = 0
    ended_at: float = 0.0

    def arrived(self, index: int, input_tokens: int, kind: str, now: float) -> None:
        assert index == len(self.rows)
        self.rows.append(Row(input_tokens, kind, now))

    def output(self, index: int, output: Output, now: float) -> None:
        row = self.rows[index]
        usage = output.usage
        if usage is not None:
            row.first_at = now
            row.device, row.host, row.store, row.queue_s = (
                usage.cached_device,
                usage.cached_host,
                usage.cached_store,
                usage.queue_s,
            )
        if output.tokens:
            if usage is None:
                self.gaps_s.append(now - row.last_at)
            row.last_at = now
            self.output_tokens += 1
        if output.finish is not None:
            self.ended += 1
            self.ended_at = now
            if output.finish in REJECTED:
                row.rejected = output.finish.value

    def built(self, now: float, plan: Plan) -> None:
        self.plans += 1
        if self.keeps_journal:
            self.journal.append((now, plan))

    def said(self, now: float, messages: Sequence[Acknowledgement]) -> None:
        if self.keeps_journal:
            self.journal += [(now, message) for message in messages]

    def passed(self, replica: int, stage: int, one: Pass) -> None:
        if self.window is not None and one.end > self.window[0] and one.start < self.window[1]:
            self.passes.setdefault((replica, stage), []).append(one)

    def served(self, kind: str | None = None) -> list[Row]:
        """Rows of requests that got a token, of one kind or all."""
        return [row for row in self.rows if row.first_at >= 0 and kind in (None, row.kind)]


def summary_ms(seconds: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float]:
    """Mean and quantiles in milliseconds; empty without samples."""
    if not len(seconds):
        return {}
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {name: round(float(value), 3) for name, value in
            (("mean", values.mean()), ("p50", p50), ("p90", p90), ("p99", p99), ("max", values.max()))}  # fmt: skip
