"""A flush of the store waits for the planner's part and for what is on its way, and is answered exactly once."""

from forebay.core.messages import CancelFlush, Flush, FlushDone
from forebay.runtime.store_access import StoreCleared
from forebay.runtime.store_flush import StoreFlushes

ALL = Flush(1, ("device", "host", "store"), 5.0)


def test_flushes_of_other_tiers_pass() -> None:
    flushes = StoreFlushes()
    flushes.arrived(Flush(7, ("device",), 5.0), 0.0)
    assert flushes.settled([FlushDone(7, 3)]) == [FlushDone(7, 3)]


def test_the_store_is_cleared_once_nothing_is_on_its_way_to_it() -> None:
    flushes = StoreFlushes()
    flushes.arrived(ALL, 10.0)
    assert flushes.due(10.0, writing=False) == ([], []), "the planner comes first"
    assert flushes.settled([FlushDone(1, 3)]) == []
    assert flushes.due(11.0, writing=True) == ([], [])
    assert flushes.due(12.0, writing=False) == ([(1, 3.0)], [])
    assert flushes.due(12.5, writing=False) == ([], []), "once"
    assert flushes.cleared(StoreCleared(1, 4, True)) == FlushDone(1, 7)
    assert flushes.cleared(StoreCleared(1, 4, True)) is None


def test_what_keeps_it_from_being_done_in_time_is_said() -> None:
    flushes = StoreFlushes()
    flushes.arrived(ALL, 0.0)
    assert flushes.settled([FlushDone(1, 0, ("2 running requests",))]) == [
        FlushDone(1, 0, ("2 running requests",))
    ]
    flushes.arrived(ALL, 0.0)
    flushes.settled([FlushDone(1, 2)])
    assert flushes.due(5.0, writing=True) == (
        [],
        [FlushDone(1, 2, ("pages on their way to the store",))],
    )
    flushes.arrived(ALL, 0.0)
    flushes.settled([FlushDone(1, 2)])
    flushes.due(1.0, writing=False)
    late = flushes.cleared(StoreCleared(1, 1, False))
    assert late is not None and late.busy


def test_a_flush_that_nobody_waits_for_is_not_answered() -> None:
    flushes = StoreFlushes()
    flushes.arrived(ALL, 0.0)
    flushes.settled([FlushDone(1, 2)])
    flushes.due(0.0, writing=False)
    flushes.arrived(CancelFlush(1), 0.0)
    assert flushes.cleared(StoreCleared(1, 2, True)) is None
