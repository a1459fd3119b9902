"""What `forebay simulate TRACE` runs: one replay for each route and each setting of the swept dials, and what comes of each.

trace, cluster file, --routes, --sweep ──> settings() ──> Replay ──> outcome: one JSON object a run
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from forebay.settings import FetchRoute
from forebay.sim.cluster import Cluster, ClusterError, make_cluster, read_table
from forebay.sim.measures import Measures, Row, summary_ms
from forebay.sim.replay import Job, Options, Replay
from forebay.sim.trace import TraceRequest

MAX_DIALS = 2
MAX_RUNS = 64
TIME_BINS = 60


@dataclass(frozen=True, slots=True)
class Run:
    """One setting of a study. ``turned``: dials and what they are turned to."""

    route: FetchRoute
    turned: dict[str, str]
    cluster: Cluster

    @property
    def name(self) -> str:
        return ", ".join(
            [self.route.value, *(f"{dial} {value}" for dial, value in self.turned.items())]
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """A run with what was measured, and its outcome as a JSON object."""

    run: Run
    measures: Measures
    outcome: dict[str, Any]


def parse_sweep(texts: Sequence[str]) -> dict[str, list[str]]:
    """``store.dram=64GiB,128GiB``: a dial and what to turn it to. Raises ``ClusterError``."""
    dials: dict[str, list[str]] = {}
    for text in texts:
        dial, equals, values = text.partition("=")
        wanted = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not wanted or dial in dials:
            raise ClusterError(
                f"--sweep {text!r} is not DIAL=VALUE,VALUE with a dial of its own; write store.dram=64GiB,128GiB"
            )
        dials[dial.strip()] = wanted
    if len(dials) > MAX_DIALS:
        raise ClusterError(
            f"--sweep names {len(dials)} dials; at most {MAX_DIALS} can be turned in one study"
        )
    return dials


def settings(
    cluster: str,
    routes: Sequence[FetchRoute],
    fixed: Mapping[str, str],
    sweep: Mapping[str, Sequence[str]],
) -> list[Run]:
    """All runs of a study, every cluster checked before the first one starts. Raises ``ClusterError``."""
    table = read_table(cluster)
    runs = [
        Run(
            route,
            dict(zip(sweep, values, strict=True)),
            _turned(table, cluster, fixed, dict(zip(sweep, values, strict=True))),
        )
        for values in product(*sweep.values())
        for route in routes
    ]
    if len(runs) > MAX_RUNS:
        raise ClusterError(
            f"--sweep and --routes make {len(runs)} runs; at most {MAX_RUNS} are allowed"
        )
    return runs


def _turned(
    table: Mapping[str, Any], name: str, fixed: Mapping[str, str], turned: Mapping[str, str]
) -> Cluster:
    return make_cluster(table, {**fixed, **turned}, name)


def jobs_of(trace: Sequence[TraceRequest], speed: float) -> list[Job]:
    """Arrivals ``speed`` times as fast as in the trace."""
    return [
        Job(request.at_s / speed, request.input_tokens, request.output_tokens, request.prompt)
        for request in trace
    ]


def study(
    runs: Sequence[Run],
    jobs: Sequence[Job],
    options: Options,
    progress: Callable[[Run, int], None] = lambda run, ended: None,
) -> Iterator[Finished]:
    """Run them one after another. ``progress`` hears how many requests of a run have ended."""
    for run in runs:
        began = time.perf_counter()
        replay = Replay(run.cluster, jobs, options.of(run.route))
        measures = replay.run(lambda ended, run=run: progress(run, ended))  # type: ignore[misc]
        yield Finished(run, measures, outcome(run, replay, time.perf_counter() - began))


def outcome(run: Run, replay: Replay, wall_s: float) -> dict[str, Any]:
    """A run as a JSON object; ``wall_s``: what simulating it took."""
    measures, served = replay.measures, replay.measures.served()
    snapshots = [replica.planner.snapshot() for replica in replay.replicas]
    seconds = measures.ended_at or 1.0
    return {
        "route": run.route.value,
        "dials": run.turned,
        "requests": len(measures.rows),
        "rejected": dict(Counter(row.rejected for row in measures.rows if row.rejected)),
        "virtual_s": round(measures.ended_at, 3),
        "wall_s": round(wall_s, 3),
        "ttft_ms": summary_ms([row.ttft_s for row in served]),
        "queue_ms": summary_ms([row.queue_s for row in served]),
        "inter_token_ms": summary_ms(measures.gaps_s),
        "prompt_tokens": sum(row.input_tokens for row in served),
        "hit_tokens": hit_tokens(served),
        "output_tokens": measures.output_tokens,
        "output_tokens_per_s": round(measures.output_tokens / seconds, 1),
        "plans": measures.plans,
        "retractions": sum(snapshot.retractions for snapshot in snapshots),
        "tickets": dict(sum((Counter(snapshot.tickets) for snapshot in snapshots), Counter())),
        "unused_tokens": dict(sum((Counter(snapshot.unused_tokens) for snapshot in snapshots), Counter())),
        "bytes": _bytes(replay),
        "store": {
            "stored_pages": sum(snapshot.stored_pages for snapshot in snapshots),
            "not_stored_pages": sum(snapshot.store_failures for snapshot in snapshots),
            "evicted_parts": replay.store.counters.get("evicted", 0),
            "expired_reads": replay.store.expired,
            "master": dict(replay.store.counters),
        },
        "utilisation": [
            [round(stage.busy_s / seconds, 4) for stage in replica.grid.stages] for replica in replay.replicas
        ],
        "hits_over_time": hits_over_time(served),
    }  # fmt: skip


def hit_tokens(rows: Sequence[Row]) -> dict[str, int]:
    """Prompt tokens by where they came from."""
    tiers = {tier: sum(getattr(row, tier) for row in rows) for tier in ("device", "host", "store")}
    return {**tiers, "computed": sum(row.computed for row in rows)}


def hits_over_time(rows: Sequence[Row]) -> list[dict[str, float]]:
    """`hit_tokens` by the time of arrival, in at most `TIME_BINS` bins; ``at_s`` is where a bin begins."""
    if not rows:
        return []
    width = (max(row.arrived_at for row in rows) / TIME_BINS) or 1.0
    bins: dict[int, list[Row]] = {}
    for row in rows:
        bins.setdefault(min(int(row.arrived_at / width), TIME_BINS - 1), []).append(row)
    return [{"at_s": round(index * width, 3), **hit_tokens(bins[index])} for index in sorted(bins)]


def _bytes(replay: Replay) -> dict[str, int]:
    """By link, all ranks together; of the holders what they read and wrote. A page is written to every rank's link on its own."""
    tp, writers = replay.cluster.engine.tp, replay.cluster.writers
    stages = [stage for replica in replay.replicas for stage in replica.grid.stages]
    holders = replay.store.holders
    return {
        "load_to_device": tp * sum(stage.to_device.moved for stage in stages),
        "backup_to_host": tp * sum(stage.to_host.moved for stage in stages),
        "fetch_nic": tp * sum(stage.nic_in.moved for stage in stages),
        "store_nic": writers * sum(stage.nic_out.moved for stage in stages),
        "hidden_states": sum(replica.grid.activation_bytes for replica in replay.replicas),
        "read_from_dram": replay.store.read_from["dram"],
        "read_from_ssd": replay.store.read_from["ssd"],
        "ssd_writes": sum(holder.ssd_write.moved for holder in holders),
    }
