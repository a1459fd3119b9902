"""A cluster that cannot exist is refused in one line, and every shipped one can."""

from pathlib import Path
from typing import Any

import pytest

from forebay.sim.cluster import ClusterError, make_cluster, read_cluster, shipped
from tests.sim.traffic import TABLE, small_cluster


def without(section: str, key: str) -> dict[str, Any]:
    table = {name: dict(entries) for name, entries in TABLE.items()}
    del table[section][key]
    return table


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_cluster_is_one(name: str) -> None:
    cluster = read_cluster(name)
    assert cluster.device_pages > 0 and cluster == read_cluster(name.removesuffix(".toml"))


@pytest.mark.parametrize(
    ("dial", "value", "says"),
    [
        ("network.nic_gb_s", "-3", "'-3'; allowed: 1e-06 to any GB/s"),
        ("network.nic_gb_s", "0", "allowed: 1e-06 to any GB/s"),
        ("network.nic_gb_s", "nan", "allowed"),
        ("network.nic_gb_s", "fast", "allowed"),
        ("store.dram", "64GX", "a size such as 64GiB"),
        ("store.dram", "0", "store.holders is 2, but store.dram is 0"),
        ("store.drram", "1GiB", "did you mean 'store.dram'"),
        ("engine.pp", "9", "the model has 8 layers"),
        ("engine.pp", "1.5", "a whole number"),
        ("engine.device_memory", "1KiB", "a page of 64 tokens takes"),
        ("engine.host_memory", "0", "a store needs host pages"),
        ("engine.fetch_policy", "soon", "wait, best-effort, timeout"),
        ("engine.prefix_first", "2", "true or false"),
        ("forward.linear_s", "-1", "0 to any s/token"),
        ("store.low_watermark", "0.95", "above store.high_watermark"),
    ],
)
def test_an_impossible_dial_is_refused(dial: str, value: str, says: str) -> None:
    with pytest.raises(ClusterError) as caught:
        small_cluster({dial: value})
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_missing_or_unknown_in_a_file_is_named() -> None:
    with pytest.raises(ClusterError, match=r"lacks forward\.linear_s: b: one more prefill token"):
        make_cluster(without("forward", "linear_s"), {}, "x.toml")
    with pytest.raises(ClusterError, match="did you mean 'store'"):
        make_cluster({**TABLE, "stoer": {}}, {}, "x.toml")
    with pytest.raises(ClusterError, match="is no table"):
        make_cluster({**TABLE, "store": 3}, {}, "x.toml")


def test_a_file_that_is_not_there_or_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"No such file.*h20-pp4tp4\.toml"):
        read_cluster("nowhere.toml")
    (tmp_path / "c.toml").write_text("[model")
    with pytest.raises(ClusterError, match="is not TOML"):
        read_cluster(str(tmp_path / "c.toml"))


def test_pages_are_shared_out_over_ranks_but_latent_ones_over_stages_alone() -> None:
    assert small_cluster().block_bytes == 64 * 4096 // 8
    latent = small_cluster({"model.latent": "true"})
    assert latent.block_bytes == 64 * 4096 // 4 and latent.writers == 1
