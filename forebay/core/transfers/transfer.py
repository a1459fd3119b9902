"""The book of transfers: what is under way, which ranks are still to be heard, and what they come to.

    open --the order goes to ranks--> acknowledged(rank, word) ... every rank's final word --> ended

A transfer is one numbered order to ranks. A page counts when every rank has its part of it, so what
a transfer has brought is a fold over the ranks: the MIN of their `Leading` pages, or the AND for
`Each` page. A rank owns the transfer's pages until it has said its final word, whatever became of
the order meanwhile (rule R11). Only the book refuses an acknowledgement that nobody asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import and_
from typing import Any, Generic, Protocol, TypeVar

from forebay.core.messages import ProtocolError


class Fold(Protocol):
    """What the words of all ranks come to."""

    def allows(self, rank: int, word: Any) -> bool:
        """Whether ``rank`` can mean ``word`` after what it has said before."""

    def take(self, rank: int, word: Any) -> None: ...


class Leading:
    """Pages from the front, without a hole: the MIN over ranks. A rank's word only ever rises.

    A fetch that a forward pass follows layer by layer keeps one of these for each layer.
    """

    __slots__ = ("_pages", "_reached")

    def __init__(self, pages: int, ranks: int) -> None:
        self._pages = pages
        self._reached = [0] * ranks

    @property
    def pages(self) -> int:
        return min(self._reached)

    def allows(self, rank: int, word: int) -> bool:
        return self._reached[rank] <= word <= self._pages

    def take(self, rank: int, word: int) -> None:
        self._reached[rank] = word


class Each:
    """Page by page, 1 where every rank heard so far has it: the AND over ranks."""

    __slots__ = ("pages",)

    def __init__(self, pages: int) -> None:
        self.pages = bytearray(b"\1" * pages)

    def allows(self, rank: int, word: bytes) -> bool:
        return len(word) == len(self.pages)

    def take(self, rank: int, word: bytes) -> None:
        self.pages = bytearray(map(and_, self.pages, word))

    def lose(self) -> None:
        """Nothing counts, whatever was said and will be."""
        self.pages = bytearray(len(self.pages))


F = TypeVar("F", bound=Fold)


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer(Generic[F]):
    """``left``: ranks that have not said their final word."""

    number: int
    left: set[int]
    fold: F


T = TypeVar("T", bound=Transfer[Any])


class TransferBook(Generic[T]):
    """The transfers of one kind that are under way. ``kind``: what a refusal calls them."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._open: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[T]:
        """Oldest first, over a moment's copy."""
        return iter(tuple(self._open.values()))

    def get(self, number: int) -> T | None:
        return self._open.get(number)

    def open(self, transfer: T) -> None:
        assert transfer.left and transfer.number not in self._open
        self._open[transfer.number] = transfer

    def acknowledged(
        self, rank: int, number: int, word: int | bytes, pages: int, final: bool = True
    ) -> T:
        """Fold what ``rank`` says, ``pages`` of it in words; a transfer without ``left`` has ended.

        Raises ``ProtocolError`` if the rank was not asked for that, and nothing has changed.
        """
        transfer = self._open.get(number)
        if transfer is None or rank not in transfer.left or not transfer.fold.allows(rank, word):
            raise ProtocolError(
                f"rank {rank} acknowledged {pages} pages of {self._kind} {number}, "
                "which it was not asked for"
            )
        transfer.fold.take(rank, word)
        if final:
            transfer.left.discard(rank)
        return transfer

    def close(self, transfer: T) -> None:
        assert not transfer.left, "a rank may still touch the pages"
        del self._open[transfer.number]

    def clear(self) -> None:
        """The grid is lost: no rank of it touches a page any more."""
        self._open.clear()
