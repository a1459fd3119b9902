"""How fast this machine is, so that a time limit in a test means the same on every machine.

A session measures once how long a fixed piece of work takes; the processes of pytest-xdist are told.
No machine makes limits shorter, and none makes them more than six times longer: a hang stays one.

    PACE = seconds the work takes here / seconds on a quiet core of the machine that the limits are for
"""

import hashlib
import os
import time

_REFERENCE_S = 0.0145  # AMD EPYC Zen 4
_SAMPLES = 5
_SLOWEST = 6.0
_VARIABLE = "TEST_PACE"


def _work() -> float:
    """Seconds for what tests do most: the interpreter's own work, and some of a library's."""
    began = time.perf_counter()
    digest = b""
    counts: dict[int, int] = {}
    for number in range(40_000):
        counts[number % 997] = counts.get(number % 997, 0) + number
        if number % 4 == 0:
            digest = hashlib.sha256(digest).digest()
    return time.perf_counter() - began


def _measure() -> float:
    """The median: what other processes take of the machine belongs to its speed."""
    return sorted(_work() for _ in range(_SAMPLES))[_SAMPLES // 2] / _REFERENCE_S


PACE = float(os.environ.get(_VARIABLE) or min(max(1.0, _measure()), _SLOWEST))
os.environ[_VARIABLE] = str(PACE)


def paced(seconds: float) -> float:
    """A limit of so many seconds on the reference, for this machine."""
    return seconds * PACE
