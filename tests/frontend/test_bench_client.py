"""The bench's client against a real server: what it takes for the first token, and what ends a measurement."""

import time

import pytest

from forebay.bench.ttft.load import Client
from forebay.bench.ttft.plan import Group, TtftError, draw
from forebay.core.messages import FinishReason, Usage
from tests.frontend.served import MODEL, Server, says


def client(server: Server, output_len: int = 3) -> Client:
    return Client(server.url, MODEL, output_len)


def test_answers_come_in_order_with_tiers_and_text(server: Server) -> None:
    server.planner.script = says("hello", end=False)
    server.planner.usage = Usage(cached_device=1, cached_host=2, cached_store=4)
    asks = draw("x", Group.HIT, 8, 10, 97, 122)
    answers = client(server).closed_load(asks, 3, "salt")
    assert [answer.index for answer in answers] == list(range(8))
    assert all("".join(position.text for position in answer.output) == "hel" for answer in answers)
    assert all(position.gap == 0.5 for position in answers[0].output)
    assert (answers[0].cached_device, answers[0].cached_host, answers[0].cached_store) == (1, 2, 4)
    assert {submit.salt for submit in server.planner.submits} != {b""}
    assert all(
        submit.params.temperature == 0 and submit.params.ignore_eos
        for submit in server.planner.submits
    )


def test_the_first_token_ends_the_time_to_first_token_and_not_the_last(server: Server) -> None:
    server.planner.script = says("hello", end=False)
    began = time.monotonic_ns()
    (answer,) = client(server).closed_load(draw("x", Group.MISS, 1, 10, 97, 122), 1, "salt")
    assert began <= answer.sent_ns <= time.monotonic_ns()
    assert 0 < answer.ttft_s < answer.total_s, "three tokens are three turns of the planner"


def test_an_open_load_counts_from_when_a_request_was_due(server: Server) -> None:
    server.planner.script = says("hello", end=False)
    asks = draw("x", Group.MISS, 3, 10, 97, 122)
    timed = [
        type(ask)(ask.index, ask.prompt, ask.is_hit, at_s)
        for ask, at_s in zip(asks, (0.0, 0.0, 0.05), strict=True)
    ]
    answers = client(server).open_load(timed, "salt")
    assert answers[2].sent_ns - answers[0].sent_ns == pytest.approx(0.05e9, rel=1e-3)


def test_what_the_server_refuses_or_fails_is_one_line(server: Server) -> None:
    asks = draw("x", Group.MISS, 2, 10, 97, 122)
    with pytest.raises(TtftError, match="does not exist"):
        Client(server.url, "other", 3).closed_load(asks, 1, "salt")
    server.planner.refuse = (FinishReason.REJECTED_FULL, "100 requests are waiting already")
    with pytest.raises(TtftError, match="waiting already"):
        client(server).closed_load(asks, 2, "salt")
    server.planner.refuse = None
    server.planner.break_after = 1
    with pytest.raises(TtftError, match="a rank was lost"):
        client(server).closed_load(asks, 2, "salt")


def test_nobody_there_is_one_line() -> None:
    with pytest.raises(TtftError, match="does not answer /cache"):
        Client("http://127.0.0.1:1", MODEL, 1).get("/cache")
