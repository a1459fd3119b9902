"""`forebay bench endurance`: what it calls growth, a short run of the whole, and that it finds a leak in a real server."""

import os
import sys
from pathlib import Path

import pytest

from forebay.bench import endurance
from forebay.bench.endurance import MIB, EnduranceError, Usage
from forebay.cli.main import run
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.warm_cache import warm_cache


def usage(
    rss_mib: list[float],
    fds: tuple[int, int] = (5, 5),
    files: tuple[int, int] = (2, 2),
    name: str = "rank 1",
) -> Usage:
    count = len(rss_mib)
    seconds, sizes = (
        [float(second) for second in range(count)],
        [int(size * MIB) for size in rss_mib],
    )
    counts = [[first] * (count - 1) + [last] for first, last in (fds, files)]
    return Usage(name, seconds, sizes, *counts, [3] * count)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (usage([100.0] * 30), None),
        (
            usage([100.0 + sample / 2 for sample in range(10)] + [105.0] * 20),
            None,
        ),  # pools that fill once
        (usage([100.0 + sample % 7 for sample in range(60)]), None),  # up and down
        (usage([100.0] * 25 + [109.0] * 15 + [120.0] * 50), None),  # an arena more, now and then
        (usage([100.0 + sample / 2 for sample in range(30)]), "grew by"),
        (usage([100.0 + sample / 2 + sample % 7 for sample in range(60)]), "grew by"),
        (usage([100.0] * 30, fds=(5, 6)), "has 6 descriptors, 5 before"),
        (usage([100.0] * 30, files=(2, 3), name="frontend"), "has 3 files open, 2 before"),
        (usage([100.0] * 30, files=(2, 17)), "has 17 files open, 2 before"),
        (usage([100.0] * 30, files=(12, 16), name="store 1"), None),  # a log that fills its room
        (usage([100.0] * 30, files=(12, 17), name="store 1"), "has 17 files open, 12 before"),
        (usage([100.0] * 30, fds=(5, 6), name="store 1"), "has 6 descriptors, 5 before"),
    ],
)
def test_what_is_flat_and_what_is_not(seen: Usage, said: str | None) -> None:
    problems: list[str] = []
    endurance._judge("load", [seen], problems)
    assert (said is None and problems == []) or (said is not None and said in problems[0])


def test_it_starts_a_server_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "endurance", "demo", "--port", "8000"]) == 2
    assert "--port is not for this bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("exec sleep 1000", "was not ready within"),
        ("while sleep 0.01; do echo starting; done", "was not ready within"),
        ("exec true", "ended before it was ready"),
    ],
)
def test_a_server_that_does_not_come_up_is_not_waited_for_longer(
    server: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{server}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(endurance, "READY_S", 30.0 if "true" in server else 0.2)
    with endurance.Server("demo", []) as started, pytest.raises(EnduranceError, match=said):
        started.wait_ready()


# Every process of the server reads this when it starts; the one that serves HTTP then loses 1 MiB and a descriptor a second.
LEAK = """
import os, sys, threading, time
def leak(kept=[]):
    while True:
        time.sleep(1)
        kept.append((os.urandom(1 << 20), open(os.devnull)))
if sys.orig_argv[2:4] == ["-m", "forebay.cli"] or sys.orig_argv[1:3] == ["-m", "forebay.cli"]:
    threading.Thread(target=leak, daemon=True).start()
"""


@pytest.mark.slow
def test_a_leak_in_a_real_server_is_called_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LEAK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(warm_cache(tmp_path / "cache")))
    model = write_random_weights(write_text_model(tmp_path / "model"))
    options = [
        "--page-size",
        "16",
        "--threads-per-rank",
        "1",
        "--device-memory",
        "400KiB",
        "--host-memory",
        "800KiB",
    ]
    result = endurance.run(
        str(model), options, load_minutes=0.3, idle_minutes=0.3, seed=0, say=lambda _: None
    )
    found = [problem for problem in result["problems"] if problem.startswith("idle: frontend")]
    assert not result["flat"]
    assert "grew by" in found[0] and "descriptors" in found[1], result["problems"]


@pytest.mark.slow
def test_a_short_run_meets_every_kind_of_request_and_gives_all_pages_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(warm_cache(tmp_path / "cache")))
    model = write_random_weights(write_text_model(tmp_path / "model"))
    options = [
        "--pp",
        "2",
        "--page-size",
        "16",
        "--threads-per-rank",
        "1",
        "--device-memory",
        "400KiB",
        "--host-memory",
        "800KiB",
    ]
    result = endurance.run(
        str(model), options, load_minutes=0.5, idle_minutes=0.1, seed=0, say=lambda _: None
    )
    assert {"stream", "hang up", "whole", "choices", "wrong"} <= set(
        result["phases"][0]["requests"]
    )
    unexpected = [
        problem
        for problem in result["problems"]
        if "grew by" not in problem and "before" not in problem
    ]
    assert unexpected == [], "half a minute fills no pool, so growth says nothing here"
