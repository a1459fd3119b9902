"""What holds for all tests.

Servers have no store unless they ask for one: the default would be the user's own, and start a process more. No example of a property
has to be ready by a deadline: a busy machine may take any time. Time limits follow the machine's speed (`tests.pace`). Where
pytest-xdist runs a process on each core, none of them computes on several.
"""

import os

import pytest
from hypothesis import settings

from tests.pace import paced

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FOREBAY_STORE", "none")
settings.register_profile("forebay", settings.default, deadline=None)
settings.load_profile("forebay")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each test's own time limit, or the one in pyproject.toml; what the command line says counts as it is."""
    if config.getoption("timeout") is not None:
        return
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0] if marker else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(paced(limit)), append=False)
