"""From samples to the result document: TTFT of each group, kind and route, and what the first route changes, with 95 % intervals.

Intervals are bootstrap percentiles (Efron and Tibshirani 1993). Both routes were asked the same prompts at the same places of the same
rounds, so requests are resampled in pairs, which keeps the machine's slow and quick minutes on both sides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
CONFIDENCE = 0.95
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request. ``sent_ns``: monotonic clock of the run that measured it; ``request_id``: the server's name for it."""

    round: int
    group: str
    route: str
    index: int
    is_hit: bool
    storage_tokens: int
    ttft_ms: float
    total_ms: float
    sent_ns: int
    request_id: str


def groups(samples: Sequence[Sample], routes: Sequence[str]) -> list[dict[str, Any]]:
    """One entry for each group, route and kind (hit, miss, and all of them)."""
    return [
        {
            "group": group,
            "kind": kind,
            "route": route,
            "n": len(some),
            "storage_hits": sum(sample.storage_tokens > 0 for sample in some),
            "ttft_ms": spread(np.array([sample.ttft_ms for sample in some])),
        }
        for group, kind in _kinds(samples)
        for route in routes
        if (some := _select(samples, group, kind, route))
    ]


def changes(samples: Sequence[Sample], routes: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """What each route but the last changes against the last, in percent of the last one's mean and median."""
    *others, baseline = routes
    found = []
    for group, kind in _kinds(samples):
        before = {
            (sample.round, sample.index): sample.ttft_ms
            for sample in _select(samples, group, kind, baseline)
        }
        for route in others:
            after = {
                (sample.round, sample.index): sample.ttft_ms
                for sample in _select(samples, group, kind, route)
            }
            pairs = sorted(before.keys() & after.keys())
            if pairs:
                both = np.array([[after[pair], before[pair]] for pair in pairs])
                found.append(
                    {
                        "group": group,
                        "kind": kind,
                        "route": route,
                        "baseline": baseline,
                        **change(both, seed),
                    }
                )
    return found


def change(pairs: Values, seed: int) -> dict[str, Any]:
    """``pairs``: (n, 2) of (new, old). Percent; negative is sooner."""
    dice = np.random.default_rng(seed)
    picks = dice.integers(0, len(pairs), (RESAMPLES, len(pairs)))
    means = pairs[picks].mean(axis=1)
    edge = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(_percent(means[:, 0], means[:, 1]), [edge, 100 - edge])
    mean, median = pairs.mean(axis=0), np.median(pairs, axis=0)
    return {
        "mean_pct": float(_percent(mean[0], mean[1])),
        "mean_ci": [float(low), float(high)],
        "p50_pct": float(_percent(median[0], median[1])),
    }


def spread(values: Values) -> dict[str, float]:
    """Mean and percentiles (linear interpolation)."""
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _percent(new: Any, old: Any) -> Any:
    return 100 * (new / old - 1)


def _kinds(samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    for group in dict.fromkeys(sample.group for sample in samples):
        kinds = {sample.is_hit for sample in samples if sample.group == group}
        yield from (
            (group, kind) for kind, is_hit in (("hit", True), ("miss", False)) if is_hit in kinds
        )
        yield group, "all"


def _select(samples: Sequence[Sample], group: str, kind: str, route: str) -> list[Sample]:
    return [
        sample
        for sample in samples
        if sample.group == group
        and sample.route == route
        and (kind == "all" or sample.is_hit == (kind == "hit"))
    ]
