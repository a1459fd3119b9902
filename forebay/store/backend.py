"""The seam between the engine and whatever keeps pages below host memory (L3).

A *key* is namespace + page hash. A *part* is the (layer range, head range) piece of a page's KV that one rank owns. The object
stored under ``key`` + ``part`` is one contiguous page block. Every call is bounded by its ``timeout_s``, answers item
by item, and raises nothing for what a store may do on a bad day: slow, dead, short, corrupt are statuses. Contract tests in
`tests/store/` run against every backend.

A *group* is what a store of several masters keeps with one of them: an engine's is the hash of a prefix's first page, so a dead master
is not a hole in every prefix. An object is asked for under the group that it was put with; stores of one piece need not look at it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    group: bytes = b""


@dataclass(frozen=True, slots=True)
class PutItem:
    """Store the whole of ``buffer`` (contiguous) under ``key``. The buffer is read before the call returns, never after."""

    key: bytes
    buffer: Buffer
    group: bytes = b""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What only some stores can do. Without one of them pages come all the same; `lost` says what it costs."""

    hints: bool = True  # it brings nearer what will be read soon
    ranged_reads: bool = True  # a part of a value costs only that part
    lent_memory: bool = True  # it writes into host pages by itself
    tells_losers: bool = True  # of writers of one key at once, all but one are told EXISTS

    def lost(self) -> tuple[str, ...]:
        """A line for each that is missing."""
        lines = {
            "hints": "no SSD tier to bring pages up from ahead of time",
            "ranged_reads": "a grid of another shape reads whole values for its parts",
            "lent_memory": "values pass through a socket, not straight into host pages",
        }
        return tuple(line for name, line in lines.items() if not getattr(self, name))


@dataclass(frozen=True, slots=True)
class Health:
    """``ok``: the backend answers. ``detail``: one line for whoever is on call."""

    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StoreUse:
    """``sizes``: objects, and capacity and use in bytes, by name. ``counters``: the store's own, if it keeps any; ``throttle``: keys
    by what this client's prefetches came to."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    throttle: Mapping[str, int] = field(default_factory=dict)


class PageStore(Protocol):
    """What the engine asks of L3. Thread-safe; the data path releases the GIL."""

    @property
    def capabilities(self) -> Capabilities: ...

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes],
        *,
        hint: bool,
        timeout_s: float,
        group: bytes = b"",
    ) -> int:
        """How many leading ``keys``, all of ``group``, have *every* one of ``parts``. ``hint``: they will be read soon, bring them
        nearer.

        0 if the store does not answer in time: a late answer is a miss.
        """
        ...

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]: ...

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        """An object of equal length under an existing key is success (``EXISTS``): keys name their content."""
        ...

    def health(self) -> Health: ...

    def use(self) -> StoreUse:
        """For people and metrics; empty if the store does not answer."""
        ...

    def clear(self, parts: Sequence[bytes], timeout_s: float) -> int:
        """Remove the objects whose key ends in one of ``parts``, as far as the time allows; how many."""
        ...

    def close(self) -> None:
        """Release threads, sockets and files. What was acknowledged stays stored."""
        ...
