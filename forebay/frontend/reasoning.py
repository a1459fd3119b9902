"""The part of a text that a model writes for itself: `<think> ... </think>` before the answer.

    START --<think>, or the prompt has opened it--> INSIDE --</think>--> BEHIND --> ANSWER
      '---------------------------- anything else -------------------------------------^

Sans-IO, character by character, so any cut of the text gives the same parts. Blanks around the
markers are dropped.
"""

from enum import Enum, auto

from forebay.frontend.tools.pieces import Content, Piece, Reasoning, joined

OPEN = "<think>"
CLOSE = "</think>"
_BLANK = " \t\r\n"


class _At(Enum):
    START = auto()
    INSIDE = auto()
    BEHIND = auto()
    ANSWER = auto()


class ReasoningParser:
    """``opened``: the prompt ends in `<think>` already."""

    def __init__(self, opened: bool) -> None:
        self._at = _At.INSIDE if opened else _At.START
        self._held = ""  # blanks, and the start of a marker, maybe
        self._begun = False

    def feed(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        for number, char in enumerate(text):
            if self._at is _At.ANSWER:
                out.append(Content(text[number:]))
                break
            self._take(char, out)
        return joined(out)

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._at is _At.START:
            return [Content(held)] if held else []
        if self._at is _At.INSIDE and held.strip(_BLANK):
            return [Reasoning(held)]
        return []

    def _take(self, char: str, out: list[Piece]) -> None:
        match self._at:
            case _At.START:
                self._take_start(char, out)
            case _At.INSIDE:
                self._take_inside(char, out)
            case _:
                if char not in _BLANK:
                    self._at = _At.ANSWER
                    out.append(Content(char))

    def _take_start(self, char: str, out: list[Piece]) -> None:
        self._held += char
        seen = self._held.lstrip(_BLANK)
        if seen == OPEN:
            self._at, self._held = _At.INSIDE, ""
        elif not OPEN.startswith(seen):
            self._at = _At.ANSWER
            out.append(Content(self._held))
            self._held = ""

    def _take_inside(self, char: str, out: list[Piece]) -> None:
        """``_held`` is blanks, then a start of the closing marker; what cannot be one goes out."""
        self._held += char
        blanks = len(self._held) - len(self._held.lstrip(_BLANK))
        while not CLOSE.startswith(self._held[blanks:]):
            if self._begun:
                out.append(Reasoning(self._held[: blanks + 1]))
            else:
                out.append(Reasoning(self._held[blanks]))
            self._begun = True
            self._held = self._held[blanks + 1 :]
            blanks = len(self._held) - len(self._held.lstrip(_BLANK))
        if self._held[blanks:] == CLOSE:
            self._at, self._held = _At.BEHIND, ""
