"""Takes a format's markers out of a text in pieces, for `tool_choice: none`: what is left is
text.
"""

from collections.abc import Sequence

from forebay.frontend.tools.pieces import Content, Piece


class MarkerEraser:
    """The same reader as `ToolCallParser`, which never finds a call."""

    calls = 0
    is_broken = False

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        out: list[str] = []
        for char in text:
            self._held += char
            while self._held and not any(one.startswith(self._held) for one in self._markers):
                out.append(self._held[0])
                self._held = self._held[1:]
            if self._held in self._markers:
                self._held = ""
        return [Content("".join(out))] if out else []

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        return [Content(held)] if held else []
