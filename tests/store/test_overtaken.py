"""A get that comes before the promotion that a hint asked for: the record is read once, and nothing is evicted for it."""

import asyncio
import time
from typing import Any

from forebay.store import Status
from forebay.store.client.prefetcher import Prefetcher, PrefetchOptions
from forebay.store.holder.promoter import Promoter
from forebay.store.throttle import State
from forebay.store.wire.messages import (
    Allocated,
    AllocStart,
    Allotment,
    HolderToMaster,
    Place,
    Prefetchable,
    PrefetchCode,
    PromotionDone,
    RegisterPrefetch,
    Spot,
    Tier,
)
from tests.store.store_cluster import wait_for


class Link:
    """A master that grants everything, once the test lets it answer."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.sent: list[HolderToMaster] = []

    def new_call(self) -> int:
        return 1

    async def call(
        self, message: HolderToMaster, number: int, timeout_s: float
    ) -> Prefetchable | Allocated:
        self.sent.append(message)
        await self.may_answer.wait()
        if isinstance(message, RegisterPrefetch):
            return Prefetchable(
                number, bytes(len(message.keys)), [*range(1, len(message.keys) + 1)]
            )
        assert isinstance(message, AllocStart)
        return Allocated(number, [Allotment(PrefetchCode.OK, 7, 10, 0, 8) for _ in message.tasks])

    def send(self, message: HolderToMaster) -> None:
        self.sent.append(message)


class Reads:
    """A log of which no record can be read any more: what matters is which are tried."""

    def __init__(self) -> None:
        self.tried: list[bytes] = []

    async def read(self, tenant: str, key: bytes, generation: int) -> None:
        self.tried.append(key)


class Known:
    def length_of(self, tenant: str, key: bytes) -> int | None:
        return 10


def promote(overtaken: list[bytes]) -> tuple[list[HolderToMaster], list[bytes]]:
    """Two keys are hinted, and some of them read before the master has answered. What was sent, and what was read."""

    async def story() -> tuple[list[HolderToMaster], list[bytes]]:
        link, reads, nothing = Link(), Reads(), Any
        promoter = Promoter(nothing, nothing, reads, link, Known())  # type: ignore[arg-type]
        promoter.prefetch("t", [b"a", b"b"], 1.0)
        await asyncio.sleep(0)
        promoter.overtaken("t", overtaken)
        promoter.overtaken("another", [b"b"])
        link.may_answer.set()
        await asyncio.gather(*promoter._tasks)
        assert not promoter._hinted
        return link.sent, reads.tried

    return asyncio.run(story())


def test_a_holder_leaves_out_what_a_get_reads_before_the_promotion_does() -> None:
    sent, tried = promote([b"a"])
    assert tried == [b"b"]
    assert [message.tasks for message in sent if isinstance(message, AllocStart)] == [[2]], (
        "no room is taken for it"
    )
    assert {message.task for message in sent if isinstance(message, PromotionDone)} == {1, 2}, (
        "the master hears the end of both"
    )


def test_a_holder_asks_for_no_room_at_all_if_everything_was_read() -> None:
    sent, tried = promote([b"a", b"b"])
    assert tried == [] and not any(isinstance(message, AllocStart) for message in sent)
    assert {message.task for message in sent if isinstance(message, PromotionDone)} == {1, 2}


def test_a_holder_promotes_what_nobody_has_read() -> None:
    assert promote([])[1] == [b"a", b"b"]


def test_a_client_does_not_tell_holders_of_what_its_get_has_come_to_meanwhile() -> None:
    told: list[list[bytes]] = []

    def query(keys: list[bytes], deadline: float) -> list[Place]:
        prefetcher.overtaken([b"a"])
        return [Place(Status.OK, 10, 7, (Spot(1, Tier.SSD),)) for _ in keys]

    def delegate(holder: int, keys: list[bytes], demand: bool) -> bool:
        told.append(keys)
        return True

    prefetcher = Prefetcher(PrefetchOptions(enabled=True), query, delegate)
    try:
        assert prefetcher.submit([b"a", b"b"]) == 2
        wait_for(lambda: prefetcher.counters.sent + prefetcher.counters.failed == 2)
        assert told == [[b"b"]] and prefetcher.counters.failed == 1
        assert prefetcher.throttle.state(b"a", time.monotonic()) is State.FAILED, (
            "it may be asked for again soon"
        )
    finally:
        prefetcher.close()
