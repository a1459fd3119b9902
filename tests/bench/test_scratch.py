"""Directories for one run: gone at its end, and gone at the next start if the run was killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.bench.scratch import scratch_directory

HOLDER = """
from forebay.bench.scratch import scratch_directory
with scratch_directory("test") as directory:
    print(directory, flush=True)
    input()
"""


def test_a_directory_is_removed_at_the_end_with_all_that_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path))
    with scratch_directory("test") as directory:
        (directory / "pages").mkdir()
        (directory / "pages" / "one").write_bytes(b"x")
    assert not directory.exists()


def test_what_a_killed_run_left_goes_with_the_next_start_and_what_a_live_one_has_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        (held / "page").write_bytes(b"x")
        with scratch_directory("test") as mine:
            assert held.exists() and mine != held
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert held.exists(), "nobody was there to remove it"
        with scratch_directory("test"):
            assert not held.exists()
