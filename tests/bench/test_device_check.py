"""`make device-check`: one line where there is no GPU; where there is one, a document whatever its steps do."""

import json
import sys

import psutil
import pytest
import torch

from forebay.bench import device_check
from forebay.bench.device_check import STEPS, TEXTS, Step, check, main, run_step
from tests.pace import paced


def step(name: str, code: str, limit_s: float = 60.0) -> Step:
    return Step(name, (sys.executable, "-c", code), limit_s, json.loads)


def text(said: str) -> str:
    return f"print({json.dumps(json.dumps({'results': [{'outputs': [{'text': said}]}]}))})"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    out = capsys.readouterr().out
    assert "no CUDA device" in out and len(out.splitlines()) == 1


def test_a_step_that_fails_is_told_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [step("bad", "raise SystemExit('no such thing')"), step("good", "print('[1]')")]
    document = check(steps, "a device")
    bad, good = document["steps"]
    assert not document["ok"] and not bad["ok"]
    assert "exit status 1" in bad["error"] and "no such thing" in bad["error"]
    assert good["ok"] and good["result"] == [1]
    assert json.loads(json.dumps(document)) == document


def test_what_is_no_document_is_a_failure() -> None:
    assert "cannot be read" in run_step(step("chatty", "print('hello')"), 60).error


def test_a_step_that_hangs_ends_with_all_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    child: list[psutil.Process] = []
    end = device_check.end_group

    def note(process: "device_check.subprocess.Popen[str]") -> None:
        if process.poll() is None:
            child.extend(psutil.Process(process.pid).children())
        end(process)

    monkeypatch.setattr(device_check, "end_group", note)
    hanging = Step("hangs", ("sh", "-c", "sleep 1000 & wait"), 1.0, json.loads)
    assert run_step(hanging, 60).error == "ended: it took more than 1 s"
    assert len(child) == 1 and not psutil.wait_procs(child, paced(10.0))[1]


def test_no_step_runs_when_the_time_is_up() -> None:
    assert run_step(step("late", "print('[1]')"), 0).error.startswith("not run")


@pytest.mark.parametrize(("device", "ok"), [("water", True), ("wine", False)])
def test_text_must_not_depend_on_the_device(device: str, ok: bool) -> None:
    document = check([step(TEXTS[0], text("water")), step(TEXTS[1], text(device))], "a device")
    assert document["ok"] is document["same_text"] is ok


def test_the_steps_fit_the_time_and_ask_for_the_device() -> None:
    assert sum(each.limit_s for each in STEPS if each.name != "gpu tests") <= 360
    assert all("cuda" in each.command for each in STEPS if each.name not in ("gpu tests", TEXTS[0]))
