"""The staged route on one rank: it begins and answers between its forwards, and never during one."""

import pytest

from forebay.core.messages import (
    Cancel,
    FetchProgress,
    FromWorker,
    PageKey,
    StagedReturn,
    StagedTaken,
    StagedTicket,
)
from forebay.core.spans import SpanKind
from forebay.observe.events import SpanRing
from forebay.runtime.staged import StagedRoute

TICKET = StagedTicket(1, 7, (PageKey(0, b"a"), PageKey(1, b"b")), (0,))
TAKEN = StagedTaken(1, 0, 7)
ANSWER = FetchProgress(1, 0, 7, 2, True, 4)


class Rank:
    def __init__(self, is_last: bool) -> None:
        self.said: list[FromWorker] = []
        self.fetched: list[StagedTicket] = []
        self.ring = SpanRing("rank")
        self.route = StagedRoute(1, 0, is_last, self.ring, self.fetched.append, self.said.append)


def test_a_ticket_waits_for_the_running_forward_and_for_nothing_else() -> None:
    rank = Rank(is_last=True)
    with rank.route.forward():
        rank.route.take(TICKET)
        assert not rank.said and not rank.fetched
    assert rank.said == [TAKEN] and rank.fetched == [TICKET]
    assert [span.kind for span in rank.ring] == [SpanKind.TICKET]
    idle = Rank(is_last=True)
    idle.route.take(TICKET)
    assert idle.said == [TAKEN]


def test_the_last_stage_answers_once_its_reads_are_done() -> None:
    rank = Rank(is_last=True)
    rank.route.take(TICKET)
    with rank.route.forward():
        rank.route.read(7, 2, 4)
        assert rank.said == [TAKEN]
    assert rank.said == [TAKEN, ANSWER]


@pytest.mark.parametrize("order", [StagedReturn(1, 7, (0,)), Cancel(1, 7)])
@pytest.mark.parametrize("read_first", [False, True])
def test_other_stages_answer_when_those_behind_have_or_nobody_wants_it(
    order: StagedReturn | Cancel, read_first: bool
) -> None:
    rank = Rank(is_last=False)
    rank.route.take(TICKET)
    words = [lambda: rank.route.read(7, 2, 4), lambda: rank.route.take(order)]
    for word in words if read_first else words[::-1]:
        assert rank.said == [TAKEN]
        word()
    assert rank.said == [TAKEN, ANSWER]


def test_a_cancel_after_the_answer_means_nothing() -> None:
    rank = Rank(is_last=True)
    rank.route.take(TICKET)
    rank.route.read(7, 2, 4)
    rank.route.take(Cancel(1, 7))
    assert rank.said == [TAKEN, ANSWER]


def test_a_forward_that_fails_leaves_the_route_open() -> None:
    rank = Rank(is_last=True)
    with pytest.raises(RuntimeError), rank.route.forward():
        raise RuntimeError
    rank.route.take(TICKET)
    assert rank.said == [TAKEN]
