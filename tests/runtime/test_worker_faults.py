"""How a worker ends: with one clear line, within a bound, and never by waiting for a neighbour that is gone."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core.messages import Fault
from forebay.core.spans import SpanKind
from tests.pace import paced
from tests.runtime.scripted_planner import (
    DEADLINE_S,
    PAGES,
    START_DEADLINE_S,
    ScriptedPlanner,
    Work,
    WorkerFault,
)

# A rank that waits for a dead neighbour hears of it from the kernel, not by a time-out.
NEIGHBOUR_S = paced(10.0)

ORPHANS = """
import sys
from pathlib import Path
from tests.runtime.scripted_planner import ScriptedPlanner
planner = ScriptedPlanner(Path(sys.argv[1]), pp=2).start()
print(*(process.pid for process in planner.processes), flush=True)
sys.stdin.read()
"""

# `runtime.worker` with a torch that takes for ever to import.
ORPHAN_THAT_IMPORTS = """
import os, sys
from pathlib import Path
from tests.runtime.scripted_planner import ScriptedPlanner
os.environ["PYTHONPATH"] = os.pathsep.join(sys.argv[1:])
planner = ScriptedPlanner(Path("/nowhere"))
planner.spawn()
sys.stdin.read()
"""
ENDLESS_IMPORT = """
import os, signal
print(os.getpid(), flush=True)
signal.pause()
"""


def wait_until(condition: Callable[[], bool], deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "not true before the deadline"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def check_fault(planner: ScriptedPlanner, rank: int, *parts: str) -> Fault:
    fault = planner.wait_for_fault()
    assert fault.rank == rank and "\n" not in fault.text
    assert all(part in fault.text for part in parts), fault.text
    assert planner.processes[rank].wait(DEADLINE_S) == 1
    return fault


def test_a_plan_damaged_on_its_way_to_one_rank_is_named(tiny_model: Path) -> None:
    with ScriptedPlanner(tiny_model, pp=2).start() as planner:
        request = planner.request(0, [1, 2, 3])
        planner.run(Work(request, 3))
        planner.decode(2, request)
        number = planner.plan(Work(request, 1), damage=1)
        fault = check_fault(planner, 1, f"plan {number} is the first to differ from the planner's")
        assert fault.plan == number


def test_a_rank_whose_previous_stage_is_killed_ends_and_beats_until_then(tiny_model: Path) -> None:
    with ScriptedPlanner(tiny_model, pp=2).start() as planner:
        request = planner.request(0, [1, 2, 3])
        planner.run(Work(request, 3))
        os.kill(planner.processes[0].pid, signal.SIGSTOP)
        number = planner.plan(Work(request, 1))
        while [beat for beat in planner.heartbeats if beat.rank == 1 and beat.applied == number][
            1:
        ] == []:
            planner.receive(
                time.monotonic() + DEADLINE_S
            )  # it waits for hidden states and still says that it lives
        planner.processes[0].kill()
        killed_at = time.monotonic()
        check_fault(planner, 1, "the previous stage, rank 0, cannot be reached")
        assert time.monotonic() - killed_at < NEIGHBOUR_S


def test_a_rank_whose_next_stage_is_killed_ends_when_it_has_something_to_send(
    tiny_model: Path,
) -> None:
    with ScriptedPlanner(tiny_model, pp=2).start() as planner:
        request = planner.request(0, list(range(40)))
        planner.run(Work(request, 4))
        planner.processes[1].kill()
        planner.processes[1].wait()
        for _ in range(8):
            planner.plan(Work(request, 4))
        check_fault(planner, 0, "the next stage, rank 1, cannot be reached")


def test_a_rank_whose_tensor_parallel_peer_is_killed_ends(
    tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ScriptedPlanner(tiny_model, tp=2).start() as planner:
        request = planner.request(0, [1, 2, 3])
        planner.processes[1].kill()
        planner.processes[1].wait()
        planner.plan(Work(request, 3))
        assert check_fault(planner, 0).neighbour
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("boot", "pages", "says"),
    [
        (
            {"device_memory": 100},
            PAGES,
            ["device memory of 100 bytes holds no page of", "--device-memory"],
        ),
        ({}, 1 << 40, ["no memory for 1099511627776 pages", "--device-memory"]),
        ({"model_path": "/nowhere"}, PAGES, ["/nowhere"]),
        ({"dtype": "int3"}, PAGES, ["dtype int3 is not supported", "float32"]),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    tiny_model: Path, boot: dict[str, object], pages: int, says: list[str]
) -> None:
    with ScriptedPlanner(tiny_model, **boot) as planner:
        with pytest.raises(WorkerFault) as caught:
            planner.start(pages)
        fault = caught.value.fault
        assert all(part in fault.text for part in says) and "\n" not in fault.text, fault.text
        assert fault.plan == -1
        assert planner.processes[0].wait(DEADLINE_S) == 1


@pytest.mark.parametrize("number", [None, signal.SIGKILL])
def test_a_rank_leaves_its_spans_however_it_ends(
    tiny_model: Path, number: signal.Signals | None
) -> None:
    with ScriptedPlanner(tiny_model, pp=2).start() as planner:
        request = planner.request(0, [1, 2, 3])
        planner.run(Work(request, 3))
        planner.decode(3, request)
        if number is not None:
            planner.processes[1].send_signal(number)
            planner.processes[1].wait()
    spans = list(planner.rings.rings["rank 1"])
    assert {span.pid for span in spans} == {planner.processes[1].pid}
    assert [(span.id, span.part) for span in spans if span.kind == SpanKind.FORWARD] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
    ]
    kinds = [span.kind for span in spans if span.id == 3]
    assert kinds == [SpanKind.APPLY, SpanKind.RECEIVE, SpanKind.FORWARD, SpanKind.SAMPLE]


def test_it_ends_when_the_planner_closes_its_sockets(tiny_model: Path) -> None:
    with ScriptedPlanner(tiny_model).start() as planner:
        planner.close_sockets()
        assert planner.processes[0].wait(DEADLINE_S) == 1


def test_it_ends_with_its_parent(tiny_model: Path) -> None:
    command = [sys.executable, "-c", ORPHANS, str(tiny_model)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    wait_until(lambda: all(is_gone(pid) for pid in pids), START_DEADLINE_S)


def test_it_ends_with_its_parent_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(ENDLESS_IMPORT)
    repository = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", ORPHAN_THAT_IMPORTS, str(tmp_path), repository]
    environment = {**os.environ, "PYTHONPATH": repository}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    try:
        wait_until(lambda: is_gone(pid), START_DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
