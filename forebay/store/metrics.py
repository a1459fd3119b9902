"""Prometheus metrics of masters, holders and clients: what they count anyway, read when somebody asks.

`forebay store up|master|holder --metrics-port N`  ->  http://127.0.0.1:N/metrics
registry.register(ClientCollector(client))         ->  a client's, in its own program's registry
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.store.address import Address
from forebay.store.client.store import StoreClient
from forebay.store.holder.node import Holder
from forebay.store.master import reads
from forebay.store.master.server import MasterServer
from forebay.store.throttle import State

_OPS = {  # counter of the master -> op, outcome
    "put": ("put", "ok"),
    "puts_refused": ("put", "refused"),
    "puts_revoked": ("put", "revoked"),
    "puts_waited": ("put", "waited"),
    "get_found": ("get", "ok"),
    "get_missed": ("get", "not_found"),
    "removed": ("remove", "ok"),
    "evicted": ("evict", "ok"),
    "evicted_unlogged": (
        "evict",
        "unlogged",
    ),  # of those: before they had reached a log, since the disk did not work
}
_PROMOTIONS = {  # counter of the master -> trigger, outcome
    "promoted_hit": ("hit", "done"),
    "promoted_prefetch": ("prefetch", "done"),
    "promotion_failed_hit": ("hit", "failed"),
    "promotion_failed_prefetch": ("prefetch", "failed"),
    "promotion_gated": ("hit", "no_room"),
    "promotion_over_quota": ("hit", "over_quota"),
}
Labelled = dict[tuple[str, ...], int]
_GAUGES = (
    "objects",
    "memory_bytes",
    "memory_used",
    "ssd_bytes",
    "ssd_used",
    "holders",
    "holders_usable",
    "waiting_puts",
)
_CLIENT_STATES = {
    "sent": "delegated",
    "resident": "already_resident",
    "missing": "failed",
    "declined": "failed",
    "failed": "failed",
}


class MasterCollector(Collector):
    def __init__(self, server: MasterServer) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        stats = reads.stats(self._server.machine.state, 0)
        yield _counter(
            "store_ops",
            "Keys by operation and what became of them",
            ("op", "outcome"),
            _named(_OPS, stats.counters),
        )
        yield _counter(
            "promotion",
            "Promotions from SSD to DRAM",
            ("trigger", "outcome"),
            _named(_PROMOTIONS, stats.counters),
        )
        kinds: Labelled = {
            ("put",): stats.counters.get("put_bytes", 0),
            ("promotion",): stats.counters.get("promoted_bytes", 0),
        }
        kinds[("evict",)] = stats.counters.get("evicted_bytes", 0)
        kinds |= {
            (f"get_{tier}",): stats.counters.get(f"got_{tier}_bytes", 0)
            for tier in ("memory", "ssd")
        }
        yield _counter(
            "store_bytes", "Bytes of objects by what was done with them", ("kind",), kinds
        )
        for name in ("lost", "suspected"):
            yield _counter(
                f"store_holder_{name}",
                f"Holders that were {name}",
                (),
                {(): stats.counters.get(f"holder_{name}", 0)},
            )
        for name in _GAUGES:
            yield GaugeMetricFamily(
                f"forebay_store_{name}",
                f"{name} of all holders together",
                value=getattr(stats, name),
            )
        yield GaugeMetricFamily(
            "forebay_store_promotions_in_flight",
            "Promotions under way",
            value=stats.promotions_in_flight,
        )
        tenants = GaugeMetricFamily(
            "forebay_store_tenant_memory_bytes", "DRAM by tenant", labels=("tenant",)
        )
        for tenant, count in stats.tenants.items():
            tenants.add_metric((tenant,), count)
        yield tenants


class HolderCollector(Collector):
    """``holders``: of one process, one for each master; their figures are added up."""

    def __init__(self, holders: Iterable[Holder]) -> None:
        self._holders = list(holders)

    def collect(self) -> Iterable[Metric]:
        holders, now = self._holders, time.monotonic()
        moved: Labelled = {
            ("write",): sum(holder.data.bytes_in for holder in holders),
            ("read",): sum(holder.data.bytes_out for holder in holders),
        }
        yield _counter(
            "transfer_bytes",
            "Bytes written and read through it (not its mapped memory)",
            ("kind",),
            moved,
        )
        throttles = [holder.promoter.throttle for holder in holders if holder.promoter is not None]
        entered: Labelled = {
            (state.name.lower(),): sum(throttle.entered()[state] for throttle in throttles)
            for state in State
        }
        yield _counter(
            "throttle", "Keys by the state that their prefetch came to", ("state",), entered
        )
        cooling = sum(throttle.cooling(now) for throttle in throttles)
        yield GaugeMetricFamily(
            "forebay_holder_prefetch_cooling", "Whether prefetch yields to eviction", value=cooling
        )
        yield GaugeMetricFamily(
            "forebay_holder_serving",
            "Masters that it serves for",
            value=sum(holder.serving for holder in holders),
        )
        logs = [holder.log for holder in holders if holder.log is not None]
        yield GaugeMetricFamily(
            "forebay_holder_ssd_used_bytes",
            "Bytes of log files",
            value=sum(log.used_bytes for log in logs),
        )
        yield GaugeMetricFamily(
            "forebay_holder_ssd_ok",
            "Logs that can be written",
            value=sum(holder.ssd_ok for holder in holders),
        )
        yield GaugeMetricFamily(
            "forebay_holder_ssd_cut_bytes",
            "Damage at the start",
            value=sum(log.cut_bytes for log in logs),
        )
        yield GaugeMetricFamily(
            "forebay_holder_memory_objects",
            "Objects in DRAM",
            value=sum(len(holder.memory) for holder in holders),
        )


class ClientCollector(Collector):
    def __init__(self, client: StoreClient) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        counters = self._client.prefetched
        states: Labelled = {}
        for name, state in _CLIENT_STATES.items():
            states[(state,)] = states.get((state,), 0) + getattr(counters, name)
        yield _counter(
            "throttle", "Keys by the state that their prefetch came to", ("state",), states
        )


SILENT_S = 5.0  # whoever asks for nothing is given no thread for longer


class Endpoint:
    """``/metrics`` of one process on a thread of its own, until ``close``. Raises ``OSError`` if the port is not to be had."""

    def __init__(
        self, address: Address, master: MasterServer | None, holders: Sequence[Holder]
    ) -> None:
        registry = CollectorRegistry()
        if master is not None:
            registry.register(MasterCollector(master))
        if holders:
            registry.register(HolderCollector(holders))
        self._server: WSGIServer
        self._server, self._thread = start_http_server(address.port, address.host, registry)
        handler: Any = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type(handler.__name__, (handler,), {"timeout": SILENT_S})
        self.port = int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _named(
    names: Mapping[str, tuple[str, str]], counters: Mapping[str, int]
) -> dict[tuple[str, ...], int]:
    return {labels: counters.get(name, 0) for name, labels in names.items()}


def _counter(
    name: str, help: str, labels: tuple[str, ...], values: Labelled
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"forebay_{name}", help, labels=labels)
    for chosen, value in values.items():
        family.add_metric(chosen, value)
    return family
