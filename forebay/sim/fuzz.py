"""Many histories: a campaign over consecutive seeds, with a coverage table in which a zero is a failure."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.sim.history import Report, run_history


class CampaignError(AssertionError):
    """A history failed. ``seed`` replays it: one seed is one history, bit for bit."""

    def __init__(self, seed: int, cause: BaseException) -> None:
        super().__init__(f"seed {seed}: {cause}")
        self.seed = seed


@dataclass
class Campaign:
    """Totals over all histories so far."""

    histories: int = 0
    totals: Counter[str] = field(default_factory=Counter)

    def add(self, report: Report) -> None:
        self.histories += 1
        for name in (
            "steps",
            "plans",
            "messages",
            "retractions",
            "restarts",
            "cached_tokens",
            "loaded_tokens",
            "remaps",
            "flushes",
            "loads",
            "backups",
        ):
            self.totals[name] += getattr(report, name)
        self.totals.update({f"finish {reason}": count for reason, count in report.finishes.items()})

    @property
    def never(self) -> list[str]:
        """What a campaign of this kind must meet and did not."""
        wanted = ("retractions", "restarts", "cached_tokens", "loaded_tokens", "remaps", "flushes", "loads", "backups")
        reasons = ("stop", "length", "abort", "rejected_full", "rejected_too_long")
        return [name for name in (*wanted, *(f"finish {reason}" for reason in reasons)) if not self.totals[name]]


def run_campaign(first_seed: int, count: int, progress: Callable[[int], None] = lambda done: None) -> Campaign:
    """``count`` histories from ``first_seed`` on. Raises ``CampaignError`` at the first that fails."""
    campaign = Campaign()
    for seed in range(first_seed, first_seed + count):
        try:
            campaign.add(run_history(seed))
        except Exception as error:
            raise CampaignError(seed, error) from error
        progress(campaign.histories)
    return campaign
