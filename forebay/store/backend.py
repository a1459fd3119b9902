"""The seam between the engine and whatever keeps pages below host memory (L3).

A *key* is namespace + page hash. A *part* is the (layer range, head range) piece of a page's KV that one rank owns. The object
stored under ``key`` + ``part`` is one contiguous page block (DESIGN 4.2). Every call is bounded by its ``timeout_s``, answers item
by item, and raises nothing for what a store may do on a bad day: slow, dead, short, corrupt are statuses. Contract tests in
`tests/store/` run against every backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from typing_extensions import Buffer


class Status(IntEnum):
    """What became of one key. ``OK`` and ``EXISTS`` mean that the bytes are there."""

    OK = 0
    EXISTS = 1
    NOT_FOUND = 2
    NO_SPACE = 3
    QUOTA_EXCEEDED = 4
    LEASE_EXPIRED = 5
    CHECKSUM = 6
    UNAVAILABLE = 7
    TIMEOUT = 8
    INVALID = 9


@dataclass(frozen=True, slots=True)
class GetItem:
    """Read ``length`` bytes of the object from ``offset`` into the front of ``buffer`` (writable, at least that long).

    After any status but ``OK`` the buffer's bytes are undefined.
    """

    key: bytes
    offset: int
    length: int
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class PutItem:
    """Store the whole of ``buffer`` (contiguous) under ``key``. The buffer is read before the call returns, never after."""

    key: bytes
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Health:
    """``ok``: the backend answers. ``detail``: one line for whoever is on call."""

    ok: bool
    detail: str = ""


class PageStore(Protocol):
    """What the engine asks of L3. Thread-safe; the data path releases the GIL."""

    def match_prefix(self, keys: Sequence[bytes], parts: Sequence[bytes], *, hint: bool, timeout_s: float) -> int:
        """How many leading ``keys`` have *every* one of ``parts``. ``hint``: they will be read soon, bring them nearer.

        0 if the store does not answer in time: a late answer is a miss.
        """
        ...

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]: ...

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        """An object of equal length under an existing key is success (``EXISTS``): keys name their content."""
        ...

    def health(self) -> Health: ...

    def close(self) -> None:
        """Release threads, sockets and files. What was acknowledged stays stored."""
        ...
