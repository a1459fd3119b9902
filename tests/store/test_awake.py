"""A master that waits actively between the questions of who asks one after another, and for nobody else."""

import asyncio
import os

from forebay.store.master.awake import AWAKE_S, Awake, leave


def test_awake_while_questions_come_soon_after_answers() -> None:
    time = [100.0]
    awake = Awake(lambda: time[0])

    def ask(after: float) -> None:
        time[0] += after
        awake.answered(time[0], lambda: -1)

    async def turns() -> bool:
        for _ in range(3):
            await asyncio.sleep(0)
        return awake.now

    async def story() -> None:
        ask(0.0)
        assert not await turns(), "one question is no habit"
        ask(AWAKE_S * 2)
        assert not await turns(), "not so soon"
        ask(AWAKE_S / 2)
        assert await turns()
        for _ in range(5):
            ask(AWAKE_S / 2)
            assert await turns()
        time[0] += AWAKE_S / 2
        assert await turns()
        time[0] += AWAKE_S
        assert not await turns(), "nobody asks any more"
        ask(AWAKE_S)
        assert not await turns()
        ask(AWAKE_S / 2)
        assert await turns(), "and again"
        time[0] += AWAKE_S * 2
        assert not await turns()

    asyncio.run(story())


def test_leaving_a_core_changes_nothing_for_good() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        for core in allowed:
            leave(core)
            assert os.sched_getaffinity(0) == allowed
        one = min(allowed)
        os.sched_setaffinity(0, {one})
        leave(one)
        assert os.sched_getaffinity(0) == {one}, "there is nowhere to go"
    finally:
        os.sched_setaffinity(0, allowed)
