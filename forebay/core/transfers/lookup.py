"""Questions to the store, how much of a prefix it has, and what is asked once more.

    ask --Query--> [answer in time?] --> answered: what the store has, if its request still waits
                        '--late: its request goes on; the answer may still issue a ticket
    refuse --some steps later--> due: the request may ask again

A query has an end of its own, so no request waits for a store that does not answer. What a refusal
or an unheard answer was about is counted by the ledger once nothing can come of it any more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forebay.core.ledger import FetchLedger
from forebay.core.lifecycle import Cause, Phase, RequestState, move
from forebay.core.request import Request

QUERY_S = 0.1
FORGET_S = 1.0  # an answer that is later than that is not waited for
MAX_RETRIES = 8
RETRY_STEPS = 8


@dataclass(frozen=True, slots=True)
class Query:
    """Effect: ask the store how many leading ``hashes`` it has all parts of.

    The answer is `QueryDone`, within `QUERY_S`. ``group``: the hash of the prefix's first page,
    under which they were stored.
    """

    number: int
    hashes: tuple[bytes, ...]
    group: bytes = b""


@dataclass(frozen=True, slots=True)
class QueryDone:
    number: int
    pages: int


@dataclass(frozen=True, slots=True)
class Hint:
    """Effect: these pages of ``group`` will be read from the store, but not at once.

    The store may bring them nearer. Nobody waits for it.
    """

    hashes: tuple[bytes, ...]
    group: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What the store said to a request that still waits. ``stored``: the leading hashes it has."""

    request: Request
    asked_at: float
    stored: tuple[bytes, ...]


class _Asked(NamedTuple):
    request: Request
    due: float
    hashes: tuple[bytes, ...]


class _Refusal(NamedTuple):
    """Pages that were not fetched although they are stored; asked again at ``step``."""

    why: str
    hashes: Sequence[bytes]
    step: int


class _Unheard(NamedTuple):
    """A query whose request waits no more.

    Its answer, until ``forget_at``, says how many ``pages`` of those asked for were stored.
    """

    why: str
    pages: int
    forget_at: float


class Lookup:
    """All queries of one replica."""

    def __init__(self, ledger: FetchLedger) -> None:
        self._ledger = ledger
        self._asked: dict[int, _Asked] = {}
        self._unheard: dict[int, _Unheard] = {}
        self._refusals: dict[str, _Refusal] = {}  # by request id
        self._step = 0
        self._queries: list[Query] = []

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def will_retry(self) -> bool:
        return bool(self._refusals)

    @property
    def pages_under_way(self) -> int:
        """Pages counted as wanted that may be asked for again."""
        return sum([len(refusal.hashes) for refusal in self._refusals.values()])

    @property
    def deadlines(self) -> list[float]:
        return [
            due if request.phase is Phase.ASKING else due + FORGET_S
            for request, due, _ in self._asked.values()
        ]

    def take_queries(self) -> list[Query]:
        queries, self._queries = self._queries, []
        return queries

    # -------------------------------------------------------------------------- queries

    def ask(self, number: int, request: Request, hashes: tuple[bytes, ...], now: float) -> None:
        self._asked[number] = _Asked(request, now + QUERY_S, hashes)
        self._queries.append(Query(number, hashes, request.hashes[0]))
        move(request, Cause.QUERY)

    def answered(self, done: QueryDone) -> Answer | None:
        """None if nothing waits for it any more: then it only counts."""
        unheard = self._unheard.pop(done.number, None)
        if unheard is not None:
            self._ledger.refuse(unheard.why, min(done.pages, unheard.pages))
        asked = self._asked.pop(done.number, None)
        if asked is None:
            return None
        request, due, hashes = asked
        stored = hashes[: done.pages]
        if request.state is not RequestState.WAITING:
            self._ledger.refuse("query_late", len(stored))
            return None
        move(request, Cause.ANSWER)
        return Answer(request, due - QUERY_S, stored)

    def expire(self, now: float) -> int:
        """Late queries are misses for now: returns how many have become so."""
        self._step += 1
        late = 0
        for number, (request, due, hashes) in tuple(self._asked.items()):
            if now >= due and request.phase is Phase.ASKING:
                move(request, Cause.LATE)  # a late hit may still bring a ticket while it waits
                late += 1
            if now >= due + FORGET_S:
                del self._asked[number]
                self._ledger.refuse("query_late", len(hashes))
        for number, unheard in tuple(self._unheard.items()):
            if now >= unheard.forget_at:
                del self._unheard[number]
                self._ledger.refuse(unheard.why, unheard.pages)
        return late

    # -------------------------------------------------------------------------- what is asked again

    def refuse(self, request: Request, why: str, hashes: Sequence[bytes], again: bool) -> None:
        """Stored pages that are not fetched now.

        What they come to is known once the request asks ``again`` or waits no more.
        """
        if again and request.retries < MAX_RETRIES:
            request.retries += 1
            self._ledger.wanted += len(hashes)
            self._refusals[request.request_id] = _Refusal(why, hashes, self._step + RETRY_STEPS)
        else:
            self._ledger.refuse(why, len(hashes))

    def due(self, requests: Mapping[str, Request]) -> Iterator[tuple[Request, _Refusal]]:
        """Requests whose turn it is to ask again; what was refused is wanted no more."""
        for request_id, refusal in tuple(self._refusals.items()):
            request = requests.get(request_id)
            if request is None or request.state is not RequestState.WAITING:
                self._give_up(request_id)
            elif self._step >= refusal.step and request.phase is Phase.SETTLED:
                del self._refusals[request_id]
                self._ledger.wanted -= len(refusal.hashes)
                yield request, refusal

    # -------------------------------------------------------------------------- ends

    def drop(self, request: Request) -> None:
        """It waits for nothing any more."""
        self._give_up(request.request_id)
        for number, asked in tuple(self._asked.items()):
            if asked.request is request:
                late = request.phase is Phase.SETTLED
                self._stop_hearing(number, "query_late" if late else "aborted")

    def clear(self) -> None:
        """The grid is lost: of the store's answers only how many pages they are about counts."""
        for number in tuple(self._asked):
            self._stop_hearing(number, "grid_lost")
        for request_id in tuple(self._refusals):
            self._give_up(request_id)
        self._queries.clear()

    def _stop_hearing(self, number: int, why: str) -> None:
        asked = self._asked.pop(number)
        self._unheard[number] = _Unheard(why, len(asked.hashes), asked.due + FORGET_S)

    def _give_up(self, request_id: str) -> None:
        refusal = self._refusals.pop(request_id, None)
        if refusal is not None:
            self._ledger.leave(refusal.why, len(refusal.hashes))
