"""One call as a JSON object, read character by character: `{"name": "f", "arguments": {...}}`.

    { "key" : value , "key" : value }          keys in any order, each at most once of use
       |        |
       |        '-- of `arguments` (or `parameters`): passed on as it comes once the name is known
       '----------- a key that no call has makes it no call where only the JSON tells (`strict`)

Where the object ends is what JSON says, never what a search finds: a brace, a quote or a format's
own marker inside of a string is text. Each character is looked at once and alone, so what comes
out does not depend on how the text is cut.
"""

import json
from collections.abc import Container
from enum import Enum, auto

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", *_ARGUMENTS)
_BLANK = " \t\r\n"


class Verdict(Enum):
    OPEN = auto()
    DONE = auto()
    FAILED = auto()  # the character that failed was not taken


class _At(Enum):
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()  # or the end


class CallReader:
    """Made after the opening brace. ``take`` gives arguments as they come.

    ``is_call``: there is a ``name``, and its arguments have begun or the object has ended.
    ``complete``: the arguments are a JSON object. ``allowed``: names that count, or None for any.
    """

    def __init__(self, strict: bool, allowed: Container[str] | None = None) -> None:
        self.name: str | None = None
        self.is_call = False
        self.complete = False
        self._strict = strict
        self._allowed = allowed
        self._at = _At.KEY
        self._key = ""
        self._value = JsonText()
        self._early: str | None = None  # arguments that came before the name
        self._said: list[str] = []
        self._has_arguments = False

    def take(self, char: str) -> tuple[Verdict, str]:
        """The verdict, and what the arguments go on with."""
        match self._at:
            case _At.KEY:
                return self._begin_key(char)
            case _At.IN_KEY:
                return self._in_key(char)
            case _At.COLON:
                if char not in _BLANK and char != ":":
                    return Verdict.FAILED, ""
                self._at = _At.VALUE if char == ":" else _At.COLON
                return Verdict.OPEN, ""
            case _At.VALUE | _At.IN_VALUE:
                return self._in_value(char)
            case _At.COMMA:
                return self._between(char)

    def _begin_key(self, char: str) -> tuple[Verdict, str]:
        if char in _BLANK:
            return Verdict.OPEN, ""
        if char != '"':
            return Verdict.FAILED, ""
        self._value = JsonText()
        self._value.take(char)
        self._at = _At.IN_KEY
        return Verdict.OPEN, ""

    def _in_key(self, char: str) -> tuple[Verdict, str]:
        if self._value.take(char):
            key = _decoded(self._value.text)
            if not isinstance(key, str) or (self._strict and key not in _KEYS):
                return Verdict.FAILED, ""
            self._key, self._at = key, _At.COLON
        return Verdict.OPEN, ""

    def _in_value(self, char: str) -> tuple[Verdict, str]:
        if self._at is _At.VALUE:
            if char in _BLANK:
                return Verdict.OPEN, ""
            if char in ",}]:":
                return Verdict.FAILED, ""
            self._value = JsonText()
            self._at = _At.IN_VALUE
            self.is_call |= self._key in _ARGUMENTS and self.name is not None
        if self._value.is_scalar_end(char):
            verdict, said = self._end_value()
            if verdict is Verdict.FAILED:
                return verdict, ""
            verdict, rest = self._between(char)
            return verdict, said + rest
        ended = self._value.take(char)
        said = char if self._streams else ""
        self._say(said)
        if not ended:
            return Verdict.OPEN, said
        verdict, rest = self._end_value()
        return verdict, said + rest

    def _say(self, text: str) -> str:
        self._said.append(text)
        return text

    @property
    def _streams(self) -> bool:
        """Whether the value at hand goes out as it comes: an object, behind the name."""
        return (
            self._key in _ARGUMENTS
            and self.name is not None
            and not self._has_arguments
            and self._value.first == "{"
        )

    def _end_value(self) -> tuple[Verdict, str]:
        """The verdict, and what is to be said now that the value at hand is whole."""
        self._at = _At.COMMA
        if self._key == "name" and self.name is None:
            return self._end_name()
        if self._key in _ARGUMENTS and not self._has_arguments:
            return Verdict.OPEN, self._end_arguments()
        return Verdict.OPEN, ""

    def _end_name(self) -> tuple[Verdict, str]:
        name = _decoded(self._value.text)
        if not isinstance(name, str) or not name:
            return Verdict.FAILED, ""
        if self._allowed is not None and name not in self._allowed:
            return Verdict.FAILED, ""
        self.name = name
        self.is_call = self._has_arguments
        return Verdict.OPEN, self._say(self._early or "")

    def _end_arguments(self) -> str:
        streamed, self._has_arguments = self._streams, True
        if streamed:
            return ""
        text = _argument_text(self._value.text)
        if self.name is None:
            self._early = text
            return ""
        return self._say(text)

    def _between(self, char: str) -> tuple[Verdict, str]:
        if char in _BLANK:
            return Verdict.OPEN, ""
        if char == ",":
            self._at = _At.KEY
            return Verdict.OPEN, ""
        if char != "}" or self.name is None:
            return Verdict.FAILED, ""
        self.is_call = True
        rest = "" if self._has_arguments else self._say("{}")
        self.complete = is_object("".join(self._said))
        return Verdict.DONE, rest


class JsonText:
    """The text of one JSON value and how deep in it we are. Only its structure is checked, not
    every letter.
    """

    def __init__(self) -> None:
        self.first = ""
        self._chars: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def text(self) -> str:
        return "".join(self._chars)

    def is_scalar_end(self, char: str) -> bool:
        """Whether ``char`` stands behind a number or a word such as ``null``, which have no end of
        their own.
        """
        return bool(self.first) and not self._in_string and not self._depth and char in ",}] \t\r\n"

    def take(self, char: str) -> bool:
        """Whether ``char`` is the value's last one."""
        self.first = self.first or char
        self._chars.append(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return not self._depth
            return False
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


def is_object(text: str) -> bool:
    return isinstance(_decoded(text), dict)


def _argument_text(raw: str) -> str:
    """Arguments that came as no object: as text that holds one, or none at all."""
    value = _decoded(raw)
    if isinstance(value, str):
        return value
    return "{}" if raw == "null" else raw


def _decoded(raw: str) -> object:
    """The value, or None for what is no JSON. Control characters in strings are taken, as models
    write them.
    """
    try:
        return json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
