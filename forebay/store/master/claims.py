"""What a holder may claim of generations: what a master can have given out by now, and nothing above it.

    0 ... what masters gave out ... wall clock << 20 ..................... + 100 years << 20 ................ 2^63
                                     (a new master's first)                  (the highest claim, rising)

Masters rise above whatever is claimed, or a removed key could come back; so without a bound one liar could use all generations up, and
others then could not say theirs. The bound rises by 2^20 a millisecond and no master gives out as many: so what a master gave out above
the worst claim is below the bound of every later one, and who tells the truth is never above it. That holds for as long as wall clocks
are less than the margin apart.
"""

from dataclasses import dataclass

from forebay.store.wire.messages import Dropped, HolderToMaster, Inventory, Persisted, Register

GENERATIONS_PER_MS = 1 << 20
MARGIN_MS = 100 * 365 * 86_400_000


def first_generation(wall_ms: int) -> int:
    """Where a master begins: above all earlier ones' unless the wall clock jumped back, and then claims help."""
    return wall_ms * GENERATIONS_PER_MS


@dataclass(frozen=True, slots=True)
class Bound:
    """Of a master that began at ``started`` (monotonic seconds) with generation ``first``."""

    started: float
    first: int

    def at(self, now: float) -> int:
        """No holder that tells the truth has met a generation above this, unless this master gave it out itself."""
        elapsed_ms = int((now - self.started) * 1000)
        return self.first + (elapsed_ms + MARGIN_MS) * GENERATIONS_PER_MS


def highest(message: HolderToMaster) -> int:
    """The highest generation or stamp that ``message`` names, 0 if it names none."""
    match message:
        case Persisted(entries) | Dropped(entries):
            return max([held.generation for held in entries], default=0)
        case Register():
            return message.highest_generation
        case Inventory(_, memory, ssd, graves):
            named = [one.generation for held in (memory, ssd, graves) for one in held]
            return max([*named, *(held.stamp for held in memory)], default=0)
    return 0
