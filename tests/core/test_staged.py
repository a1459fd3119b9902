"""The staged route by stories: two stages, each asks and answers between its forwards. Pages hold 4 tokens."""

import pytest

from forebay.core.lifecycle import Phase
from forebay.core.messages import (
    Abort,
    Cancel,
    FetchProgress,
    StagedReturn,
    StagedTaken,
    StagedTicket,
)
from forebay.core.planner import Effects
from forebay.core.transfers.policy import FetchPolicy
from tests.core.test_tickets import BUSY, StoreDesk, ask, host_in_use, store_desk

OTHER = list(range(30, 48))  # four full pages and two tokens


def staged_desk(**config: object) -> StoreDesk:
    return store_desk(staged=True, pp=2, **config)


def begin(desk: StoreDesk) -> StagedTicket:
    effects = ask(desk)
    (order,) = effects.orders
    assert isinstance(order, StagedTicket) and not effects.queries
    return order


def takes(desk: StoreDesk, ticket: StagedTicket, rank: int) -> Effects:
    return desk.take(StagedTaken(1, rank, ticket.transfer))


def answers(desk: StoreDesk, ticket: StagedTicket, rank: int, pages: int) -> Effects:
    return desk.take(FetchProgress(1, rank, ticket.transfer, pages, True))


def walk(desk: StoreDesk, first: int, second: int) -> Effects:
    """A whole round in which the stages find ``first`` and ``second`` pages."""
    ticket = begin(desk)
    takes(desk, ticket, 0)
    takes(desk, ticket, 1)
    answers(desk, ticket, 1, second)
    return answers(desk, ticket, 0, first)


def test_nobody_asks_ahead_and_host_pages_are_taken_for_all_that_is_missing() -> None:
    desk = staged_desk()
    ticket = begin(desk)
    assert (ticket.ranks, len(ticket.pages)) == ((0,), 5)
    assert host_in_use(desk) == 5


def test_the_store_gets_a_hint_where_stages_cannot_look_yet_and_none_where_they_can() -> None:
    desk = staged_desk()
    assert not ask(desk, "long").hints, "nothing runs, so the first stage looks at once"
    ask(desk, "busy", BUSY)
    assert len(desk.plans) == 1, "a forward runs"
    effects = ask(desk, "other", OTHER)
    (hint,) = effects.hints
    (order,) = effects.orders
    assert isinstance(order, StagedTicket)
    assert list(hint.hashes) == [page.hash for page in order.pages] and {
        page.group for page in order.pages
    } == {hint.group}


def test_a_stage_hears_of_it_once_the_stage_before_has_taken_it() -> None:
    desk = staged_desk(tp=2)
    ticket = begin(desk)
    assert not takes(desk, ticket, 0).orders
    (order,) = takes(desk, ticket, 1).orders
    assert order == StagedTicket(1, ticket.transfer, ticket.pages, (2, 3))
    assert not takes(desk, ticket, 2).orders and not takes(desk, ticket, 3).orders


def test_the_answer_travels_back_stage_by_stage_and_only_then_the_request_runs() -> None:
    desk = staged_desk()
    ticket = begin(desk)
    takes(desk, ticket, 0)
    takes(desk, ticket, 1)
    effects = answers(desk, ticket, 1, 5)
    assert effects.orders == [StagedReturn(1, ticket.transfer, (0,))] and effects.plan is None
    plan = answers(desk, ticket, 0, 4).plan
    assert plan is not None and len(plan.loads) == 4  # the MIN over ranks


def test_a_miss_makes_the_same_round_and_leaves_nothing() -> None:
    desk = staged_desk()
    assert walk(desk, 0, 0).plan is not None
    assert host_in_use(desk) == 0
    assert desk.planner.replica.tickets.outcomes["miss"] == 1


def test_an_abort_waits_for_the_last_word_of_those_that_were_told() -> None:
    desk = staged_desk()
    ticket = begin(desk)
    assert Cancel(1, ticket.transfer) in desk.take(Abort("a")).orders
    assert host_in_use(desk) == 5
    assert not takes(desk, ticket, 0).orders  # the next stage will not hear of it
    answers(desk, ticket, 0, 3)
    assert host_in_use(desk) == 0 and desk.planner.replica.tickets.is_idle


def test_a_time_out_uses_what_the_ranks_say_they_have() -> None:
    desk = staged_desk(fetch_policy=FetchPolicy.TIMEOUT)
    ticket = begin(desk)
    takes(desk, ticket, 0)
    takes(desk, ticket, 1)
    desk.now += 60
    desk.planner.resume(desk.now)
    assert Cancel(1, ticket.transfer) in desk.take().orders
    (request,) = desk.planner.replica.waiting
    assert request.phase is Phase.FETCHING
    answers(desk, ticket, 0, 3)
    plan = answers(desk, ticket, 1, 2).plan
    assert plan is not None and len(plan.loads) == 2


@pytest.mark.parametrize("rank", [1, 0])
def test_what_was_not_asked_for_ends_the_epoch(rank: int) -> None:
    desk = staged_desk()
    ticket = begin(desk)
    takes(desk, ticket, 0)
    takes(desk, ticket, 1)
    assert takes(desk, ticket, rank).restart is not None
