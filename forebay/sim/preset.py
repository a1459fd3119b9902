"""How much goes wrong in a history."""

from enum import StrEnum


class Preset(StrEnum):
    """``lite``: traffic, delays, aborts, and sometimes one fault that costs no rank. ``one-fault``: one kind, one to three times.
    ``storm``: several kinds, several times each, and pools so small that eviction never rests."""

    LITE = "lite"
    ONE_FAULT = "one-fault"
    STORM = "storm"
