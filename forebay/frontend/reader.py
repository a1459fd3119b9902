"""One sequence's text as a chat message is made of it, and why it ended.

    Delta.text --> reasoning --> tool calls --> pieces
    Delta.finish ------------------------------> finish_reason

The one rule of finish reasons, streamed or not, whatever `tool_choice` said: ``length`` if the text
was cut at its limit, else ``tool_calls`` if there are calls and all of them are whole, else
``stop``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from forebay.frontend.sequence import Delta
from forebay.frontend.tools import Content, Piece

FinishReason = Literal["stop", "length", "tool_calls"]


class Parser(Protocol):
    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


class CallParser(Parser, Protocol):
    @property
    def calls(self) -> int: ...
    @property
    def is_broken(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Part:
    """What one Delta adds to a message."""

    pieces: tuple[Piece, ...]
    finish: FinishReason | None


class MessageReader:
    """Without parsers a message is its text."""

    def __init__(self, reasoning: Parser | None = None, calls: CallParser | None = None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def read(self, delta: Delta) -> Part:
        ended = delta.finish is not None
        pieces = self._of_reasoning(delta.text, ended)
        if self._calls is not None:
            pieces = self._of_calls(self._calls, pieces, ended)
        return Part(tuple(pieces), self._finish(delta))

    def _of_reasoning(self, text: str, ended: bool) -> list[Piece]:
        if self._reasoning is None:
            return [Content(text)] if text else []
        return self._reasoning.feed(text) + (self._reasoning.finish() if ended else [])

    def _of_calls(self, calls: CallParser, pieces: list[Piece], ended: bool) -> list[Piece]:
        out: list[Piece] = []
        for piece in pieces:
            out += calls.feed(piece.text) if isinstance(piece, Content) else [piece]
        return out + (calls.finish() if ended else [])

    def _finish(self, delta: Delta) -> FinishReason | None:
        if delta.finish != "stop" or self._calls is None:
            return delta.finish
        return "tool_calls" if self._calls.calls and not self._calls.is_broken else "stop"


ReaderFactory = Callable[[], MessageReader]
