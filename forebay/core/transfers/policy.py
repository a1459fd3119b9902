"""What is worth a fetch, how long a request waits for it, and how much host memory fetches may hold."""

import math
from collections.abc import Sized
from enum import StrEnum

TICKETS_AT_ONCE = 2  # that a rank reads: a long one must not hold up a short one (field report P14)
HOLD_SHARE = 0.8
REFUSALS_PER_TRY = 32
SMOOTHING = 0.2
LEAST_PATIENCE_S = 2.0
MOST_PATIENCE_S = 30.0
PATIENCE_S_PER_KTOKEN = 0.1


class FetchPolicy(StrEnum):
    """How long a request waits for its ticket.

    To the end, not at all once it could run, or for a time that grows with the hit.
    """

    WAIT = "wait"
    BEST_EFFORT = "best-effort"
    TIMEOUT = "timeout"


class FetchRules:
    """A fetch of pages against computing them."""

    def __init__(self, policy: FetchPolicy, page_size: int, threshold_tokens: int) -> None:
        self.policy = policy
        self._page_size = page_size
        self._threshold = threshold_tokens
        self._s_per_page = 0.0  # 0: not measured yet
        self._refusals = 0

    def is_worth(self, pages: Sized) -> bool:
        return bool(len(pages)) and len(pages) * self._page_size >= self._threshold

    def pays(self, compute_s: float) -> bool:
        """Whether a page comes sooner than in ``compute_s``, which is what computing it takes.

        Unmeasured = fetch; estimates decay as 1 refusal in 32 is tried all the same.
        """
        if not self._s_per_page or self._s_per_page <= compute_s:
            return True
        self._refusals += 1
        return self._refusals % REFUSALS_PER_TRY == 0

    def measure(self, pages: int, seconds: float) -> None:
        """A fetch has brought ``pages`` in ``seconds``."""
        if pages:
            weight = SMOOTHING if self._s_per_page else 1.0
            self._s_per_page += (seconds / pages - self._s_per_page) * weight

    def patience_s(self, pages: int) -> float:
        """How long a fetch may take from its first byte on."""
        if self.policy is not FetchPolicy.TIMEOUT:
            return math.inf
        seconds = LEAST_PATIENCE_S + PATIENCE_S_PER_KTOKEN * pages * self._page_size / 1024
        return min(seconds, MOST_PATIENCE_S)

    def room(self, capacity: int, held: int) -> int:
        """Host pages that fetches may still take, of ``capacity`` in all."""
        return int(HOLD_SHARE * capacity) - held
