"""What carries bytes: a queue with bandwidth, latency and jitter, in virtual time."""

import random


class Link:
    """One direction of a copy engine, a NIC or an SSD: transfers follow one another at its bandwidth.

    ``jitter``: a transfer takes up to this share more or less. ``moved``: bytes so far; ``busy_s``: time they took.
    """

    __slots__ = ("_jitter", "_latency_s", "_random", "_s_per_byte", "busy_s", "free_at", "moved")

    def __init__(
        self, gb_s: float, latency_s: float, jitter: float, randomness: random.Random
    ) -> None:
        self._s_per_byte = 1e-9 / gb_s
        self._latency_s = latency_s
        self._jitter = jitter
        self._random = randomness
        self.free_at = 0.0
        self.moved = 0
        self.busy_s = 0.0

    def move(self, now: float, size: int) -> float:
        """When ``size`` bytes that are asked for now have arrived."""
        seconds = size * self._s_per_byte
        if self._jitter:
            seconds *= 1.0 + self._jitter * (2.0 * self._random.random() - 1.0)
        begin = now if now > self.free_at else self.free_at
        self.free_at = begin + seconds
        self.moved += size
        self.busy_s += seconds
        return self.free_at + self._latency_s

    def reset(self) -> None:
        """As new: nothing has moved."""
        self.free_at = self.busy_s = 0.0
        self.moved = 0
