"""A store without machines: what every rank has stored, by page hash and rank. It outlives grids, and objects may vanish at any time.

Faults of the store are *spells*: for as long as one lasts, a share of the reads and writes goes wrong in its way.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

GARBAGE = -1  # no position's stamp


class Outcome(Enum):
    """What becomes of one read or write of one page."""

    GOOD = "good"
    MISS = "miss"
    ERROR = "error"  # refused at once
    SHORT = "short"  # the page's second half is never written
    CORRUPT = "corrupt"  # other bytes arrive, and their checksum is wrong
    OTHER = "other"  # what another key's page holds arrives, sound in itself
    HANG = "hang"  # nothing happens before the time-out


@dataclass(frozen=True, slots=True)
class Spell:
    outcome: Outcome
    until: float
    share: float


class FakeStore:
    """``objects``: what is there. ``ever``: what has been there, for the durability checker. ``loses_on_query``: of the pages that an
    answer is about to promise, this share is evicted as the answer leaves; ``silent_until``: no query is answered before;
    ``down_until``: nothing is there to answer, not even later, and reads and writes are refused."""

    def __init__(self, randomness: random.Random, failures: float = 0.0) -> None:
        self._random = randomness
        self._failures = failures
        self._spells: list[Spell] = []
        self.objects: dict[tuple[bytes, int], list[int | None]] = {}
        self.ever: set[tuple[bytes, int]] = set()
        self.loses_on_query = 0.0
        self.silent_until = 0.0
        self.down_until = 0.0

    def match_prefix(self, hashes: Sequence[bytes], ranks: int) -> int:
        """Leading pages of which every rank's part is there."""
        count = 0
        while count < len(hashes) and all(
            (hashes[count], rank) in self.objects for rank in range(ranks)
        ):
            count += 1
        if self.loses_on_query:
            for hash in hashes[:count]:
                if self._random.random() < self.loses_on_query:
                    self.objects.pop((hash, self._random.randrange(ranks)), None)
        return count

    def evict(self, share: float) -> None:
        for key in list(self.objects):
            if self._random.random() < share:
                del self.objects[key]

    def enchant(self, spell: Spell) -> None:
        self._spells.append(spell)

    def outcome(self, now: float) -> Outcome:
        """What the next operation meets."""
        if now < self.down_until:
            return Outcome.ERROR
        for spell in self._spells:
            if now < spell.until and self._random.random() < spell.share:
                return spell.outcome
        return (
            Outcome.ERROR
            if self._failures and self._random.random() < self._failures
            else Outcome.GOOD
        )

    def put(self, hash: bytes, rank: int, content: list[int | None]) -> None:
        self.objects[hash, rank] = list(content)
        self.ever.add((hash, rank))

    def get(self, hash: bytes, rank: int) -> list[int | None] | None:
        return self.objects.get((hash, rank))

    def get_other(self, hash: bytes, rank: int) -> tuple[bytes, list[int | None]] | None:
        """The key and the content of some other page of the rank; None: it has no other."""
        others = [key for key in self.objects if key[1] == rank and key[0] != hash]
        if not others:
            return None
        key = self._random.choice(others)
        return key[0], self.objects[key]
