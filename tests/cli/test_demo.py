"""`make demo`, killed in the middle: its servers end with it, and the next user of scratch directories removes what it left."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from forebay.bench.scratch import scratch_directory
from forebay.cache import cache_directory
from tests.pace import paced

DEADLINE_S = paced(120.0)
DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_demo_that_is_cut_off_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    (tmp_path / "models").symlink_to(cache_directory() / "models")  # converted once
    environment = os.environ | {"FOREBAY_CACHE_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-u", str(DEMO)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )
    assert process.stdout is not None
    timer = threading.Timer(DEADLINE_S, process.kill)
    timer.start()
    lines = iter(process.stdout.readline, "")
    assert any("> How much water" in line for line in lines), "the second question"
    timer.cancel()
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 5, "a server, its planner, two ranks and a store"
    process.send_signal(number)
    process.stdout.close()
    process.wait(DEADLINE_S)
    _, alive = psutil.wait_procs(children, timeout=paced(20))
    assert not alive
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path))
    with scratch_directory("test"):
        assert not list((tmp_path / "scratch").glob("demo-*"))
