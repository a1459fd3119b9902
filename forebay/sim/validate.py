"""How far the simulator can be believed: measurements beside what it says for the same load (docs/VALIDATION.md).

published    a measurement on 16 GPUs, both routes; the model is fitted on the staged column and on "no hits", the rest is predicted
bench        a document of `forebay bench ttft`, on this machine or another, and a cluster file that describes it
loops        how late copies are acknowledged (`sim.reference_loop`)
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from forebay.pages.hashing import hash_chain, root_hash
from forebay.settings import FetchRoute, HostMode
from forebay.sim.cluster import Cluster, ClusterError, StagedLook, make_cluster, read_table
from forebay.sim.measures import Measures, summary_ms
from forebay.sim.reference_loop import ReferenceLoop, forebay_lag
from forebay.sim.replay import Job, Options, Replay
from forebay.sim.trace import BLOCK_TOKENS, TraceRequest

SEEDS = (0, 1, 2)
CLIENT_S = (
    0.005,
    0.01,
    0.02,
    0.04,
)  # tried for what a client takes from one answer to its next request


@dataclass(frozen=True, slots=True)
class Load:
    """Fresh prompts of ``input_tokens``, ``concurrency`` in flight. ``hits``: which of them the store has."""

    group: str
    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int

    def is_hit(self, index: int) -> bool:
        return self.group == "hit" or (self.group == "mixed" and index % 2 == 0)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of rows that a table of this load has."""
        return ("hit", "miss", "all") if self.group == "mixed" else ("all",)


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure beside its twin. ``use``: "fitted" on it, or "predicted"."""

    group: str
    kind: str
    route: str
    statistic: str
    measured_ms: float
    simulated_ms: float
    use: str

    @property
    def error_pct(self) -> float:
        return 100 * (self.simulated_ms / self.measured_ms - 1)


# TTFT in ms, mean and median. 16 H20 GPUs (2 nodes x 8), tp 4, pp 4, fp8 KV, prompts of 16,384 tokens, 1 token out, 128 requests a
# group, 4 in flight, page 256, chunk 16,384, at most 16 running, policy wait, write-through, a DRAM-only store of two 200 GB holders
# over RDMA; staging host mode at 1.1 times the device pages; hits 0 of 128 and 64 of 128.
PUBLISHED: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("miss", "all"): {"staged": (2596.0, 2610.8), "ticket": (1987.9, 1892.4)},
    ("mixed", "hit"): {"staged": (2749.2, 2966.3), "ticket": (1879.3, 1879.9)},
    ("mixed", "miss"): {"staged": (2502.4, 2854.3), "ticket": (1885.9, 1880.2)},
    ("mixed", "all"): {"staged": (2625.8, 2858.7), "ticket": (1882.6, 1880.1)},
}
PUBLISHED_CLUSTER = "h20-pp4tp4"
PUBLISHED_DIALS = {
    "engine.chunk_size": "16384", "engine.max_running": "16", "engine.host_mode": "staging", "engine.hits_ahead": "false",
}  # fmt: skip
PUBLISHED_LOADS = [Load(group, 16_384, 1, 128, 4) for group in ("miss", "mixed")]
STATISTICS = ("mean", "p50")


def run_load(cluster: Cluster, load: Load, route: FetchRoute, seed: int) -> Measures:
    """The load on the cluster, with the hits' pages in the store and nothing above it."""
    config = cluster.planner_config()
    root = root_hash(config.fingerprint, config.kv_dtype, config.page_size)
    blocks = -(-load.input_tokens // BLOCK_TOKENS)
    jobs, stored = [], []
    for index in range(load.requests):
        ids = tuple(range(index * blocks, (index + 1) * blocks))
        prompt = TraceRequest(0.0, load.input_tokens, load.output_tokens, ids).prompt
        kind = "hit" if load.is_hit(index) else "miss"
        if kind == "hit":
            stored += hash_chain(root, prompt(), config.page_size)
        jobs.append(Job(0.0, load.input_tokens, load.output_tokens, prompt, kind))
    return Replay(
        cluster, jobs, Options(route=route, concurrency=load.concurrency, stored=stored, seed=seed)
    ).run()


def figures(
    cluster: Cluster, load: Load, route: FetchRoute, seeds: Sequence[int] = SEEDS
) -> dict[str, dict[str, float]]:
    """Mean and median TTFT in ms by kind, each the mean over seeds."""
    runs = [run_load(cluster, load, route, seed) for seed in seeds]
    found = {}
    for kind in load.kinds:
        each = [
            summary_ms([row.ttft_s for row in run.served(None if kind == "all" else kind)])
            for run in runs
        ]
        found[kind] = {name: statistics.fmean(one[name] for one in each) for name in STATISTICS}
    return found


# ---------------------------------------------------------------------------------------------- the published measurement


def validate_published() -> dict[str, Any]:
    """Fit, predict, and every cell with its error."""
    fitted, tried = _fit()
    cluster = _published_cluster(fitted)
    cells = []
    for load, route in product(PUBLISHED_LOADS, (FetchRoute.STAGED, FetchRoute.TICKET)):
        for kind, simulated in figures(cluster, load, route).items():
            measured = PUBLISHED[load.group, kind][route.value]
            use = "fitted" if route is FetchRoute.STAGED or load.group == "miss" else "predicted"
            for name, value in zip(STATISTICS, measured, strict=True):
                cells.append(Cell(load.group, kind, route.value, name, value, simulated[name], use))
    return {
        "cluster": PUBLISHED_CLUSTER,
        "fitted": fitted,
        "tried": tried,
        "cells": [_as_row(cell) for cell in cells],
    }


def _fit() -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The linear term on "no hits" by ticket; when stages look, and what a client takes, on the staged column."""
    tried: list[dict[str, Any]] = []
    for client_s in CLIENT_S:
        linear_s = _fit_linear(client_s)
        for look in StagedLook:
            dials = {
                "forward.linear_s": f"{linear_s:.4g}",
                "network.frontend_s": f"{client_s:g}",
                "engine.staged_look": look.value,
            }
            tried.append(
                {**dials, "staged_rms_pct": round(_staged_error(_published_cluster(dials)), 2)}
            )
    best = min(tried, key=lambda entry: float(entry["staged_rms_pct"]))
    return {name: str(value) for name, value in best.items() if name != "staged_rms_pct"}, tried


def _fit_linear(client_s: float) -> float:
    """Such that mean and median of "no hits" by ticket are off by as much in opposite directions. TTFT is nearly linear in it, so two
    steps of regula falsi are enough."""
    target = statistics.fmean(PUBLISHED["miss", "all"]["ticket"])

    def simulated(linear_s: float) -> float:
        dials = {"forward.linear_s": f"{linear_s:.6g}", "network.frontend_s": f"{client_s:g}"}
        found = figures(
            _published_cluster(dials), PUBLISHED_LOADS[0], FetchRoute.TICKET, SEEDS[:1]
        )["all"]
        return statistics.fmean(found[name] for name in STATISTICS)

    low, high = 90e-6, 130e-6
    at_low, at_high = simulated(low), simulated(high)
    for _ in range(2):
        middle = low + (target - at_low) * (high - low) / (at_high - at_low)
        at_middle = simulated(middle)
        if at_middle < target:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    return low + (target - at_low) * (high - low) / (at_high - at_low)


def _staged_error(cluster: Cluster) -> float:
    """Root mean square over the staged column, in percent."""
    errors: list[float] = []
    for load in PUBLISHED_LOADS:
        for kind, simulated in figures(cluster, load, FetchRoute.STAGED, SEEDS[:1]).items():
            measured = PUBLISHED[load.group, kind]["staged"]
            errors += [
                100 * (simulated[name] / value - 1)
                for name, value in zip(STATISTICS, measured, strict=True)
            ]
    return math.sqrt(statistics.fmean(error * error for error in errors))


def _published_cluster(dials: Mapping[str, str]) -> Cluster:
    return make_cluster(
        read_table(PUBLISHED_CLUSTER), {**PUBLISHED_DIALS, **dials}, PUBLISHED_CLUSTER
    )


def _as_row(cell: Cell) -> dict[str, Any]:
    return {
        **asdict(cell),
        "simulated_ms": round(cell.simulated_ms, 1),
        "error_pct": round(cell.error_pct, 1),
    }


# ---------------------------------------------------------------------------------------------- bench ttft

# What `bench ttft` says of its set-up, and the dial that it is.
BENCH_DIALS = {
    "pp": "engine.pp", "tp": "engine.tp", "page_size": "engine.page_size", "chunk_size": "engine.chunk_size",
    "max_running": "engine.max_running", "fetch_policy": "engine.fetch_policy", "fetch_threshold": "engine.fetch_threshold",
    "device_memory": "engine.device_memory", "host_memory": "engine.host_memory",
}  # fmt: skip


def validate_bench(document: Mapping[str, Any], cluster: str) -> list[dict[str, Any]]:
    """Cells for every group, kind and route of a `bench ttft` document. Raises ``ClusterError`` for what is none."""
    table = read_table(cluster)
    try:
        about, groups = document["config"], document["groups"]
        if about.get("rate") is not None or about.get("utilisation") is not None:
            raise ClusterError(
                "this bench ttft document has an open load; only those with --concurrency can be compared"
            )
        dials = {
            dial: str(about[name])
            for name, dial in BENCH_DIALS.items()
            if about.get(name) is not None
        }
        rounds = int(about.get("rounds", 1))
        cells = []
        for route in about["routes"]:
            name, _, mode = route.partition(":")
            host_mode = mode or about.get("host_mode") or HostMode.CACHE.value
            twin = make_cluster(table, {**dials, "engine.host_mode": str(host_mode)}, cluster)
            for group in about["groups"]:
                load = Load(
                    group,
                    about["input_len"],
                    about["output_len"],
                    about["requests"] // rounds,
                    about["concurrency"],
                )
                simulated = figures(twin, load, FetchRoute(name))
                cells += [
                    cell for entry in groups for cell in _bench_cells(entry, route, load, simulated)
                ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(
            f"this is no document of `forebay bench ttft --json` ({type(error).__name__}: {error})"
        ) from error
    return [_as_row(cell) for cell in cells]


def _bench_cells(
    entry: Mapping[str, Any], route: str, load: Load, simulated: Mapping[str, Mapping[str, float]]
) -> list[Cell]:
    """In a group of one kind, that kind's row says what the row of all says."""
    kind = entry["kind"]
    if entry["route"] != route or entry["group"] != load.group or kind not in load.kinds:
        return []
    return [
        Cell(
            load.group,
            kind,
            route,
            name,
            float(entry["ttft_ms"][name]),
            simulated[kind][name],
            "predicted",
        )
        for name in STATISTICS
    ]


# ---------------------------------------------------------------------------------------------- loops


def validate_loops() -> dict[str, Any]:
    """Iterations until a copy counts as done."""
    return {"usual": asdict(ReferenceLoop().run()), "forebay": asdict(forebay_lag())}
