"""What a calibration run says is what its file says; the run itself is slow."""

import json

import numpy as np
import pytest

from forebay.bench.calibrate import _fit, _non_negative, _Plan
from forebay.cli.main import run
from forebay.sim.cluster import make_cluster


def plan(start: int, tokens: int, decodes: int) -> _Plan:
    seconds = (
        2e-7 * tokens * (tokens + 2 * start) + 1e-3 * tokens
        if not decodes
        else 2e-3 * decodes + 1e-6 * decodes * start
    )
    each = (seconds + 0.03) / 2
    return _Plan(start, tokens, decodes, (each - 0.002, each + 0.002), seconds + 0.04)


def test_the_fit_finds_the_model_that_made_its_samples() -> None:
    plans = [plan(start, 512, 0) for start in range(0, 4096, 512)] + [
        plan(start, n, n) for start in (64, 512, 2048) for n in (1, 2, 4)
    ]
    found = _fit(plans)
    assert found["forward.quadratic_s"] == pytest.approx(2e-7, rel=0.01)
    assert found["forward.linear_s"] == pytest.approx(1e-3, rel=0.01)
    assert found["forward.fixed_s"] == pytest.approx(0.03 - 0.004, rel=0.01)
    assert found["forward.last_stage_s"] == pytest.approx(0.004)
    assert found["forward.decode_s"] == pytest.approx(2e-3, rel=0.05)
    assert found["forward.jitter"] == pytest.approx(0, abs=1e-6)


def test_what_would_be_negative_is_zero() -> None:
    rows = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    values = _non_negative(rows, np.array([3.0, 2.0, 1.5]))
    assert values[0] == 0 and values[1] > 0


@pytest.mark.slow
def test_a_calibrated_machine_is_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--calibrate", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert make_cluster(tables, {}, "calibrated").forward.linear_s > 0
