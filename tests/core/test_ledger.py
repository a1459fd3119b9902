"""What becomes of every stored page that was asked for: the exits of queries, tickets and staged fetches."""

from collections.abc import Callable

import pytest

from forebay.core import invariants
from forebay.core.ledger import REASONS
from forebay.core.messages import (
    Abort,
    Cancel,
    FetchProgress,
    Flush,
    PlanDone,
    Sample,
    StagedTaken,
    StagedTicket,
    Ticket,
)
from forebay.core.planner import GridLost, GridReady
from forebay.core.transfers.lookup import QueryDone
from forebay.core.transfers.policy import TICKETS_AT_ONCE, FetchPolicy
from tests.core.test_tickets import BUSY, StoreDesk, ask, issue, progress, store_desk

OTHER = list(range(101, 122))
THIRD = list(range(201, 222))


def answer(desk: StoreDesk, request_id: str, pages: int, prompt: list[int]) -> Ticket:
    (query,) = ask(desk, request_id, prompt).queries
    (ticket,) = desk.take(QueryDone(query.number, pages)).orders
    assert isinstance(ticket, Ticket)
    return ticket


def later(desk: StoreDesk, seconds: float) -> None:
    """Time passes, and ranks have been heard meanwhile."""
    desk.now += seconds
    desk.planner.resume(desk.now)
    desk.take()


def used() -> StoreDesk:
    desk = store_desk()
    progress(desk, issue(desk), 5)
    return desk


def failed() -> StoreDesk:
    desk = store_desk()
    progress(desk, issue(desk), 3)
    return desk


def aborted() -> StoreDesk:
    desk = store_desk()
    ticket = issue(desk)
    progress(desk, ticket, 2, final=False)
    desk.take(Abort("a"))
    progress(desk, ticket, 3)
    return desk


def aborted_while_asking() -> StoreDesk:
    desk = store_desk()
    (query,) = ask(desk).queries
    desk.take(Abort("a"))
    desk.take(QueryDone(query.number, 4))
    later(desk, 2.0)
    return desk


def never_answered() -> StoreDesk:
    desk = store_desk()
    ask(desk)
    later(desk, 0.2)
    later(desk, 2.0)
    return desk


def answered_when_it_runs() -> StoreDesk:
    desk = store_desk()
    (query,) = ask(desk).queries
    later(desk, 0.2)
    desk.take(QueryDone(query.number, 3))
    return desk


def below_threshold() -> StoreDesk:
    desk = store_desk()
    (query,) = ask(desk).queries
    desk.take(QueryDone(query.number, 1))
    return desk


def slower_than_compute() -> StoreDesk:
    desk = store_desk()
    ticket = issue(desk)
    later(desk, 60.0)
    progress(desk, ticket, 5)
    (query,) = ask(desk, "b", OTHER).queries
    desk.take(QueryDone(query.number, 4))
    return desk


def no_host_page() -> StoreDesk:
    desk = store_desk(host_pages=1)
    (query,) = ask(desk).queries
    desk.take(QueryDone(query.number, 5))
    desk.take()
    return desk


def few_host_pages() -> StoreDesk:
    desk = store_desk(host_pages=5)
    progress(desk, issue(desk), 4)
    return desk


def refused_and_asked_anew() -> StoreDesk:
    """Host pages are short, and its turn does not come, so it asks again and gets them."""
    desk = store_desk(host_pages=6, max_running=1)
    busy = ask(desk, "busy", BUSY).plan
    assert busy is not None
    first = answer(desk, "b", 5, OTHER)
    (query,) = ask(desk).queries
    desk.take(QueryDone(query.number, 5))
    desk.take(Abort("b"))
    progress(desk, first, 0)
    while not (queries := desk.take().queries):
        pass
    (ticket,) = desk.take(QueryDone(queries[0].number, 4)).orders
    assert isinstance(ticket, Ticket)
    progress(desk, ticket, 4)
    desk.take(Abort("busy"), PlanDone(1, 0, busy.number, (Sample(busy.pieces[0].slot, 9),)))
    return desk


def timed_out() -> StoreDesk:
    desk = store_desk(fetch_policy=FetchPolicy.TIMEOUT)
    progress(desk, issue(desk), 3, final=False)
    later(desk, 3.0)
    return desk


def best_effort() -> StoreDesk:
    desk = store_desk(fetch_policy=FetchPolicy.BEST_EFFORT)
    (query,) = ask(desk).queries
    desk.take(QueryDone(query.number, 5))
    return desk


def lost_with_its_grid() -> StoreDesk:
    desk = store_desk()
    progress(desk, issue(desk), 3, final=False)
    desk.take(GridLost(1, "killed"))
    desk.take(GridReady(2, 32, 0.001, 16))
    return desk


def brought_and_lost_with_its_grid() -> StoreDesk:
    desk = store_desk(max_running=1)
    ask(desk, "busy", BUSY)
    progress(desk, issue(desk), 5)
    desk.take(GridLost(1, "killed"))
    return desk


def brought_and_evicted() -> StoreDesk:
    desk = store_desk(max_running=1)
    ask(desk, "busy", BUSY)
    progress(desk, issue(desk), 5)
    desk.take(Abort("a"))
    desk.take(Flush(1, ("host",), 0.0))
    return desk


def staged(
    found: int,
    done: int,
    policy: FetchPolicy = FetchPolicy.WAIT,
    end: Callable[[StoreDesk], object] | None = None,
) -> StoreDesk:
    desk = store_desk(staged=True, fetch_policy=policy)
    (ticket,) = ask(desk).orders
    assert isinstance(ticket, StagedTicket)
    desk.take(StagedTaken(1, 0, ticket.transfer))
    if end is not None:
        end(desk)
    desk.take(FetchProgress(1, 0, ticket.transfer, done, True, found))
    return desk


EXITS: list[tuple[Callable[[], StoreDesk], int, int, dict[str, int]]] = [
    (used, 5, 5, {}),
    (failed, 5, 3, {"failed": 2}),
    (aborted, 5, 0, {"aborted": 5}),
    (aborted_while_asking, 4, 0, {"aborted": 4}),
    (never_answered, 5, 0, {"query_late": 5}),
    (answered_when_it_runs, 3, 0, {"query_late": 3}),
    (below_threshold, 1, 0, {"below_threshold": 1}),
    (slower_than_compute, 9, 5, {"slower_than_compute": 4}),
    (no_host_page, 5, 0, {"no_host_pages": 5}),
    (few_host_pages, 5, 4, {"no_host_pages": 1}),
    (refused_and_asked_anew, 9, 4, {"no_host_pages": 1, "aborted": 4}),
    (timed_out, 5, 3, {"timeout": 2}),
    (best_effort, 5, 0, {"best_effort": 5}),
    (lost_with_its_grid, 5, 0, {"grid_lost": 5}),
    (brought_and_lost_with_its_grid, 5, 0, {"grid_lost": 5}),
    (brought_and_evicted, 5, 0, {"evicted": 5}),
    (lambda: staged(found=0, done=0), 0, 0, {}),
    (lambda: staged(found=5, done=5), 5, 5, {}),
    (lambda: staged(found=4, done=3), 4, 3, {"failed": 1}),
    (
        lambda: staged(4, 2, FetchPolicy.TIMEOUT, lambda desk: later(desk, 60.0)),
        4,
        2,
        {"timeout": 2},
    ),
    (lambda: staged(4, 0, end=lambda desk: desk.take(Abort("a"))), 4, 0, {"aborted": 4}),
]


@pytest.mark.parametrize(
    ("play", "wanted", "came", "unused"),
    EXITS,
    ids=[f"{index}-{row[0].__name__}" for index, row in enumerate(EXITS)],
)
def test_every_exit_is_counted_once(
    play: Callable[[], StoreDesk], wanted: int, came: int, unused: dict[str, int]
) -> None:
    replica = play().planner.replica
    invariants.check(replica)
    ledger = replica.ledger
    assert (ledger.wanted, ledger.used, dict(ledger.unused), ledger.brought) == (
        wanted,
        came,
        unused,
        0,
    )
    assert not replica.tickets.pages_under_way


def test_the_snapshot_says_it_in_tokens() -> None:
    assert aborted().planner.snapshot().unused_tokens == {"aborted": 20}


def test_all_reasons_but_those_that_stories_tell_are_in_the_table() -> None:
    """ "covered" is in `test_tickets`, "anchor_lost" in field report P2's scenario."""
    assert {*REASONS} - {"covered", "anchor_lost"} == {
        why for _, _, _, unused in EXITS for why in unused
    }


def test_the_time_of_a_ticket_that_waits_for_others_begins_when_a_rank_comes_to_it() -> None:
    assert TICKETS_AT_ONCE == 2
    desk = store_desk(host_pages=32, fetch_policy=FetchPolicy.TIMEOUT)
    first, second = issue(desk), answer(desk, "b", 5, OTHER)
    later(desk, 1.5)
    third = answer(desk, "c", 5, THIRD)
    later(desk, 0.4)
    progress(desk, first, 5)
    begun_at = desk.now
    progress(desk, third, 2, final=False)
    orders = []
    while desk.now < begun_at + 1.6:
        desk.now += 0.3
        desk.planner.resume(desk.now)
        orders += desk.take().orders
    assert orders == [Cancel(1, second.transfer)], (
        "the second's time is over, the third's has begun late"
    )
    later(desk, 0.5)
    assert desk.planner.replica.tickets.outcomes["timeout"] == 2
