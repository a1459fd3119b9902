"""The bench of KV formats on the real model: finer formats differ less, and the document has a row for each."""

import pytest

from forebay.bench.kv_quality import run
from forebay.models.kv_format import KV_FORMATS


@pytest.mark.slow
def test_finer_formats_are_closer_to_the_unquantised_run() -> None:
    result = run("demo", "float32", 128, 64, print)
    rows = {row["kv_dtype"]: row for row in result["rows"]}
    assert set(rows) == set(KV_FORMATS) - {"float32"}
    assert (
        0
        <= rows["float16"]["mean_kl"]
        < rows["bfloat16"]["mean_kl"]
        < rows["fp8_e4m3"]["mean_kl"]
        < 0.1
    )
    assert rows["int8"]["mean_kl"] < rows["fp8_e4m3"]["mean_kl"]
    assert all(0.8 < row["greedy_agreement"] <= 1 for row in rows.values())
    assert (
        result["config"]["bytes_per_token"]["int8"]
        < 0.6 * result["config"]["bytes_per_token"]["bfloat16"]
    )
