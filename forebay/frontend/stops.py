"""Stop strings over text that arrives in pieces.

        ...already let through | held: may be the start of a stop string | <- next piece

A stop string may straddle any number of pieces. Text that could still turn out to be the start of one is held back, so that no
part of a stop string is ever let through. What is cut does not depend on how the text was split: the first stop string to be
complete wins, and of several that are complete at the same character the longest.

A stop string may spell a special token, which the text does not show: see `HiddenTokens`.
"""

import re
from collections.abc import Mapping, Sequence

_FIRST_MARK = 0xD800  # the surrogates: characters that no text has


class HiddenTokens:
    """Tokens that a text leaves out and stop strings spell. To the matcher each is one character
    that no text has, which is taken out of what goes on.
    """

    def __init__(self, stops: Sequence[str], hidden: Mapping[str, int]) -> None:
        """``hidden``: the tokens that the text leaves out, by spelling."""
        spelled = [token for token in hidden if any(token in stop for stop in stops)]
        marks = {token: chr(_FIRST_MARK + at) for at, token in enumerate(spelled)}
        longest_first = sorted(spelled, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._asked = {pattern.sub(lambda found: marks[found[0]], stop): stop for stop in stops}
        self._asked |= {stop: stop for stop in stops}  # ordinary tokens may spell one too
        self._marks = {hidden[token]: mark for token, mark in marks.items()}
        self._take_out = str.maketrans("", "", "".join(marks.values()))
        self.stops = tuple(self._asked)

    def mark(self, token: int) -> str:
        """What the matcher sees of ``token`` beside its text."""
        return self._marks.get(token, "")

    def text(self, seen: str) -> str:
        """What a reader sees."""
        return seen.translate(self._take_out) if self._marks else seen

    def asked(self, stop: str | None) -> str | None:
        """The stop string as the caller gave it."""
        return None if stop is None else self._asked[stop]


class StopMatcher:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """The text that may go out now, and the stop string that ended it, if one did (then nothing may be pushed any more).

        A stop string whose last character comes in a piece that is not ``armed`` does not count (`min_tokens`).
        """
        buffer = self._held + text
        if armed and (match := self._first_match(buffer, len(self._held))):
            start, stop = match
            self._held = ""
            return buffer[:start], stop
        held_chars = self._possible_start_chars(buffer)
        self._held = buffer[len(buffer) - held_chars :]
        return buffer[: len(buffer) - held_chars], None

    def finish(self) -> str:
        """What was held back: the text has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, new: int) -> tuple[int, str] | None:
        """Start and text of the stop string in ``buffer`` that ends first, at or after character ``new``."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, new - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best and (best[1], best[2])

    def _possible_start_chars(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that some stop string begins with."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
