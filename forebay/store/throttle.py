"""What was prefetched lately, so that a thousand probes of one prefix promote it once.

    (absent) -> TRIGGERED -> IN_FLIGHT -> COMPLETED | FAILED
                          -> ALREADY_RESIDENT | DELEGATED (to the holder, which has a throttle of its own)

A state blocks a repeat until it expires: the healthy ones for ``dedup_ttl_s`` (IN_FLIGHT is refreshed while it lasts), FAILED for
``cooldown_s``. `open_cooldown` (a holder had no memory for a prefetch) blocks everything for ``cooldown_s``: prefetch yields to
eviction and offload. Expiry is lazy, keys are spread over 16 shards with a lock each, and a probe costs O(its own keys).
"""

import threading
from collections.abc import Iterable, Sequence
from enum import IntEnum

SHARDS = 16
MAX_KEYS_PER_SHARD = 65536


class State(IntEnum):
    TRIGGERED = 0
    IN_FLIGHT = 1
    ALREADY_RESIDENT = 2
    DELEGATED = 3
    COMPLETED = 4
    FAILED = 5


_NEXT: dict[State, frozenset[State]] = {
    State.TRIGGERED: frozenset(
        {State.IN_FLIGHT, State.ALREADY_RESIDENT, State.DELEGATED, State.FAILED}
    ),
    State.IN_FLIGHT: frozenset({State.IN_FLIGHT, State.COMPLETED, State.FAILED}),
}


class PrefetchThrottle:
    """Times are the caller's monotonic seconds. Thread-safe."""

    def __init__(
        self,
        dedup_ttl_s: float = 30.0,
        cooldown_s: float = 5.0,
        max_keys_per_shard: int = MAX_KEYS_PER_SHARD,
    ) -> None:
        self.dedup_ttl_s = dedup_ttl_s
        self.cooldown_s = cooldown_s
        self._max_keys = max_keys_per_shard
        self._locks = [threading.Lock() for _ in range(SHARDS)]
        self._shards: list[dict[bytes, tuple[State, float]]] = [{} for _ in range(SHARDS)]
        self._entered = [[0] * len(State) for _ in range(SHARDS)]
        self._cooling_until = 0.0

    def admit(
        self, keys: Sequence[bytes], now: float, *, despite_cooldown: bool = False
    ) -> list[bytes]:
        """The keys that may be prefetched now, in their order; they are TRIGGERED from here on.

        ``despite_cooldown``: a read is waiting for them, so the global cooldown is ignored (and nothing else).
        """
        if self.cooling(now) and not despite_cooldown:
            return []
        admitted = set()
        for shard, some in self._by_shard(keys):
            known = self._shards[shard]
            with self._locks[shard]:
                for key in some:
                    entry = known.get(key)
                    if (entry is None or entry[1] <= now) and self._has_room(known, key, now):
                        known[key] = (State.TRIGGERED, now + self.dedup_ttl_s)
                        admitted.add(key)
                        self._entered[shard][State.TRIGGERED] += 1
        admitted_once = []
        for key in keys:
            if key in admitted:
                admitted.discard(key)
                admitted_once.append(key)
        return admitted_once

    def move(self, keys: Iterable[bytes], state: State, now: float) -> None:
        """Keys whose state has no such step (it expired, or another probe overtook it) are left as they are."""
        until = now + (self.cooldown_s if state is State.FAILED else self.dedup_ttl_s)
        for shard, some in self._by_shard(keys):
            known = self._shards[shard]
            with self._locks[shard]:
                for key in some:
                    entry = known.get(key)
                    if entry is not None and state in _NEXT.get(entry[0], ()):
                        known[key] = (state, until)
                        self._entered[shard][state] += 1

    def state(self, key: bytes, now: float) -> State | None:
        """None: nothing blocks a prefetch of ``key``, but for a cooldown."""
        entry = self._shards[hash(key) % SHARDS].get(key)
        return entry[0] if entry is not None and entry[1] > now else None

    def open_cooldown(self, now: float) -> None:
        self._cooling_until = max(self._cooling_until, now + self.cooldown_s)

    def cooling(self, now: float) -> bool:
        return now < self._cooling_until

    def entered(self) -> dict[State, int]:
        """How often a key came into each state since the start."""
        return {state: sum(shard[state] for shard in self._entered) for state in State}

    def counts(self, now: float) -> dict[State, int]:
        """Live keys by state; O(keys)."""
        counts = dict.fromkeys(State, 0)
        for shard, known in enumerate(self._shards):
            with self._locks[shard]:
                for state, until in known.values():
                    counts[state] += until > now
        return counts

    def _by_shard(self, keys: Iterable[bytes]) -> list[tuple[int, list[bytes]]]:
        grouped: dict[int, list[bytes]] = {}
        for key in keys:
            grouped.setdefault(hash(key) % SHARDS, []).append(key)
        return list(grouped.items())

    def _has_room(self, known: dict[bytes, tuple[State, float]], key: bytes, now: float) -> bool:
        """Room for one more; a full shard is swept first, and a shard full of living states admits nothing new."""
        if len(known) < self._max_keys or key in known:
            return True
        for old in [old for old, (_, until) in known.items() if until <= now]:
            del known[old]
        return len(known) < self._max_keys
