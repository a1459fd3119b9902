"""The master that ships over performance models of holders: what leaves DRAM and SSD, and when; what is promoted, and why."""

import random
from collections.abc import Sequence

import pytest

from forebay.sim.devices import Link
from forebay.sim.heap import EventHeap
from forebay.sim.store_model import StoreModel
from tests.sim.traffic import small_cluster

STAGES = 4


class World:
    """One holder unless told otherwise; a part of a page is 64 KiB. DRAM has room for ``pages`` whole pages, heads included."""

    def __init__(self, pages: float = 1000, **dials: str) -> None:
        turned = {
            "store.holders": "1", "network.jitter": "0", "store.high_watermark": "1", "store.low_watermark": "1", "store.ssd": "0",
            "store.dram": str(int(pages * STAGES * ((64 << 10) + 64))),
        }  # fmt: skip
        turned |= {name.replace("__", "."): value for name, value in dials.items()}
        self.heap = EventHeap()
        self.model = StoreModel(small_cluster(turned), self.heap, random.Random(0))
        self.nic = Link(10.0, 0.0, 0.0, random.Random(0))

    def advance(self, seconds: float) -> None:
        until = self.heap.now + seconds
        self.heap.at(until, lambda: None)
        while len(self.heap) and self.heap.now < until:
            self.heap.run_next()

    def store(
        self, page: bytes, stages: Sequence[int] = range(STAGES), settle_s: float = 10.0
    ) -> list[bool]:
        """Store these stages' parts, and let what follows from it come to rest."""
        said: list[bytes] = []
        for stage in stages:
            self.model.put([page], stage, self.nic, said.append)
        self.advance(settle_s)
        assert len(said) == len(stages)
        return [bool(word[0]) for word in said]

    def there(self, *pages: bytes) -> list[int]:
        return [self.model.match([page]) for page in pages]

    def read(self, page: bytes, stage: int = 0) -> float | None:
        """How long a read takes; None if the page is not there."""
        asked_at = self.heap.now
        read = self.model.get([page], stage)
        if not read.keys:
            return None
        self.advance(read.at - asked_at)
        return read.at - asked_at

    def read_all(self, page: bytes) -> None:
        for stage in range(STAGES):
            assert self.read(page, stage) is not None

    def from_ssd(self, page: bytes) -> bool:
        """Whether a read of the first stage's part touches the SSD."""
        before = self.model.read_from["ssd"]
        assert self.read(page) is not None
        return self.model.read_from["ssd"] > before


def test_a_page_counts_once_all_stages_have_written_it() -> None:
    world = World()
    assert all(world.store(b"a", range(3)))
    assert world.there(b"a") == [0]
    assert world.store(b"a", [3]) == [True]
    assert world.model.match([b"a", b"b"]) == 1
    assert world.store(b"a", [3]) == [True], "again is no failure"


def test_without_an_ssd_the_least_recently_read_page_is_lost() -> None:
    world = World(pages=2)
    world.store(b"a")
    world.store(b"b")
    world.read_all(b"a")
    world.advance(10.0)  # beyond the lease
    assert all(world.store(b"c"))
    assert world.there(b"a", b"b", b"c") == [1, 0, 1]
    assert world.read(b"b") is None


def test_a_page_under_a_lease_stays_and_a_put_waits_for_its_end() -> None:
    world = World(pages=1, store__lease_s="1")
    world.store(b"a")
    world.read_all(b"a")
    said: list[bytes] = []
    for stage in range(STAGES):
        world.model.put([b"b"], stage, world.nic, said.append)
    world.advance(0.5)
    assert not said and world.there(b"a") == [1]
    world.advance(2.0)
    assert said == [b"\1"] * STAGES and world.there(b"a", b"b") == [0, 1]


def test_a_put_that_finds_no_room_in_time_is_refused() -> None:
    world = World(pages=1, store__lease_s="100", store__put_wait_s="1")
    world.store(b"a")
    world.read_all(b"a")
    assert not any(world.store(b"b"))
    assert world.model.counters["puts_refused"] == STAGES and world.there(b"a", b"b") == [1, 0]


def test_with_an_ssd_it_is_read_from_there_and_later_than_from_dram() -> None:
    world = World(pages=2, store__ssd="1GiB", store__ssd_read_gb_s="0.001")
    for page in (b"a", b"b", b"c"):
        assert all(world.store(page))
    assert world.there(b"a", b"b", b"c") == [1, 1, 1]
    from_dram, from_ssd = world.read(b"c"), world.read(b"a")
    assert from_dram is not None and from_ssd is not None and from_ssd > 10 * from_dram
    assert world.model.read_from["ssd"] == world.model.read_bytes


def test_a_page_on_its_way_to_the_ssd_may_not_leave_dram() -> None:
    world = World(pages=1, store__ssd="1GiB", store__ssd_write_gb_s="0.00001")
    world.store(b"a", settle_s=0.1)
    assert not any(world.store(b"b", settle_s=2.5)), (
        "it waits 2 s for room, and a's first part takes longer to be written"
    )
    assert world.there(b"a") == [1]
    world.advance(50.0)
    assert all(world.store(b"b")) and world.there(b"a", b"b") == [1, 1]


def test_the_ssd_forgets_the_file_that_was_read_least_recently() -> None:
    world = World(
        **{
            "store__dram": "17MiB",
            "store__ssd": "64MiB",
            "model__kv_bytes_per_token": str(64 * 4096),
        }
    )
    pages = [
        b"%d" % number for number in range(6)
    ]  # of four parts of 4 MiB, each in a file of its own, as large as its head allows
    for page in pages:
        assert all(world.store(page, settle_s=30.0))
    assert world.there(*pages[:3]) == [0, 0, 0] and world.there(pages[-1]) == [1]
    holder = world.model.holders[0]
    assert holder.log.used_bytes <= 64 << 20


@pytest.mark.parametrize(("reads", "promoted"), [(1, False), (2, True)])
def test_what_is_read_twice_from_the_ssd_comes_back_to_dram(reads: int, promoted: bool) -> None:
    world = World(pages=2, store__ssd="1GiB", store__promotion_on_hit="true")
    for page in (b"a", b"b", b"c"):
        world.store(page)
    for _ in range(reads):
        world.read_all(b"a")
        world.advance(10.0)
    counted = world.model.counters
    assert ("promoted_hit" in counted or "promotion_gated" in counted) is promoted


def test_a_promotion_needs_room_below_the_high_watermark_and_evicts_nothing() -> None:
    dials = {
        "store__ssd": "1GiB",
        "store__promotion_on_hit": "true",
        "store__hit_threshold": "1",
        "store__high_watermark": "0.9",
    }
    for low, promoted in (("0.9", False), ("0.3", True)):
        world = World(pages=4, store__low_watermark=low, **dials)
        for page in (b"a", b"b", b"c", b"d", b"e"):
            world.store(page)
        world.read_all(b"a")
        world.advance(10.0)
        assert world.from_ssd(b"a") is not promoted
        assert ("promotion_gated" in world.model.counters) is not promoted


def test_a_hint_brings_a_page_from_ssd_to_dram_before_it_is_read_and_repeats_do_nothing() -> None:
    dials = {"store__ssd": "1GiB", "store__prefetch_share": "0.5"}
    for wanted in ("true", "false"):
        world = World(pages=2, store__ssd_prefetch=wanted, **dials)
        for page in (b"a", b"b", b"c"):
            world.store(page)
        for _ in range(100):
            for stage in range(STAGES):
                world.model.hint([b"a"], stage)
        world.advance(1.0)
        assert world.model.counters.get("promoted_prefetch", 0) == (
            STAGES if wanted == "true" else 0
        )
        assert world.from_ssd(b"a") is (wanted == "false")


def test_a_get_and_a_promotion_of_one_record_share_its_read() -> None:
    dials = {
        "store__hit_threshold": "1",
        "store__low_watermark": "0.3",
        "store__ssd_read_gb_s": "0.1",
    }
    world = World(pages=2, store__ssd="1GiB", store__promotion_on_hit="true", **dials)
    for page in (b"a", b"b", b"c"):
        world.store(page)
    before = world.model.holders[0].ssd_read.moved
    assert world.from_ssd(b"a")
    world.advance(1.0)
    assert world.model.counters["promoted_hit"] == 1
    assert world.model.holders[0].ssd_read.moved - before == (64 << 10) + 4096


def test_a_read_that_outlasts_its_lease_counts_only_what_is_still_there() -> None:
    world = World(pages=2, store__lease_s="1", store__nic_gb_s="0.00005")
    for page in (b"a", b"b"):
        world.store(page, settle_s=100.0)
    for needed, good in ((False, 1), (True, 0)):
        slow = world.model.get([b"a"], 0)
        assert slow.at - world.heap.now > 1.1, "longer than the lease"
        world.advance(slow.at - world.heap.now)
        if needed:
            assert all(world.store(b"c", settle_s=100.0)) and all(world.store(b"d", settle_s=100.0))
        assert world.model.good(slow) == good and world.model.expired == 1 - good


def test_what_is_there_from_the_start_lies_on_the_ssd_too() -> None:
    world = World(pages=2, store__ssd="1GiB")
    world.model.fill([b"a", b"b", b"c"])
    assert (
        world.there(b"a", b"b", b"c") == [1, 1, 1]
        and world.from_ssd(b"a")
        and not world.from_ssd(b"c")
    )


def test_what_the_log_has_no_room_for_at_the_start_is_not_there() -> None:
    world = World(
        **{
            "store__dram": "17MiB",
            "store__ssd": "64MiB",
            "model__kv_bytes_per_token": str(64 * 4096),
        }
    )
    pages = [b"%d" % number for number in range(6)]
    world.model.fill(pages)
    found = world.there(*pages)
    assert found[-1] == 1 and 0 in found
    for page, there in zip(pages, found, strict=True):
        assert not there or world.read(page) is not None
