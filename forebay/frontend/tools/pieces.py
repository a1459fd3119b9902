"""What a model's text is made of, for a reader who wants its parts: text, reasoning, tool calls."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call ``index`` of the message begins: said once for each call, in order."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text that call ``index`` is given."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


def joined(pieces: list[Piece]) -> list[Piece]:
    """The same with neighbours of one kind as one piece."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + piece.text)
        elif (
            isinstance(piece, CallArguments)
            and isinstance(last, CallArguments)
            and last.index == piece.index
        ):
            out[-1] = CallArguments(last.index, last.text + piece.text)
        else:
            out.append(piece)
    return out
