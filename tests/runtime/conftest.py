"""Starting a grid takes seconds, so tests that leave it whole share one per shape."""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.runtime import tiny_llama
from tests.runtime.scripted_planner import ScriptedPlanner

Grids = Callable[[int, int], ScriptedPlanner]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def grids(tiny_model: Path) -> Iterator[Grids]:
    """The running grid of shape (pp, tp)."""
    with contextlib.ExitStack() as stack:

        @cache
        def grid(pp: int, tp: int) -> ScriptedPlanner:
            return stack.enter_context(ScriptedPlanner(tiny_model, pp, tp)).start()

        yield grid
