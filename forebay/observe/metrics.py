"""Prometheus metrics of one server. Times and tokens come from the Outputs as they pass the frontend, the rest from the
planner's Snapshots, and from what was measured beside them, when somebody asks.

Label values that are known beforehand are there from the start, at 0, so that rates over them have a beginning.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from forebay.core.ledger import REASONS
from forebay.core.messages import PLAN_SECONDS_BOUNDS, Output, Snapshot, TierUse
from forebay.observe.figures import (
    SECONDS_BOUNDS,
    STORE_OPS,
    TICKET_PHASES,
    TRANSFER_KINDS,
    Report,
    Timing,
)

_TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# stop, length: the text is whole, or was cut at max_tokens; abort: the client left; invalid, too_long, full: refused, before or by
# the engine; error: the engine's fault.
REQUEST_OUTCOMES = ("stop", "length", "abort", "invalid", "too_long", "full", "error")
_TIERS = ("device", "host", "store")
_PAGE_STATES = ("free", "cached", "private", "held")
_TICKET_OUTCOMES = (
    "issued",
    "joined",
    "miss",
    "query_late",
    "slower_than_compute",
    "no_host_pages",
    "complete",
    "short",
    "timeout",
    "best_effort",
    "aborted",
)
_THROTTLE_STATES = ("delegated", "already_resident", "failed")
_PROMOTIONS = {
    "promoted_hit": ("hit", "done"),
    "promoted_prefetch": ("prefetch", "done"),
    "promotion_failed_hit": ("hit", "failed"),
    "promotion_failed_prefetch": ("prefetch", "failed"),
    "promotion_gated": ("hit", "no_room"),
    "promotion_over_quota": ("hit", "over_quota"),
}


class Metrics:
    """The frontend's `Observer` (`frontend.engine`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._ttft = Histogram(
            "forebay_ttft_seconds",
            "From submission to the first token",
            buckets=_TTFT_BOUNDS,
            registry=self._registry,
        )
        self._inter_token = Histogram(
            "forebay_inter_token_seconds",
            "Between tokens of a sequence",
            buckets=_INTER_TOKEN_BOUNDS,
            registry=self._registry,
        )
        self._queue = Histogram(
            "forebay_queue_seconds",
            "From arrival to first admission",
            buckets=_TTFT_BOUNDS,
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "forebay_prompt_tokens",
            "Prompt tokens of admitted requests, once for all choices",
            registry=self._registry,
        )
        cached = Counter(
            "forebay_cached_tokens",
            "Prompt tokens found cached",
            ("tier",),
            registry=self._registry,
        )
        requests = Counter(
            "forebay_requests",
            "API requests by how they ended, one for all of their choices",
            ("outcome",),
            registry=self._registry,
        )
        self._requests = {outcome: requests.labels(outcome) for outcome in REQUEST_OUTCOMES}
        self._generated = Counter(
            "forebay_generated_tokens",
            "Tokens that the engine generated for sequences",
            registry=self._registry,
        )
        self._cached = tuple(cached.labels(tier) for tier in _TIERS)
        self._of_planner = _SnapshotCollector()
        self._registry.register(self._of_planner)

    def on_snapshot(self, snapshot: Snapshot, report: Report) -> None:
        self._of_planner.snapshot, self._of_planner.report = snapshot, report

    def on_output(
        self, submitted_at: float, last_token_at: float | None, prompt_tokens: int, output: Output
    ) -> None:
        """Count one Output of a sequence: times on the clock given at construction. ``prompt_tokens`` is 0 for further choices of a
        prompt that is counted already."""
        if output.usage is not None:
            self._queue.observe(output.usage.queue_s)
        if output.usage is not None and prompt_tokens:
            usage = output.usage
            self._prompt_tokens.inc(prompt_tokens)
            for counter, tokens in zip(
                self._cached,
                (usage.cached_device, usage.cached_host, usage.cached_store),
                strict=True,
            ):
                counter.inc(tokens)
        if not output.tokens:
            return
        self._generated.inc(len(output.tokens))
        now = self._clock()
        if last_token_at is None:
            self._ttft.observe(now - submitted_at)
        else:
            for _ in output.tokens:
                self._inter_token.observe((now - last_token_at) / len(output.tokens))

    def on_request(self, outcome: str) -> None:
        """Count one API request that has ended; ``outcome`` is one of `REQUEST_OUTCOMES`."""
        self._requests[outcome].inc()

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _SnapshotCollector(Collector):
    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.report = Report()

    def collect(self) -> Iterator[Metric]:
        snapshot = self.snapshot
        if snapshot is None:
            return
        yield _gauge(
            "forebay_running_requests", "Sequences that hold device pages", snapshot.running
        )
        yield _gauge("forebay_waiting_requests", "Sequences in the waiting queue", snapshot.waiting)
        yield _counter(
            "forebay_worker_restarts",
            "Grids started anew after the loss of a rank",
            snapshot.worker_restarts,
        )
        yield _counter(
            "forebay_stored_pages",
            "Pages that every rank has put into the store",
            snapshot.stored_pages,
        )
        yield _counter(
            "forebay_tainted_requests",
            "Ended because their numbers came to NaN or infinity",
            snapshot.tainted_requests,
        )
        yield _counter(
            "forebay_store_failures", "Pages that could not be stored", snapshot.store_failures
        )
        if snapshot.store.state != "none":
            is_up = float(snapshot.store.state == "closed")
            yield _gauge(
                "forebay_store_up",
                "1 while planner and all ranks ask the store, 0 while one of them does not",
                is_up,
            )
            yield _counter(
                "forebay_store_openings",
                "Times that the store was given up for a while",
                snapshot.store.openings,
            )
            yield _counter(
                "forebay_store_refused_calls",
                "Calls answered without the store meanwhile",
                snapshot.store.refused,
            )
        yield _counters(
            "forebay_ticket", "Tickets and queries", "outcome", _TICKET_OUTCOMES, snapshot.tickets
        )
        yield _counters(
            "forebay_fetch_unused_tokens",
            "Wanted and not fetched, or fetched and not used",
            "reason",
            REASONS,
            snapshot.unused_tokens,
        )
        yield _pages({"device": snapshot.device, "host": snapshot.host})
        yield _plan_seconds(snapshot)
        yield _gauge(
            "forebay_identity_seconds",
            "The model's content hashes, made beside loading or remembered",
            self.report.identity_s,
        )
        yield from _measured(self.report)


def _gauge(name: str, text: str, value: float) -> Metric:
    gauge = GaugeMetricFamily(name, text)
    gauge.add_metric([], value)
    return gauge


def _counter(name: str, text: str, value: float) -> Metric:
    counter = CounterMetricFamily(name, text)
    counter.add_metric([], value)
    return counter


def _counters(
    name: str, text: str, label: str, known: Iterable[str], values: Mapping[str, int]
) -> Metric:
    """``known``: label values that are there even if nothing was counted yet."""
    return _labelled(
        name,
        text,
        (label,),
        {**{(key,): 0 for key in known}, **{(key,): count for key, count in values.items()}},
    )


def _labelled(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]
) -> Metric:
    counter = CounterMetricFamily(name, text, labels=labels)
    for key in sorted(values):
        counter.add_metric(list(key), values[key])
    return counter


def _measured(report: Report) -> Iterator[Metric]:
    figures, store = report.figures, report.store
    yield _counters(
        "forebay_transfer_bytes",
        "Bytes moved between tiers, all ranks",
        "kind",
        TRANSFER_KINDS,
        figures.transfer_bytes,
    )
    yield _timings(
        "forebay_transfer_seconds",
        "One transfer of one rank",
        "kind",
        TRANSFER_KINDS,
        figures.transfer_seconds,
    )
    yield _timings(
        "forebay_ticket_seconds",
        "Until the store has answered (query); until every rank has its pages (fetch)",
        "phase",
        TICKET_PHASES,
        figures.ticket_seconds,
    )
    operations: dict[tuple[str, ...], int] = {(op, "ok"): 0 for op in STORE_OPS}
    operations |= {tuple(key.split("/")): count for key, count in figures.store_ops.items()}
    yield _labelled(
        "forebay_store_ops",
        "Keys asked of the store: queries, gets and puts",
        ("op", "outcome"),
        operations,
    )
    promotions: dict[tuple[str, ...], int] = {
        labels: store.counters.get(name, 0) for name, labels in _PROMOTIONS.items()
    }
    yield _labelled(
        "forebay_promotion",
        "SSD to DRAM copies inside the store",
        ("trigger", "outcome"),
        promotions,
    )
    yield _counters(
        "forebay_throttle",
        "Keys by what a prefetch of them came to",
        "state",
        _THROTTLE_STATES,
        store.throttle,
    )


def _timings(
    name: str, text: str, label: str, known: Iterable[str], timings: Mapping[str, Timing]
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=(label,))
    for key in sorted({*known, *timings}):
        timing = timings.get(key) or Timing()
        family.add_metric(
            [key], _cumulative(SECONDS_BOUNDS, timing.buckets), sum_value=timing.total_s
        )
    return family


def _cumulative(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


def _pages(tiers: Mapping[str, TierUse]) -> Metric:
    pages = GaugeMetricFamily(
        "forebay_pages", "Pages of each rank, by tier and state", labels=("tier", "state")
    )
    for tier, use in tiers.items():
        for state in _PAGE_STATES:
            pages.add_metric([tier, state], getattr(use, state))
    return pages


def _plan_seconds(snapshot: Snapshot) -> Metric:
    histogram = HistogramMetricFamily(
        "forebay_plan_seconds", "From sending a plan to its retirement"
    )
    counts = snapshot.plan_s_buckets or (0,) * (len(PLAN_SECONDS_BOUNDS) + 1)
    histogram.add_metric(
        [], _cumulative(PLAN_SECONDS_BOUNDS, counts), sum_value=snapshot.plan_s_sum
    )
    return histogram
