"""What leaves a holder's DRAM and SSD, and when."""

import random

from forebay.sim.holders import HolderModel
from tests.sim.traffic import small_cluster


def model(**dials: str) -> HolderModel:
    """One holder; a page is 4 stages x 64 KiB."""
    turned = {"store.holders": "1", "network.jitter": "0", "store.high_watermark": "1", "store.low_watermark": "1"}
    return HolderModel(small_cluster(turned | {"store." + name: value for name, value in dials.items()}), random.Random(0))


def store(holders: HolderModel, page: bytes, now: float) -> list[bool]:
    return [holders.put(page, stage, now) for stage in range(4)]


def test_a_page_counts_once_all_stages_have_written_it() -> None:
    holders = model(ssd="0")
    for stage in range(3):
        assert holders.put(b"a", stage, 0.0)
        assert holders.match([b"a"]) == 0
    assert holders.put(b"a", 3, 0.0)
    assert holders.match([b"a", b"b"]) == 1
    assert holders.put(b"a", 3, 0.0), "again is no failure"
    assert holders.holders[0].dram_bytes == 4 * holders.part_bytes


def test_without_an_ssd_the_least_recently_used_page_is_lost() -> None:
    holders = model(ssd="0", dram="512KiB")
    store(holders, b"a", 0.0)
    store(holders, b"b", 1.0)
    holders.match([b"a"])
    assert all(store(holders, b"c", 2.0))
    assert [holders.match([page]) for page in (b"a", b"b", b"c")] == [1, 0, 1]
    assert holders.read(b"b", 0, 3.0) is None


def test_with_an_ssd_it_is_read_from_there_and_later_than_from_dram() -> None:
    holders = model(ssd="1GiB", dram="512KiB", ssd_read_gb_s="0.001")
    store(holders, b"a", 0.0)
    store(holders, b"b", 1.0)
    assert all(store(holders, b"c", 2.0))
    assert holders.match([b"a"]) == 1
    from_dram, from_ssd = holders.read(b"c", 0, 10.0), holders.read(b"a", 0, 20.0)
    assert from_dram is not None and from_ssd is not None
    assert from_ssd - 20.0 > 10 * (from_dram - 10.0)
    assert holders.read_from["ssd"] == holders.read_bytes


def test_a_page_on_its_way_to_the_ssd_may_not_leave_dram_and_a_put_without_space_fails() -> None:
    holders = model(ssd="1GiB", dram="512KiB", ssd_write_gb_s="0.0001")
    store(holders, b"a", 0.0)
    store(holders, b"b", 0.0)
    assert not any(store(holders, b"c", 0.1))
    assert holders.refused_pages == 4 and holders.match([b"a"]) == 1
    assert all(store(holders, b"c", 1000.0))


def test_the_ssd_forgets_its_oldest_page() -> None:
    holders = model(ssd="512KiB", dram="512KiB")
    for number, page in enumerate((b"a", b"b", b"c", b"d")):
        assert all(store(holders, page, 100.0 * number))
    assert [holders.match([page]) for page in (b"a", b"b", b"c", b"d")] == [0, 0, 1, 1]
    assert holders.holders[0].ssd_bytes == 512 << 10


def test_promotion_brings_a_page_back_to_dram() -> None:
    for promotion, tier in (("false", "ssd"), ("true", "dram")):
        holders = model(ssd="1GiB", dram="512KiB", promotion_on_hit=promotion)
        for number, page in enumerate((b"a", b"b", b"c")):
            store(holders, page, 100.0 * number)
        for stage in range(4):
            holders.read(b"a", stage, 1000.0)
        before = holders.read_from[tier]
        holders.read(b"a", 0, 2000.0)
        assert holders.read_from[tier] > before
