"""Tools and calls in a conversation whose chat template knows nothing of them: as text, in the
model's format.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.frontend.tools.formats import ToolFormat

Message = Mapping[str, Any]


def written_out(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], format: ToolFormat
) -> tuple[Message, ...]:
    """``messages`` with ``tools`` told in the system message, and the calls of old messages as
    text.
    """
    plain = [_plain(message, format) for message in messages]
    if tools:
        told = _told(tools, format)
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{told}".lstrip()}
        else:
            plain.insert(0, {"role": "system", "content": told})
    return tuple(plain)


def _plain(message: Message, format: ToolFormat) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [_call(call["function"], format) for call in calls]
    if format.listed:
        joined = format.opening + "[" + ", ".join(texts) + "]"
    else:
        joined = (format.separator or "\n").join(_wrapped(text, format) for text in texts)
    content = f"{message.get('content') or ''}\n{joined}".lstrip()
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": content}


def _call(function: Mapping[str, Any], format: ToolFormat) -> str:
    call = {"name": function["name"], format.arguments: function["arguments"]}
    return json.dumps(call, ensure_ascii=False)


def _wrapped(text: str, format: ToolFormat) -> str:
    return f"{format.opening}\n{text}\n{format.closing}" if format.closing else text


def _told(tools: Sequence[Mapping[str, Any]], format: ToolFormat) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = f'{{"name": <function name>, "{format.arguments}": <arguments as an object>}}'
    shown = f"{format.opening}[{example}]" if format.listed else _wrapped(example, format)
    return f"You can call these functions:\n{listed}\n\nTo call one, answer with:\n{shown}"
