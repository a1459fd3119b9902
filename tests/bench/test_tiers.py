"""`bench tiers` on a tiny model: that it measures what it says. Its figures mean something on a real one alone."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.cli.main import app
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.warm_cache import warm_cache

OPTIONS = ["--page-size", "16", "--repeat", "2", "--json"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a cache directory of its own, but for the compiled kernels."""
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(warm_cache(tmp_path / "cache")))
    path = tmp_path / "model"
    write_text_model(path)
    return write_random_weights(path)


def test_copies_are_measured_beside_memcpy(model: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "tiers", str(model), "--parts", "copies", *OPTIONS])
    assert result.exit_code == 0, result.output
    rows = {row["copy"]: row for row in json.loads(result.stdout)["copies"]}
    assert set(rows) == {"load", "backup", "store", "fetch"}
    for name, row in rows.items():
        assert len(row["gb_s"]["samples"]) == 2 and min(row["gb_s"]["samples"]) > 0
        assert (row["memcpy_gb_s"] is None) == (name == "store")


@pytest.mark.slow
def test_hits_come_from_the_tier_that_is_named(model: Path) -> None:
    options = ["--parts", "hits", "--tokens", "256", "--fetch-threshold", "16"]
    result = CliRunner().invoke(app, ["bench", "tiers", str(model), *options, *OPTIONS])
    assert result.exit_code == 0, result.output
    rows = [(row["store"], row["tier"]) for row in json.loads(result.stdout)["hits"]]
    assert [tier for store, tier in rows if store == "file"] == [
        "store's memory",
        "device",
        "host",
        "disk",
        "raw reads",
    ]
    assert [tier for store, tier in rows if store == "embedded, small"] == [
        "disk",
        "device",
        "host",
        "raw reads",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--parts", "hits,speed"], "allowed: hits, cost, copies"),
        (["--parts", "hits", "--tokens", "100"], "full pages of 16 tokens"),
        (["--parts", "hits", "--tokens", "512"], "do not fit the context"),
        (["--store", "none"], "starts servers for itself"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    model: Path, options: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, ["bench", "tiers", str(model), *OPTIONS, *options])
    assert result.exit_code != 0
    assert said in str(result.exception)
