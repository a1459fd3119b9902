"""How model families write tool calls, and which of them a model is.

hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call> ...    Hermes, Qwen 2.5, 3
llama3    {"name": "f", "parameters": {...}}; ...  (<|python_tag|>)       Llama 3.1 to 3.3
mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]            Mistral
          [TOOL_CALLS]f[ARGS]{...}                                        Mistral since 2025
json      {"name": "f", "arguments": {...}}  or a list of them            any other model
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """``opening`` begins a call, ``closing`` ends it ("" if nothing does). ``bare``: a call may
    stand without opening.

    ``listed``: calls behind one opening are a JSON list. ``named``: a name may stand before
    its arguments. ``separator`` stands between two calls; ``arguments``: the key.
    """

    name: str
    opening: str
    closing: str = ""
    bare: bool = False
    listed: bool = False
    named: bool = False
    separator: str = ""
    arguments: str = "arguments"

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for marker in (self.opening, self.closing) if marker)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", separator="\n")
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", bare=True, separator="; ", arguments="parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", listed=True, named=True)
JSON = ToolFormat("json", "", bare=True, listed=True)
FORMATS = {format.name: format for format in (HERMES, LLAMA3, MISTRAL, JSON)}


def choose_format(
    setting: str, chat_template: str | None, has_token: Callable[[str], bool]
) -> ToolFormat:
    """The format of ``--tool-call-parser``; for ``auto`` the first whose opening the chat template
    writes, then the first whose opening is one token of the vocabulary, else `JSON`."""
    if setting != "auto":
        return FORMATS[setting]
    marked = [format for format in FORMATS.values() if format.opening]
    for format in marked:
        if format.opening in (chat_template or ""):
            return format
    for format in marked:
        if has_token(format.opening):
            return format
    return JSON
