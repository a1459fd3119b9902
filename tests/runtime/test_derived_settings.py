"""What a setting is that nobody gave: from the grid and the machine."""

import os

import pytest

from forebay.runtime.planner_process import chunk_size
from forebay.runtime.sizing import threads_per_rank
from forebay.settings import resolve


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, 512),
        ({"tp": 4}, 512),
        ({"pp": 2}, 256),
        ({"pp": 4}, 256),
        ({"pp": 2, "chunk_size": 512}, 512),
    ],
)
def test_several_stages_run_smaller_chunks(given: dict[str, int], tokens: int) -> None:
    assert chunk_size(resolve(given, environment={})) == tokens


@pytest.mark.parametrize(
    ("given", "threads"),
    [({}, 8), ({"pp": 2}, 4), ({"tp": 12}, 1), ({"pp": 2, "threads_per_rank": 1}, 1)],
)
def test_ranks_share_the_cores(
    given: dict[str, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert threads_per_rank(resolve(given, environment={})) == threads
