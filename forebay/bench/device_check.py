"""`make device-check`: what only a machine with a GPU can show, in at most eight minutes, as one JSON document.

    the tests marked gpu -> the demo model over two stages on one device, beside the CPU -> hits of every tier -> one `bench ttft`

Each step is a process with a time limit of its own, whose processes all end with it; a step that fails
does not keep the others from running. Exit status 0: all is well, or there is no GPU, which one line says;
1: a step failed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

LIMIT_S = 480.0
TAIL_LINES = 15
FOREBAY = (sys.executable, "-m", "forebay.cli")
QUESTION = "Why does water gather ahead of a turbine?"
GENERATE = ("generate", "demo", QUESTION, "--dtype", "float32", "--store", "none")
SHORT = ("--max-tokens", "32", "--json")
TEXTS = ("text on the CPU", "text over two stages on one device")


@dataclass(frozen=True)
class Step:
    """``read``: the result in what the command printed; raises ``ValueError`` if it is not there."""

    name: str
    command: Sequence[str]
    limit_s: float
    read: Callable[[str], Any]


@dataclass(frozen=True)
class Outcome:
    name: str
    ok: bool
    seconds: float
    result: Any = None
    error: str = ""


def last_line(output: str) -> str:
    """What pytest says last: how many passed."""
    return output.strip().splitlines()[-1]


STEPS = (
    Step("gpu tests", (sys.executable, "-m", "pytest", "-m", "gpu", "tests"), 200, last_line),
    Step(TEXTS[0], (*FOREBAY, *GENERATE, *SHORT), 60, json.loads),
    Step(
        TEXTS[1],
        (*FOREBAY, *GENERATE, "--device", "cuda", "--pp", "2", *SHORT),
        60,
        json.loads,
    ),
    Step(
        "tiers",
        (*FOREBAY, "bench", "tiers", "demo", "--device", "cuda", "--parts", "hits", "--repeat", "5", "--json"),
        120,
        json.loads,
    ),
    Step(
        "ttft",
        (
            *(*FOREBAY, "bench", "ttft", "demo", "--device", "cuda", "--groups", "mixed"),
            *("--requests", "16", "--repeat", "2", "--concurrency", "4", "--json"),
        ),
        120,
        json.loads,
    ),
)  # fmt: skip


def run_step(step: Step, left_s: float) -> Outcome:
    """At most ``left_s``, or the step's own limit."""
    began = time.monotonic()

    def outcome(result: Any, error: str) -> Outcome:
        return Outcome(step.name, not error, round(time.monotonic() - began, 1), result, error)

    limit_s = min(step.limit_s, left_s)
    if limit_s <= 0:
        return outcome(None, "not run: the other steps took all the time")
    process = subprocess.Popen(
        step.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end_group(process)
        return outcome(None, f"ended: it took more than {limit_s:.0f} s")
    finally:
        end_group(process)
    if process.returncode:
        tail = "\n".join((output + errors).strip().splitlines()[-TAIL_LINES:])
        return outcome(None, f"exit status {process.returncode}: {tail}")
    try:
        return outcome(step.read(output), "")
    except (ValueError, IndexError) as error:
        return outcome(None, f"its output cannot be read: {error}")


def end_group(process: "subprocess.Popen[str]") -> None:
    """The process and all that it has started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check(steps: Sequence[Step], device: str) -> dict[str, Any]:
    """The document. A text that differs between the CPU and the device is a failure too."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for step in steps:
        print(f"device-check: {step.name}", file=sys.stderr, flush=True)
        outcomes.append(run_step(step, LIMIT_S - (time.monotonic() - began)))
    texts = [text_of(outcome.result) for outcome in outcomes if outcome.name in TEXTS]
    same = len(set(texts)) <= 1
    return {
        "device": device,
        "torch": torch.__version__,
        "ok": same and all(outcome.ok for outcome in outcomes),
        "same_text": same,
        "seconds": round(time.monotonic() - began, 1),
        "steps": [asdict(outcome) for outcome in outcomes],
    }


def text_of(document: Any) -> str | None:
    """Of `forebay generate --json`; None if there is no such document."""
    return None if document is None else str(document["results"][0]["outputs"][0]["text"])


def main() -> int:
    if not torch.cuda.is_available():
        print(f"device-check: no CUDA device (PyTorch {torch.__version__}); nothing to check here")
        return 0
    document = check(STEPS, torch.cuda.get_device_name())
    print(json.dumps(document))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
