"""Counters that the planner reports: they only rise, and nothing is decided by them."""

import bisect
from dataclasses import dataclass, field

from forebay.core.messages import PLAN_SECONDS_BOUNDS, TierUse
from forebay.core.pages import Owner, PagePool


@dataclass(slots=True)
class Counters:
    plans_retired: int = 0
    worker_restarts: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    tainted_requests: int = 0
    plan_s_sum: float = 0.0
    plan_s_buckets: list[int] = field(default_factory=lambda: [0] * (len(PLAN_SECONDS_BOUNDS) + 1))

    def plan_retired(self, seconds: float) -> None:
        self.plans_retired += 1
        self.plan_s_sum += seconds
        self.plan_s_buckets[bisect.bisect_left(PLAN_SECONDS_BOUNDS, seconds)] += 1


def tier_use(pool: PagePool) -> TierUse:
    held = pool.count(Owner.FENCED) + pool.count(Owner.TRANSFER)
    return TierUse(
        pool.capacity, pool.free, pool.count(Owner.NODE), pool.count(Owner.REQUEST), held
    )
