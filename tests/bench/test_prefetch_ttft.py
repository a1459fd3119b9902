"""`bench store --prefetch --serve`: two arms on equal stores, over real processes with a tiny model. Times prove nothing here."""

from pathlib import Path

import pytest

from forebay.bench import prefetch_ttft
from forebay.bench.prefetch_ttft import PrefetchTtftBench
from forebay.settings import FetchRoute
from tests.frontend.tiny_text import write_random_weights, write_text_model

SMALL = {"prefix": 64, "tail": 16, "page": 8, "requests": 4, "concurrencies": (1, 2)}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_random_weights(write_text_model(tmp_path / "model")))


@pytest.mark.slow
def test_prefixes_come_from_ssd_where_dram_is_full_and_from_dram_where_it_is_roomy(
    model: str, tmp_path: Path
) -> None:
    routes = (
        FetchRoute.STAGED,
        FetchRoute.STAGED,
    )  # by ticket, a model as small as this rather computes than fetches
    rows = prefetch_ttft.run(PrefetchTtftBench(model, tmp_path, routes, dram=1 << 20, **SMALL))  # type: ignore[arg-type]
    assert [(row["route"], row["concurrency"]) for row in rows] == [
        ("staged", 1),
        ("staged", 2),
    ] * 2
    for row in rows:
        assert row["dram_bytes_off_pct"] < 20, "only what servers keep for themselves is in DRAM"
        assert row["requests"] == 4 and sum(row["missed"]) <= 4
        assert all(
            0 < row[name]["p50"] <= row[name]["p99"]
            for name in ("off_ms", "on_ms", "roomy_off_ms", "roomy_on_ms")
        )
