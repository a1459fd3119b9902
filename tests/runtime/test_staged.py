"""The staged route on one rank: it begins and answers only when its compute loop looks."""

import pytest
import zmq

from forebay.core.messages import Cancel, FetchProgress, FromWorker, PageKey, StagedReturn, StagedTaken, StagedTicket
from forebay.core.spans import SpanKind
from forebay.observe.events import SpanRing
from forebay.runtime.staged import StagedRoute

TICKET = StagedTicket(1, 7, 0, (PageKey(0, b"a"), PageKey(1, b"b")))
TAKEN = StagedTaken(1, 0, 7)
ANSWER = FetchProgress(1, 0, 7, 2, True)


class Rank:
    def __init__(self, is_last: bool) -> None:
        self.said: list[FromWorker] = []
        self.fetched: list[StagedTicket] = []
        self.ring = SpanRing("rank")
        self.route = StagedRoute(1, 0, is_last, self.ring, self.fetched.append, self.said.append)


def test_a_ticket_waits_until_the_compute_loop_looks() -> None:
    rank = Rank(is_last=True)
    rank.route.take(TICKET)
    assert not rank.said and not rank.fetched
    rank.route.look()
    assert rank.said == [TAKEN] and rank.fetched == [TICKET]
    assert [span.kind for span in rank.ring] == [SpanKind.STAGED]


def test_the_last_stage_answers_when_it_looks_after_its_reads() -> None:
    rank = Rank(is_last=True)
    rank.route.take(TICKET)
    rank.route.look()
    rank.route.read(7, 2)
    assert rank.said == [TAKEN]
    rank.route.look()
    assert rank.said == [TAKEN, ANSWER]


@pytest.mark.parametrize("order", [StagedReturn(1, 7, 0), Cancel(1, 7)])
@pytest.mark.parametrize("read_first", [False, True])
def test_other_stages_answer_when_those_behind_have_or_nobody_wants_it(order: StagedReturn | Cancel, read_first: bool) -> None:
    rank = Rank(is_last=False)
    rank.route.take(TICKET)
    rank.route.look()
    words = [lambda: rank.route.read(7, 2), lambda: rank.route.take(order)]
    for word in words if read_first else words[::-1]:
        rank.route.look()
        assert rank.said == [TAKEN]
        word()
    rank.route.look()
    assert rank.said == [TAKEN, ANSWER]


def test_a_cancel_after_the_answer_means_nothing() -> None:
    rank = Rank(is_last=True)
    rank.route.take(TICKET)
    rank.route.look()
    rank.route.read(7, 2)
    rank.route.look()
    rank.route.take(Cancel(1, 7))
    rank.route.look()
    assert rank.said == [TAKEN, ANSWER]


def test_an_idle_compute_loop_looks_at_once_and_wakes_for_its_channel() -> None:
    rank = Rank(is_last=True)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    theirs.bind("inproc://plans")
    ours.connect("inproc://plans")
    rank.route.take(TICKET)
    theirs.send(b"plan")
    rank.route.wait(ours)
    assert rank.said == [TAKEN] and ours.recv() == b"plan"
    context.destroy(linger=0)
