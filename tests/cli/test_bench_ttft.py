"""`forebay bench ttft` as a process, over real servers with a tiny random model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.pace import paced
from tests.unhurried import unhurried
from tests.warm_cache import warm_cache

DEADLINE_S = paced(120.0)
LOAD = [
    "--input-len",
    "448",
    "--requests",
    "4",
    "--repeat",
    "2",
    "--dtype",
    "float32",
    "--threads-per-rank",
    "1",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(write_text_model(tmp_path_factory.mktemp("model")))


def start(model: Path, cache: Path, *more: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        "forebay.cli",
        "bench",
        "ttft",
        str(model),
        *LOAD,
        "--store",
        "embedded",
        *more,
    ]
    own = {"FOREBAY_CACHE_DIR": str(warm_cache(cache))}
    environment = os.environ | unhurried() | own
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def test_both_routes_are_measured_judged_and_reported(model: Path, tmp_path: Path) -> None:
    output, report = tmp_path / "result.json", tmp_path / "report.html"
    more = ("--groups", "mixed", "--json", "--output", str(output), "--html", str(report))
    process = start(model, tmp_path / "cache", *more)
    out, err = process.communicate(timeout=DEADLINE_S)
    result = json.loads(out)
    assert (process.returncode, result["valid"], result["problems"]) == (0, True, []), err
    assert json.loads(output.read_text()) == result
    found = {(entry["group"], entry["kind"], entry["route"]): entry for entry in result["groups"]}
    assert set(found) == {
        ("mixed", kind, route) for kind in ("hit", "miss", "all") for route in ("ticket", "staged")
    }
    for entry in found.values():
        assert entry["n"] == (4 if entry["kind"] == "all" else 2)
        assert entry["storage_hits"] == (0 if entry["kind"] == "miss" else 2)
        assert 0 < entry["ttft_ms"]["p50"] <= entry["ttft_ms"]["p99"]
    assert {entry["kind"] for entry in result["change"]} == {"hit", "miss", "all"}
    assert all(
        entry["mean_ci"][0] <= entry["mean_pct"] <= entry["mean_ci"][1]
        for entry in result["change"]
    )
    assert {entry["route"] for entry in result["timeline"]} == {"ticket", "staged"}
    for entry in result["timeline"]:
        assert {"fetch", "forward"} <= {span["kind"] for span in entry["spans"]}
    assert report.read_text().startswith("<!doctype html>")
    assert not list((tmp_path / "cache" / "scratch").glob("ttft-*"))
    again = start(model, tmp_path / "cache", *more, "--resume")
    out, err = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0, err
    assert json.loads(out) == result, "all rounds were done: nothing is measured again"
    other = start(model, tmp_path / "cache", *more, "--resume", "--concurrency", "3")
    assert "measured with concurrency = 2, not 3" in other.communicate(timeout=DEADLINE_S)[1]
    assert other.returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_cut_off_leaves_nothing_running_and_what_is_done_is_kept(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    output = tmp_path / "result.json"
    more = ("--output", str(output), "--groups", "mixed", "--repeat", "50", "--requests", "100")
    process = start(model, tmp_path / "cache", *more)
    deadline = time.monotonic() + DEADLINE_S
    while not output.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 8, "two servers with planner, two ranks and a store each"
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == (130 if number is signal.SIGINT else -signal.SIGKILL)
    assert process.stderr is not None and "Traceback" not in process.stderr.read()
    _, alive = psutil.wait_procs(children, timeout=paced(20))
    assert not alive
    rounds = json.loads(output.read_text())["rounds_done"]
    assert 1 <= rounds < 50
    left = list((tmp_path / "cache" / "scratch").glob("ttft-*"))
    assert not left or number is signal.SIGKILL
    start(model, tmp_path / "cache", "--groups", "miss", "--requests", "2").communicate(
        timeout=DEADLINE_S
    )
    assert not list((tmp_path / "cache" / "scratch").glob("ttft-*")), "the next start sweeps"


@pytest.mark.slow
def test_an_open_load_is_a_share_of_the_measured_capacity(model: Path, tmp_path: Path) -> None:
    process = start(
        model,
        tmp_path / "cache",
        "--groups",
        "hit",
        "--utilisation",
        "0.5",
        "--json",
        "--routes",
        "ticket:staging,off",
    )
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["rates_per_s"]["hit"] > 0
    assert {entry["storage_hits"] for entry in result["groups"] if entry["route"] == "off"} == {0}
    assert {
        entry["storage_hits"] for entry in result["groups"] if entry["route"] == "ticket:staging"
    } == {4}
