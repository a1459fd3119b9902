"""The worker's story on CUDA devices: ``pytest -m gpu tests/runtime``.

With fewer GPUs than ranks, ranks share them, and what goes between them is staged through the host (`runtime.grid`).
"""

from pathlib import Path

import pytest

from tests.runtime.scripted_planner import ScriptedPlanner, Work
from tests.runtime.test_worker_text import GRIDS, prompt, story

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("pp", "tp"), GRIDS)
def test_text_equals_the_references(tiny_model: Path, pp: int, tp: int) -> None:
    with ScriptedPlanner(tiny_model, pp, tp, device="cuda").start() as planner:
        story(planner, tiny_model)


def test_device_memory_is_derived_from_what_the_weights_left(tiny_model: Path) -> None:
    with ScriptedPlanner(tiny_model, device="cuda", device_memory=0).start() as planner:
        request = planner.request(0, prompt(1, 9))
        planner.run(Work(request, 9))
