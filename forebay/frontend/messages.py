"""Messages of a conversation as chat templates take them: dictionaries with a role, text, and calls of tools.

What templates of the field expect: text joined to one string, a call's arguments as an object, ``content`` always there.
"""

from typing import Any

import msgspec

from forebay.frontend.errors import ApiError
from forebay.frontend.protocol import Function, Message, Part, ToolCall, refuse_unsupported

# What a client may write -> what templates know. OpenAI's newer word for system, its older one for tool.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_TYPES = ("text", "input_text", "output_text")


def template_messages(messages: list[Message]) -> tuple[dict[str, Any], ...]:
    """Raises ``ApiError`` (400) naming the message and its field."""
    if not messages:
        raise ApiError(400, "messages is empty; at least one message is needed", "messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: Message, where: str) -> dict[str, Any]:
    refuse_unsupported(message, f"{where}.")
    if message.role not in _ROLES:
        raise ApiError(
            400,
            f"{where}.role is {message.role!r}; allowed: {', '.join(_ROLES)}",
            f"{where}.role",
        )
    calls = _calls(message, where)
    written: dict[str, Any] = {
        "role": _ROLES[message.role],
        "content": _content(message, where, bool(calls)),
    }
    if calls:
        written["tool_calls"] = calls
    reasoning = message.reasoning_content or message.reasoning
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", reasoning),
    ):
        if value is not None:
            written[name] = value
    return written


def _content(message: Message, where: str, has_calls: bool) -> str:
    """An assistant that called tools, refused or only thought may have said nothing."""
    content = message.content
    if content is None and message.role == "assistant":
        has_words = message.refusal is not None or message.reasoning_content or message.reasoning
        if has_calls or has_words:
            return message.refusal or ""
    where = f"{where}.content"
    if content is None:
        raise ApiError(400, f"{where} is missing; allowed: text or a list of text parts", where)
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Part, where: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in _TEXT_TYPES:
        raise ApiError(400, f"{where}.type is {part.type!r}; allowed: 'text'", f"{where}.type")
    refuse_unsupported(part, f"{where}.")
    if part.text is None:
        raise ApiError(400, f"{where}.text is missing", f"{where}.text", "missing_field")
    return part.text


def _calls(message: Message, where: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message, in OpenAI's form but for their arguments."""
    if message.function_call is not None and not message.tool_calls:
        return [_call(ToolCall(function=message.function_call))]
    calls = message.tool_calls or []
    if calls and message.role != "assistant":
        raise ApiError(
            400, f"{where}.tool_calls goes with the role assistant", f"{where}.tool_calls"
        )
    return [_call(call) for call in calls]


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function)}
    written: dict[str, Any] = {"type": "function", "function": function}
    return written if call.id is None else {"id": call.id, **written}


def _arguments(function: Function) -> Any:
    """As an object where it is one; a model may also have written something else, and that stays as it is."""
    arguments = function.arguments or {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
