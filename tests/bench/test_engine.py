"""The engine's bench on the real model, without its peer: the document that INTERFACES promises, and figures that can be."""

import pytest

from forebay.bench.engine import run
from forebay.settings import resolve


@pytest.mark.slow
def test_the_document_has_a_row_for_each_figure_and_hits_are_cheaper_than_cold() -> None:
    result = run("demo", resolve({"pp": 2, "threads_per_rank": 1, "store": "none"}, environment={}), None, 1, print)
    rows = {f"{row['what']}/{row['tokens']}x{row['batch']}": row for row in result["rows"]}
    assert set(rows) == {
        "cold_ttft/512x1", "cold_ttft/2048x1", "cold_ttft/4096x1", "hit_ttft/2048x1", "decode/512x1", "decode/512x4",
        "throughput/1024x8", "throughput/512x4",
    }  # fmt: skip
    assert all(row["forebay"] > 0 and row["peer"] is None for row in rows.values())
    assert rows["hit_ttft/2048x1"]["forebay"] < rows["cold_ttft/2048x1"]["forebay"]
    assert set(result["floors"]) == {"matmul_gflops", "memcpy_gib_s"}
