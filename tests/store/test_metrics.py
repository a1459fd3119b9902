"""Prometheus metrics: they are off unless asked for, parse, and count what was done."""

import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forebay.store import Status, StoreClient, metrics
from forebay.store.metrics import ClientCollector
from tests.pace import paced
from tests.store.store_cluster import LOCALHOST, wait_for
from tests.store.store_process import farm
from tests.store.test_cli_store import run


def samples(url: str) -> dict[tuple[str, tuple[str, ...]], float]:
    with urllib.request.urlopen(url, timeout=paced(10)) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_master_holder_and_client_tell_what_they_did(tmp_path: Path) -> None:
    with farm(tmp_path) as nodes:
        master = nodes.master("--metrics-port", "0")
        holder = nodes.holder(master, "h", "16MiB", "--metrics-port", "0")
        quiet = nodes.holder(master, "quiet", "1MiB")
        assert "metrics" not in quiet.said
        quiet.end()
        with StoreClient.connect(master.url, allow_local=False, tenant="team") as client:
            wait_for(lambda: client.put(b"k", bytes(1000)) in (Status.OK, Status.EXISTS))
            assert client.get(b"k") == bytes(1000) and client.get(b"none") is None
            assert client.remove([b"k"]) == [Status.OK]
            client.prefetch([b"none"])
            wait_for(lambda: client.prefetched.missing)
            registry = CollectorRegistry()
            registry.register(ClientCollector(client))
            assert b'forebay_throttle_total{state="failed"} 1.0' in generate_latest(registry)
        told = samples(str(master.said["metrics"]))
        for op, outcome, least in (
            ("put", "ok", 1),
            ("get", "ok", 1),
            ("get", "not_found", 1),
            ("remove", "ok", 1),
        ):
            assert told["forebay_store_ops_total", (op, outcome)] >= least, (op, outcome)
        assert (
            told["forebay_promotion_total", ("done", "prefetch")] == 0
            and told["forebay_store_bytes_total", ("put",)] >= 1000
        )
        assert (
            told["forebay_store_bytes_total", ("get_memory",)]
            + told["forebay_store_bytes_total", ("get_ssd",)]
            >= 1000
        )
        assert ("forebay_store_tenant_memory_bytes", ("team",)) in told and told[
            "forebay_store_holders_usable", ()
        ] == 1
        told = samples(str(holder.said["metrics"]))
        assert (
            told["forebay_transfer_bytes_total", ("write",)]
            >= 1000
            <= told["forebay_transfer_bytes_total", ("read",)]
        )
        assert told["forebay_holder_serving", ()] == 1 and told["forebay_holder_ssd_ok", ()] == 1
        port = str(holder.said["metrics"]).split(":")[2].split("/")[0]
        done = run("master", "--listen", "127.0.0.1:0", "--metrics-port", port)
        assert done.exit_code == 2 and "in use" in done.output, done.output


def test_whoever_asks_for_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SILENT_S", 0.2)
    endpoint = metrics.Endpoint(LOCALHOST, None, [])
    try:
        for said in (b"", b"GET /metr"):
            with socket.create_connection(("127.0.0.1", endpoint.port), 10) as silent:
                silent.sendall(said)
                while silent.recv(4096):
                    pass
    finally:
        endpoint.close()
