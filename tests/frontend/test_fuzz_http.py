"""A moment of `fuzz_http`, and proof that it would find what it looks for."""

import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from forebay.frontend.connection import Connection
from tests.frontend.fuzz_http import fuzz, running_server


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running_server() as port:
        yield port


def rounds(count: int) -> Callable[[], bool]:
    turns = itertools.count()
    return lambda: next(turns) >= count


def test_no_answer_goes_to_the_wrong_request_and_nothing_breaks(port: int) -> None:
    sources, wrong = fuzz(port, 1, rounds(400))
    assert wrong == []
    assert sum(source.answers for source in sources) > 100


@pytest.mark.slow
def test_the_same_for_a_minute(port: int) -> None:
    end = time.monotonic() + 60
    assert fuzz(port, 2, lambda: time.monotonic() >= end)[1] == []


@pytest.mark.parametrize("planted", ["ambiguity", "offer"])
def test_it_finds_what_is_planted(port: int, planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if planted == "ambiguity":
        monkeypatch.setattr(Connection, "_ambiguity", lambda self: None)
    else:  # as servers that take an offer for the end of HTTP/1
        monkeypatch.setattr(Connection, "_without_offer", lambda self: b"")
    assert fuzz(port, 3, rounds(400))[1]
