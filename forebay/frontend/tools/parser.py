"""Tool calls out of a model's text, while it comes.

    TEXT --opening, or a brace at a line's start--> BODY --{--> CALL --}--> AFTER
     ^                                               |fails      |fails      |text
     '-----------------------------------------------'-----------'-----------'

Sans-IO. The machine moves by single characters, so any cut of the text gives the same pieces
(joined). What cannot be told yet is held: the start of a marker, blanks (dropped beside a call,
kept in text), and a call until its arguments begin. What turns out to be no call is text, to the
letter.
"""

import re
from collections.abc import Container
from enum import Enum, auto

from forebay.frontend.tools.call_reader import CallReader, JsonText, Verdict, is_object
from forebay.frontend.tools.formats import ToolFormat
from forebay.frontend.tools.pieces import CallArguments, CallStart, Content, Piece, joined

_BLANK = " \t\r\n"
_SEPARATORS = (";", ",")
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?")
_NAME_CHARS_MAX = 256


class _At(Enum):
    TEXT = auto()
    BODY = auto()  # behind an opening: `{`, `[`, or a name
    ITEM = auto()  # in a list, a `{` must follow
    CALL = auto()
    NEXT = auto()  # in a list, behind a call
    AFTER = auto()
    NAME = auto()  # Mistral's newer form: name[ARGS]{...}
    PLAIN = auto()  # and its arguments


class ToolCallParser:
    """``names``: the tools there are. ``calls_max``: further calls are left out
    (`parallel_tool_calls: false`).

    ``calls`` have begun; ``is_broken``: one of them never ended, or is no JSON.
    """

    def __init__(
        self, format: ToolFormat, names: Container[str], calls_max: int | None = None
    ) -> None:
        self.calls = 0
        self._complete = 0
        self._format = format
        self._names = names
        self._calls_max = calls_max
        self._plain = JsonText()
        self._at = _At.TEXT
        self._marker = ""  # the start of an opening, maybe
        self._blanks = ""
        self._line_start = True
        self._raw = ""  # what is text if it turns out to be no call
        self._marked = False
        self._listed = False
        self._reader: CallReader | None = None
        self._started = False
        self._out: list[Piece] = []

    @property
    def is_broken(self) -> bool:
        shown = self.calls if self._calls_max is None else min(self.calls, self._calls_max)
        return self._complete < shown

    def feed(self, text: str) -> list[Piece]:
        for char in text:
            self._take(char)
        return self._taken()

    def finish(self) -> list[Piece]:
        """What was held, now that the text has ended."""
        if self._at is _At.TEXT:
            self._flush_marker()
        elif self._at is not _At.AFTER and not self._started:
            # A call that was cut before its name: its marker is no text, the rest is to be shown.
            opening = self._format.opening if self._marked else ""
            self._text(self._raw.removeprefix(opening))
        if self._blanks and not self.calls:
            self._out.append(Content(self._blanks))
        self._blanks = ""
        return self._taken()

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return joined(out)

    # ------------------------------------------------------------------------------------------
    # text

    def _take(self, char: str) -> None:
        match self._at:
            case _At.TEXT:
                self._take_text(char)
            case _At.BODY | _At.ITEM:
                self._take_body(char)
            case _At.CALL:
                self._take_call(char)
            case _At.NEXT:
                self._take_next(char)
            case _At.AFTER:
                self._take_after(char)
            case _At.NAME:
                self._take_name(char)
            case _At.PLAIN:
                self._take_plain(char)

    def _take_text(self, char: str) -> None:
        opening = self._format.opening
        if opening and opening.startswith(self._marker + char):
            self._marker += char
            if self._marker == opening:
                self._marker = ""
                self._begin(opening, marked=True)
                self._at = _At.BODY
            return
        if self._marker:
            held, self._marker = self._marker, ""
            # The held start is text up to where another start may begin.
            self._text(held[0])
            for later in held[1:]:
                self._take(later)
            self._take(char)
            return
        if self._format.bare and self._line_start and char in "{[":
            self._begin("", marked=False)
            self._at = _At.BODY
            self._take(char)
            return
        self._text(char)

    def _flush_marker(self) -> None:
        held, self._marker = self._marker, ""
        self._text(held)

    def _text(self, text: str) -> None:
        """Text of the answer. Blanks wait for what follows them."""
        for char in text:
            self._line_start = char == "\n" or (self._line_start and char in _BLANK)
            if char in _BLANK:
                self._blanks += char
            else:
                self._out.append(Content(self._blanks + char))
                self._blanks = ""

    def _begin(self, raw: str, marked: bool) -> None:
        self._raw = raw
        self._marked = marked
        self._listed = False
        self._started = False
        self._reader = None

    def _fail(self, char: str) -> None:
        """No call after all: ``char`` and what was held are text."""
        held = "" if self._started else self._raw
        self._begin("", marked=False)
        self._at = _At.TEXT
        self._text(held)
        self._line_start = False
        self._take(char)

    # -----------------------------------------------------------------------------------------
    # calls

    def _take_body(self, char: str) -> None:
        if char in _BLANK:
            self._raw += char
        elif char == "{":
            self._raw += char
            self._open_call()
        elif char == "[" and self._at is _At.BODY and not self._listed:
            self._raw += char
            self._listed = True
            self._at = _At.ITEM
        elif self._format.named and self._at is _At.BODY and (char.isalnum() or char == "_"):
            self._raw += char
            self._at = _At.NAME
        else:
            self._fail(char)

    def _open_call(self) -> None:
        bare = not self._marked
        self._reader = CallReader(strict=bare, allowed=self._names if bare else None)
        self._started = False
        self._at = _At.CALL

    def _take_call(self, char: str) -> None:
        reader = self._reader
        assert reader is not None
        verdict, arguments = reader.take(char)
        if verdict is Verdict.FAILED:
            self._fail(char)
            return
        if not self._started:
            self._raw += char
        if reader.is_call:
            assert reader.name is not None
            self._start(reader.name)
        self._argue(arguments)
        if verdict is Verdict.DONE:
            self._finish_call(reader.complete)

    def _start(self, name: str) -> None:
        if self._started:
            return
        self._started = True
        self._blanks = ""
        self._raw = ""
        self.calls += 1
        if not self._left_out:
            self._out.append(CallStart(self.calls - 1, name))

    def _argue(self, text: str) -> None:
        if text and not self._left_out:
            self._out.append(CallArguments(self.calls - 1, text))

    @property
    def _left_out(self) -> bool:
        return self._calls_max is not None and self.calls > self._calls_max

    def _finish_call(self, complete: bool) -> None:
        self._complete += complete and not self._left_out
        self._reader = None
        self._raw = ""
        self._at = _At.NEXT if self._listed else _At.AFTER

    def _take_next(self, char: str) -> None:
        if char in _BLANK:
            return
        if char == ",":
            self._at = _At.ITEM
        elif char == "]":
            self._at = _At.AFTER
        else:
            self._fail(char)

    def _take_after(self, char: str) -> None:
        """Behind a call: its closing, a separator, one more call, or text."""
        closing = self._format.closing if self._marked else ""
        before, held = self._raw.strip(_BLANK), self._raw + char
        seen = held.strip(_BLANK)
        if closing and seen == closing:
            self._resume("")
        elif char == "{" and (not before or (before in _SEPARATORS and not closing)):
            self._raw = held
            self._open_call()
        elif not seen or (closing.startswith(seen) if closing else seen in _SEPARATORS):
            self._raw = held
        else:
            self._resume(held)

    def _resume(self, text: str) -> None:
        self._begin("", marked=False)
        self._at = _At.TEXT
        self._line_start = True
        for char in text:
            self._take(char)

    # -------------------------------------------------------------------------------
    # name[ARGS]{...}

    def _take_name(self, char: str) -> None:
        head = self._raw[len(self._format.opening) :]
        if char == "{":
            match = _NAMED.fullmatch(head)
            if match is None:
                self._fail(char)
                return
            self._start(match[1])
            self._plain = JsonText()
            self._at = _At.PLAIN
            self._take_plain(char)
        elif char in "\r\n" or len(head) > _NAME_CHARS_MAX:
            self._fail(char)
        else:
            self._raw += char

    def _take_plain(self, char: str) -> None:
        self._argue(char)
        if self._plain.take(char):
            self._finish_call(is_object(self._plain.text))
