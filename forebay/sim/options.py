"""What one history is made of, all of it drawn from its seed."""

import random
from dataclasses import dataclass

from forebay.core.replica import PlannerConfig
from forebay.core.residency import CACHE, STAGING
from forebay.core.transfers.backup import WritePolicy
from forebay.core.transfers.policy import FetchPolicy
from forebay.sim.grid import Timing
from forebay.sim.other_models import OURS
from forebay.sim.preset import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes in pages or tokens, times in seconds. ``store_failures``: share of single reads and writes of the store that fail.

    ``waves``: before each further wave of traffic these tiers are flushed, so that it meets what the earlier ones have saved or stored.
    """

    preset: Preset
    pp: int
    tp: int
    page_size: int
    pages: int
    host_pages: int
    write_policy: WritePolicy
    load_back_threshold: int
    has_store: bool
    fetch_policy: FetchPolicy
    fetch_threshold: int
    staged: bool
    staging: bool
    store_failures: float
    query_s: float
    chunk_size: int
    max_running: int
    max_waiting: int
    max_context: int
    prefix_first: bool
    requests: int
    arrival_s: float
    timing: Timing
    abort_share: float
    flushes: int
    waves: tuple[tuple[str, ...], ...]


def draw(
    randomness: random.Random, preset: Preset | None = None, shape: tuple[int, int] | None = None
) -> Options:
    """Each history has its own mix. ``preset`` and ``shape`` (pp, tp) are drawn too if they are not given."""
    choice = randomness.choice
    preset = preset or choice([Preset.LITE, Preset.ONE_FAULT, Preset.STORM])
    drawn_shape = choice([(1, 1), (2, 1), (3, 1), (2, 2), (4, 1), (4, 2), (4, 2)])
    pp, tp = shape or drawn_shape
    page_size = choice([1, 2, 4, 4, 8, 8])
    max_context = choice([24, 48, 64])
    slow_forward = choice([0.001, 0.01, 0.1])
    slow_message = choice([0.0001, 0.005, 0.05])
    longest = max_context // page_size
    tiny = preset is Preset.STORM and choice([False, False, True])
    return Options(
        preset=preset,
        pp=pp,
        tp=tp,
        page_size=page_size,
        pages=longest if tiny else int(longest * choice([0.7, 1.5, 3])),
        host_pages=choice([2, 4, 8])
        if tiny
        else int(longest * choice([0, 0.7, 0.7, 1.5, 1.5, 3, 3])),
        write_policy=choice([WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH, *WritePolicy]),
        load_back_threshold=choice([0, page_size]),
        has_store=choice([False, *[True] * 5]),
        fetch_policy=choice(list(FetchPolicy)),
        fetch_threshold=choice([0, 0, page_size, 3 * page_size]),
        staged=choice([False, False, False, True]),
        staging=choice([False, False, True]),
        store_failures=choice([0.0, 0.0, 0.1]),
        query_s=choice([0.001, 0.01, 0.5]),
        chunk_size=choice([1, 4, 8, 16, 32]),
        max_running=choice([1, 2, 4, 8]),
        max_waiting=choice([2, 100]),
        max_context=max_context,
        prefix_first=choice([False, True]),
        requests=randomness.randint(4, 36),
        arrival_s=choice([0.0, 0.01, 0.1, 1.0]),
        timing=Timing(
            slow_forward / 4,
            slow_forward,
            slow_message / 10,
            slow_message,
            backup_failures=choice([0.0, 0.0, 0.3]),
            fetch_high=choice([0.001, 0.1, 2.0]),
        ),
        abort_share=choice([0.0, 0.0, 0.2, 0.6]),
        flushes=choice([0, 0, 1, 2]),
        waves=tuple(
            choice([("device",), ("device", "host"), ("device", "host")])
            for _ in range(choice([0, 2, 4, 6]))
        ),
    )


def planner_config(options: Options) -> PlannerConfig:
    return PlannerConfig(
        pp=options.pp,
        tp=options.tp,
        fingerprint=OURS.fingerprint(),
        page_size=options.page_size,
        chunk_size=options.chunk_size,
        max_context=options.max_context,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        prefix_first=options.prefix_first,
        write_policy=options.write_policy,
        load_back_threshold=options.load_back_threshold,
        has_store=options.has_store,
        fetch_policy=options.fetch_policy,
        fetch_threshold=options.fetch_threshold,
        staged=options.staged,
        residency=STAGING if options.staging else CACHE,
    )
