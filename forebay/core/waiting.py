"""Requests that hold no pages, in the order in which they are to be admitted: priority, then arrival."""

import bisect
from collections.abc import Iterator

from forebay.core.lifecycle import RequestState
from forebay.core.request import Request


class WaitingQueue:
    """A sorted list; ``Request.order`` is unique. Iteration is from first to last over a moment's copy."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def add(self, request: Request) -> None:
        assert request.state is RequestState.WAITING
        bisect.insort(self._requests, request, key=_order)

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._requests, request.order, key=_order)
        assert self._requests[index] is request
        del self._requests[index]


def _order(request: Request) -> tuple[int, int]:
    return request.order
