"""Many histories: a campaign over consecutive seeds, with a coverage table in which a zero is a failure."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.core.ledger import REASONS
from forebay.sim.coverage import ENGINE, Cell, Coverage
from forebay.sim.history import Report, run_history
from forebay.sim.options import draw
from forebay.sim.preset import Preset
from forebay.sim.store_coverage import STORE
from forebay.sim.store_history import StoreReport, run_store_history

COUNTED = (
    "steps", "plans", "messages", "faults", "retractions", "restarts", "remaps", "flushes", "loads", "backups", "stores", "tickets",
    "staged", "cached_tokens", "loaded_tokens", "fetched_tokens",
)  # fmt: skip
FINISHES = ("stop", "length", "abort", "error", "rejected_full", "rejected_too_long")
OUTCOMES = (
    "issued", "complete", "short", "miss", "joined", "aborted", "timeout", "best_effort", "no_host_pages", "query_late",
)  # fmt: skip
WANTED = (
    *COUNTED,
    *(f"finish {reason}" for reason in FINISHES),
    *(f"ticket {outcome}" for outcome in OUTCOMES),
    *(f"unused {reason}" for reason in REASONS),
)
STORE_WANTED = (
    "put acknowledged",
    "put EXISTS",
    "put revoked",
    "removed",
    "got from memory",
    "got from SSD",
    "get missed",
)
# Of fewer histories nothing can be said: the rarest cells come up once in some hundreds; of the store's, which are short, in thousands.
ENOUGH_HISTORIES = 2000
ENOUGH_STORE_HISTORIES = 20_000


class CampaignError(AssertionError):
    """A history failed. ``seed`` replays it: one seed is one history, bit for bit."""

    def __init__(self, seed: int, cause: BaseException) -> None:
        super().__init__(f"seed {seed}: {cause}")
        self.seed = seed


@dataclass
class Campaign:
    """Totals over all histories so far. ``met``: the coverage tables' cells; ``wanted``: totals that may not stay zero;
    ``enough``: of fewer histories nothing that was not met can be said."""

    coverage: Coverage = ENGINE
    wanted: Sequence[str] = WANTED
    enough: int = ENOUGH_HISTORIES
    histories: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    met: Counter[Cell] = field(default_factory=Counter)

    def add(self, report: Report) -> None:
        self.histories += 1
        for name in COUNTED:
            self.totals[name] += getattr(report, name)
        self.totals.update({f"finish {reason}": count for reason, count in report.finishes.items()})
        self.totals.update(
            {f"ticket {outcome}": count for outcome, count in report.outcomes.items()}
        )
        self.totals.update({f"unused {reason}": pages for reason, pages in report.unused.items()})
        self.met.update(report.met)

    def add_store(self, report: StoreReport) -> None:
        self.histories += 1
        self.totals["steps"] += report.steps
        self.totals.update(report.met)
        self.met.update(report.cells)

    def join(self, other: "Campaign") -> None:
        self.histories += other.histories
        self.totals.update(other.totals)
        self.met.update(other.met)

    @property
    def never(self) -> list[str]:
        """What a campaign of this kind must meet and did not."""
        missing = [name for name in self.wanted if not self.totals[name]]
        return missing + [f"{row} x {column}" for row, column in self.coverage.never(self.met)]


def run_seed(
    seed: int, preset: Preset | None = None, shape: tuple[int, int] | None = None
) -> Report:
    """The history of one seed, with what is not drawn given. Raises ``AssertionError`` if anything it checks does not hold."""
    return run_history(seed, draw(random.Random(f"options {seed}"), preset, shape))


def run_campaign(
    first_seed: int,
    count: int,
    progress: Callable[[int], None] = lambda done: None,
    preset: Preset | None = None,
    shape: tuple[int, int] | None = None,
) -> Campaign:
    """``count`` histories from ``first_seed`` on. Raises ``CampaignError`` at the first that fails."""
    campaign = Campaign()
    return _run(
        campaign,
        first_seed,
        count,
        progress,
        lambda seed: campaign.add(run_seed(seed, preset, shape)),
    )


def run_store_campaign(
    first_seed: int,
    count: int,
    progress: Callable[[int], None] = lambda done: None,
    preset: Preset | None = None,
) -> Campaign:
    """As `run_campaign`, of the store alone: its master, its holders, its clients."""
    campaign = Campaign(STORE, STORE_WANTED, ENOUGH_STORE_HISTORIES)
    return _run(
        campaign,
        first_seed,
        count,
        progress,
        lambda seed: campaign.add_store(run_store_history(seed, preset)),
    )


def _run(
    campaign: Campaign,
    first_seed: int,
    count: int,
    progress: Callable[[int], None],
    run: Callable[[int], None],
) -> Campaign:
    for seed in range(first_seed, first_seed + count):
        try:
            run(seed)
        except Exception as error:
            raise CampaignError(seed, error) from error
        progress(campaign.histories)
    return campaign
