"""`tools`, `tool_choice` and `response_format` of a body to their checked and frozen values."""

import re
from typing import Any

import msgspec

from forebay.core.sampling import Grammar, GrammarKind
from forebay.frontend.asked import ToolChoice, Tools
from forebay.frontend.errors import ApiError
from forebay.frontend.protocol import ChatRequest, CompletionRequest, Tool

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES = {choice.value: choice for choice in ToolChoice}
_FORMATS = "'text', 'json_object', 'json_schema', 'regex'"


def parse_tools(request: ChatRequest) -> Tools | None:
    """None where there are no tools. Raises ``ApiError`` (400)."""
    functions = tuple(_function(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or []))
    if len(functions) > MAX_TOOLS:
        raise ApiError(
            400, f"tools has {len(functions)} entries; at most {MAX_TOOLS} are allowed", "tools"
        )
    names = [str(function["name"]) for function in functions]
    for number, name in enumerate(names):
        if name in names[:number]:
            field = f"tools[{number}].function.name"
            raise ApiError(400, f"{field} is {name!r}, as another tool's; give it its own", field)
    choice, forced = _choice(request.tool_choice, names)
    if not functions:
        return None
    return Tools(functions, choice, forced, request.parallel_tool_calls is not False)


def parse_form(request: ChatRequest | CompletionRequest) -> Grammar | None:
    """What `response_format` makes of an answer, None for any text. Raises ``ApiError`` (400)."""
    asked = request.response_format
    if asked is None:
        return None
    match asked.type:
        case "text":
            return None
        case "json_object":
            return Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
        case "json_schema":
            field = "response_format.json_schema"
            if asked.json_schema is None or asked.json_schema.schema is None:
                raise ApiError(400, f"{field}.schema is missing", f"{field}.schema")
            text = msgspec.json.encode(asked.json_schema.schema).decode()
            return _grammar(GrammarKind.JSON_SCHEMA, text, f"{field}.schema")
        case "regex":
            field = "response_format.regex"
            if asked.regex is None:
                raise ApiError(400, f"{field} is missing", field)
            return _grammar(GrammarKind.REGEX, asked.regex, field)
        case other:
            field = "response_format.type"
            raise ApiError(400, f"{field} is {other!r}; allowed: {_FORMATS}", field)


def form_field(form: Grammar) -> str:
    """Where in a body ``form`` came from."""
    schema = form.kind is GrammarKind.JSON_SCHEMA
    return "response_format.json_schema.schema" if schema else "response_format.regex"


def _grammar(kind: GrammarKind, text: str, field: str) -> Grammar:
    try:
        return Grammar(kind, text)
    except ValueError as error:
        raise ApiError(400, f"{field}: {error}", field, "invalid_value") from None


def _function(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        field = f"{where}.type"
        raise ApiError(400, f"{field} is {tool.type!r}; allowed: 'function'", field)
    if tool.function is None:
        raise ApiError(400, f"{where}.function is missing", f"{where}.function", "missing_field")
    name = tool.function.name
    if not _NAME.fullmatch(name):
        field = f"{where}.function.name"
        allowed = "1 to 64 of letters, digits, '_', '-' and '.' are allowed"
        raise ApiError(400, f"{field} is {name[:80]!r}; {allowed}", field, "invalid_value")
    written: dict[str, Any] = {"name": name}
    if tool.function.description is not None:
        written["description"] = tool.function.description
    written["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return written


def _choice(asked: str | dict[str, Any] | None, names: list[str]) -> tuple[ToolChoice, str | None]:
    if asked is None:
        return ToolChoice.AUTO, None
    if isinstance(asked, str):
        if asked not in _CHOICES:
            allowed = ", ".join(map(repr, _CHOICES))
            message = f"tool_choice is {asked!r}; allowed: {allowed}, or one function"
            raise ApiError(400, message, "tool_choice")
        if _CHOICES[asked] is ToolChoice.REQUIRED and not names:
            raise ApiError(400, "tool_choice needs tools, and there are none", "tool_choice")
        return _CHOICES[asked], None
    function = asked.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if asked.get("type") != "function" or not isinstance(name, str):
        form = '{"type": "function", "function": {"name": ...}}'
        raise ApiError(400, f"tool_choice is an object of another form than {form}", "tool_choice")
    if name not in names:
        field = "tool_choice.function.name"
        raise ApiError(400, f"{field} is {name[:80]!r}, which is none of the tools", field)
    return ToolChoice.REQUIRED, name
