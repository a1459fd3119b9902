"""When not to ask a store: a circuit breaker, sans-IO. Times are given, monotonic seconds.

    CLOSED --a time-out, a call that does not return, or FAILURES in a row--> OPEN --the pause is over: one probe--> PROBING
      ^  |                                                                    ^ pause doubles ------it failed-------'   |
      |  '--an answer that may mean "nobody there": checked by a probe        |                                         |
      |           '--it failed------------------------------------------------'                                         |
      '-----------------------------------------the probe went well-----------------------------------------------------'

While it is not CLOSED no call is let through: whoever asks goes on without the store at once. Only probes reach it. The pause shrinks
to its first length when a call goes well, so a store that passes probes and fails calls is tried less and less often.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum

FAILURES = 3
GRACE_S = 1.0
PAUSE_S = 0.5
PAUSE_MAX_S = 30.0
CHECK_EVERY_S = 2.0


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Outcome(Enum):
    """What a call says of the store. ``UNSURE``: the answer would be the same if nobody were there."""

    GOOD = "good"
    UNSURE = "unsure"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Transition:
    """``down_s``: how long the store was not asked, when it is again."""

    is_closed: bool
    reason: str
    down_s: float = 0.0


class Breaker:
    """Not thread-safe. ``reason``: why it is not CLOSED, or was last. ``openings`` and ``refused`` calls only rise."""

    def __init__(self) -> None:
        self.state = State.CLOSED
        self.reason = ""
        self.openings = 0
        self.refused = 0
        self._failures = 0
        self._calls: dict[int, float] = {}  # under way, by deadline
        self._number = 0
        self._pause_s = PAUSE_S
        self._probe_at: float | None = None
        self._checked_at = float("-inf")
        self._opened_at = 0.0
        self._transitions: list[Transition] = []

    def begin(self, now: float, timeout_s: float) -> int | None:
        """A call wants to go out: its number, or None if it must not."""
        self.look(now)
        if self.state is not State.CLOSED:
            self.refused += 1
            return None
        self._number += 1
        self._calls[self._number] = now + timeout_s + GRACE_S
        return self._number

    def end(self, now: float, number: int, outcome: Outcome, why: str = "") -> None:
        """The call has returned. One that was given up, or that began before the breaker opened, says nothing any more."""
        if self._calls.pop(number, None) is None or self.state is not State.CLOSED:
            return
        match outcome:
            case Outcome.GOOD:
                self._failures = 0
                self._pause_s = PAUSE_S
            case Outcome.UNSURE:
                if self._probe_at is None:
                    self._probe_at = max(now, self._checked_at + CHECK_EVERY_S)
            case Outcome.FAILED:
                self._failures += 1
                if self._failures >= FAILURES:
                    self.open(now, f"{self._failures} calls in a row failed, the last: {why}")
            case Outcome.TIMED_OUT:
                self.open(now, why)

    def look(self, now: float) -> None:
        """Give up calls that should have returned long ago."""
        late = [number for number, deadline in self._calls.items() if now > deadline]
        for number in late:
            del self._calls[number]
        if late:
            self.open(now, f"{len(late)} calls have not returned")

    def open(self, now: float, reason: str) -> None:
        """Ask no more; does nothing if that is so already."""
        if self.state is not State.CLOSED:
            return
        self.state, self.reason = State.OPEN, reason
        self.openings += 1
        self._failures = 0
        self._opened_at = now
        self._probe_at = now + self._pause_s
        self._transitions.append(Transition(False, reason))

    def next_probe(self) -> float | None:
        """When a probe is due; None if none is, or one is under way."""
        return self._probe_at

    def begin_probe(self, now: float) -> None:
        assert self._probe_at is not None and now >= self._probe_at, (now, self._probe_at)
        self._probe_at = None
        self._checked_at = now
        if self.state is State.OPEN:
            self.state = State.PROBING

    def end_probe(self, now: float, ok: bool, why: str = "") -> None:
        if self.state is State.CLOSED:  # it was a check
            if not ok:
                self.open(now, why)
            return
        if ok:
            self.state = State.CLOSED
            self._pause_s = min(
                2 * self._pause_s, PAUSE_MAX_S
            )  # in case that it opens again before a call went well
            self._transitions.append(Transition(True, self.reason, now - self._opened_at))
        else:
            self.state, self.reason = State.OPEN, why
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
            self._probe_at = now + self._pause_s

    def take_transitions(self) -> list[Transition]:
        """What has changed since this was asked last."""
        taken, self._transitions = self._transitions, []
        return taken
