"""What is read out of the spans of a calibration's run."""

import pytest

from forebay.bench.calibrate import CHUNK, TOGETHER, CalibrationError, _contention, _Plan
from forebay.core.spans import SpanKind
from forebay.observe.events import Span

ALONE_S, SLOWER_S = 1.0, 1.25
MEASURED = [_Plan(0, CHUNK, 0, (ALONE_S, ALONE_S), 2 * ALONE_S)]


def forward(plan: int, begin_s: float, seconds: float) -> Span:
    return Span(SpanKind.FORWARD, int(begin_s * 1e9), int(seconds * 1e9), plan, CHUNK)


def pipelined() -> dict[str, list[Span]]:
    """Plans over two stages: the first pass and the last are alone, all others run beside one of the other stage."""
    begins = [0.0] + [ALONE_S + SLOWER_S * index for index in range(TOGETHER)]
    seconds = [ALONE_S] + [SLOWER_S] * (TOGETHER - 1) + [ALONE_S]
    return {
        "planner": [Span(SpanKind.PLAN, index, 1, index, CHUNK) for index in range(TOGETHER)],
        "rank 0": [forward(index, begins[index], seconds[index]) for index in range(TOGETHER)],
        "rank 1": [
            forward(index, begins[index + 1], seconds[index + 1]) for index in range(TOGETHER)
        ],
    }


def test_what_stages_cost_each_other_is_what_their_passes_took_longer_while_they_overlapped() -> (
    None
):
    assert _contention(pipelined(), MEASURED, 0) == pytest.approx(SLOWER_S / ALONE_S - 1.0)


def test_a_run_in_which_they_never_overlapped_says_nothing() -> None:
    spans = pipelined()
    spans["rank 1"] = [forward(index, 100.0 + index, ALONE_S) for index in range(TOGETHER)]
    with pytest.raises(CalibrationError, match="hardly ran at the same time"):
        _contention(spans, MEASURED, 0)
