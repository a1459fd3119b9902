"""Tool calls: how models write them, and how they are read out of a text that comes in pieces."""

from forebay.frontend.tools.eraser import MarkerEraser
from forebay.frontend.tools.formats import FORMATS, ToolFormat, choose_format
from forebay.frontend.tools.parser import ToolCallParser
from forebay.frontend.tools.pieces import CallArguments, CallStart, Content, Piece, Reasoning

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallStart",
    "Content",
    "MarkerEraser",
    "Piece",
    "Reasoning",
    "ToolCallParser",
    "ToolFormat",
    "choose_format",
]
