"""The simulator beside what was measured."""

import pytest

from forebay.sim.cluster import ClusterError
from forebay.sim.reference_loop import ReferenceLoop, forebay_lag
from forebay.sim.validate import PUBLISHED, validate_bench, validate_published


def test_the_usual_loop_takes_one_iteration_for_a_load_and_three_for_a_write() -> None:
    for copy_s in (0.001, 0.02, 0.09):
        lag = ReferenceLoop(0.1, copy_s).run()
        assert (lag.load, lag.write) == (1, 3) and lag.write_wait == pytest.approx(1.0)


def test_forebay_knows_of_a_write_as_soon_as_it_is_done() -> None:
    for copy_s in (0.001, 0.02, 0.09):
        lag = forebay_lag(0.1, copy_s)
        assert lag.load == 1 and lag.write == 2
        assert lag.write_wait == pytest.approx(copy_s / 0.1, abs=0.02)


@pytest.mark.slow
def test_the_published_ticket_column_is_predicted_within_a_tenth() -> None:
    cells = validate_published()["cells"]
    assert len(cells) == 2 * 2 * len(PUBLISHED)
    predicted = [cell for cell in cells if cell["use"] == "predicted"]
    assert len(predicted) == 6 and all(abs(cell["error_pct"]) < 10 for cell in predicted)


def test_what_is_no_bench_document_is_refused() -> None:
    for document in (
        {},
        {"config": {}, "groups": []},
        {"config": {"routes": ["ticket"], "groups": ["x"]}, "groups": [1]},
    ):
        with pytest.raises(ClusterError, match="no document of"):
            validate_bench(document, "h20-pp4tp4")


def test_a_bench_document_gets_a_cell_for_each_figure() -> None:
    about = {
        "routes": ["ticket", "staged:cache"], "groups": ["miss", "mixed"], "input_len": 2048, "output_len": 1, "requests": 8,
        "concurrency": 2, "rounds": 2, "pp": 2, "tp": 1, "chunk_size": 2048, "fetch_policy": "wait", "host_mode": "cache",
    }  # fmt: skip
    rows = [
        {
            "group": group,
            "kind": kind,
            "route": route,
            "n": 8,
            "ttft_ms": {"mean": 100.0, "p50": 100.0},
        }
        for route in about["routes"]  # type: ignore[attr-defined]
        for group, kind in (
            ("miss", "miss"),
            ("miss", "all"),
            ("mixed", "hit"),
            ("mixed", "miss"),
            ("mixed", "all"),
        )
    ]
    cells = validate_bench({"config": about, "groups": rows}, "h20-pp4tp4")
    assert len(cells) == 2 * 2 * 4
    assert all(
        cell["error_pct"] == pytest.approx(cell["simulated_ms"] - 100, abs=0.06) for cell in cells
    )
