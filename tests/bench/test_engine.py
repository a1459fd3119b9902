"""The engine's bench: the document that INTERFACES promises, and figures that can be; a second engine as the peer."""

import json
import os
from pathlib import Path

import pytest

from forebay.bench.engine import Peer, run
from forebay.bench.rank_memory import OVER_BYTES_MAX
from forebay.cli.main import run as forebay
from forebay.settings import resolve
from tests.frontend.tiny_text import write_random_weights, write_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that takes the shortest figures."""
    path = write_random_weights(write_text_model(tmp_path_factory.mktemp("model")))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return path


def check_memory(rows: list[dict[str, int]], ranks: int) -> None:
    """A rank's bound: weights, pages in use, and 450 MB."""
    assert [row["rank"] for row in rows] == list(range(ranks))
    for row in rows:
        assert min(row["weights"], row["pools"]) > 0
        assert row["rss"] == row["weights"] + row["pools"] + row["over"]
        assert 0 < row["over"] <= row["over_max"] == OVER_BYTES_MAX


@pytest.mark.slow
def test_the_document_has_a_row_for_each_figure_and_hits_are_cheaper_than_cold() -> None:
    result = run(
        "demo",
        resolve({"pp": 2, "threads_per_rank": 1, "store": "none"}, environment={}),
        None,
        1,
        print,
    )
    rows = {f"{row['what']}/{row['tokens']}x{row['batch']}": row for row in result["rows"]}
    assert set(rows) == {
        "cold_ttft/512x1", "cold_ttft/2048x1", "cold_ttft/4096x1", "hit_ttft/2048x1", "decode/512x1", "decode/512x4",
        "throughput/1024x8", "throughput/512x4",
    }  # fmt: skip
    assert all(row["forebay"] > 0 and row["peer"] is None for row in rows.values())
    assert rows["hit_ttft/2048x1"]["forebay"] < rows["cold_ttft/2048x1"]["forebay"]
    assert set(result["floors"]) == {"matmul_gflops", "memcpy_gib_s"}
    check_memory(result["memory"], ranks=2)
    assert all(row["weights"] > 100e6 and row["pools"] > 20e6 for row in result["memory"])


def test_another_forebay_is_measured_in_the_same_rounds(model: Path) -> None:
    settings = {"device_memory": "8MiB", "host_memory": "8MiB", "store": "none"}
    peer = Peer("forebay:pp=2", resolve(settings | {"pp": 2}, environment={}))
    result = run(str(model), resolve(settings, environment={}), peer, 2, print, ["cold_ttft/512x1"])
    (row,) = result["rows"]
    assert result["config"]["peer"] == "forebay:pp=2"
    assert result["config"]["threads"] == len(os.sched_getaffinity(0))
    assert [len(row["samples"][who]) for who in ("forebay", "peer")] == [2, 2]
    assert row["ratio"] == row["forebay"] / row["peer"]
    check_memory(result["memory"], ranks=1)


@pytest.mark.parametrize(
    ("peer", "only", "said"),
    [
        ("vllm", "", "--peer is 'vllm'; allowed: transformers, llama.cpp, or forebay:NAME=VALUE"),
        ("forebay:pp", "", "'pp' is no setting"),
        ("forebay:pq=2", "", "pq"),
        ("forebay:pp=none", "", "--pp"),
        (
            "forebay:pp=2",
            "cold_ttft/77x1",
            "there is no figure 'cold_ttft/77x1' here; allowed: cold_ttft/512x1",
        ),
    ],
)
def test_what_is_wrong_with_a_peer_is_said_in_one_line(
    model: Path, peer: str, only: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device-memory", "8MiB", "--host-memory", "8MiB"]
    assert forebay(["bench", "engine", str(model), "--peer", peer, "--only", only, *options]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
