"""Tools, forms and reasoning through the server: what clients rebuild, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from forebay.core.sampling import Grammar, GrammarKind
from forebay.frontend.model import ServedModel
from forebay.settings import ReasoningParserName, Settings, ToolCallParserName
from tests.frontend.served import MODEL, Server, says, wait_ready

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, PING]
ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich </tool_call>"}}\n</tool_call>'
)
PINGS = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def hermes(start_server: Callable[..., Server], text_model: ServedModel) -> Server:
    settings = Settings(
        tool_call_parser=ToolCallParserName.HERMES,
        reasoning_parser=ReasoningParserName.THINK,
        store="none",
    )
    return wait_ready(start_server(settings, model=replace(text_model, max_context=2048)))


def whole(server: Server, **asked: Any) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", messages=ASK, **asked)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def streamed(server: Server, **asked: Any) -> dict[str, Any]:
    """The same choice, put together by the way that clients do it."""
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    finish = None
    with server.openai.chat.completions.create(
        model=MODEL, messages=ASK, stream=True, **asked
    ) as chunks:
        for chunk in chunks:
            choice = chunk.choices[0]
            delta = choice.delta
            if delta.content is not None:
                message["content"] = (message["content"] or "") + delta.content
            if reasoning := (delta.model_extra or {}).get("reasoning_content"):
                message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(message["tool_calls"])
                    message["tool_calls"].append(
                        {"name": call.function.name, "arguments": "", "id": call.id}
                    )
                else:
                    assert call.function.name is None
                message["tool_calls"][call.index]["arguments"] += call.function.arguments
            finish = choice.finish_reason or finish
    return {"message": message, "finish_reason": finish}


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [call.get("function", call) for call in calls]
    return [(function["name"], function["arguments"]) for function in functions]


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize(
    ("choice", "text", "calls", "finish"),
    [
        ("auto", CALL, 1, "tool_calls"),
        ("auto", f"So. {CALL}\nand {PINGS}\n{PINGS}", 3, "tool_calls"),
        ("auto", "Sunny.", 0, "stop"),
        ("required", CALL, 1, "tool_calls"),
        ("required", f"{CALL}\n{PINGS}", 2, "tool_calls"),
        ({"type": "function", "function": {"name": "weather"}}, CALL, 1, "tool_calls"),
        ("none", CALL, 0, "stop"),
        ("none", "Sunny.", 0, "stop"),
    ],
    ids=str,
)
def test_finish_reasons_follow_one_rule(
    hermes: Server, ask: Any, choice: Any, text: str, calls: int, finish: str
) -> None:
    hermes.planner.reset(says(text))
    said = ask(hermes, tools=TOOLS, tool_choice=choice, max_tokens=400)
    assert len(calls_of(said)) == calls
    assert said["finish_reason"] == finish
    assert "<tool_call>" not in (said["message"]["content"] or "")
    if calls:
        assert calls_of(said)[0] == ("weather", '{"city": "Zürich </tool_call>"}')
    if choice == "none" and text == CALL:
        assert "weather" in said["message"]["content"]


def test_a_message_of_calls_alone_has_null_for_its_content(hermes: Server) -> None:
    hermes.planner.reset(says(CALL))
    message = whole(hermes, tools=TOOLS, max_tokens=400)["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["type"] == "function"
    hermes.planner.reset(says("Sunny."))
    assert "tool_calls" not in whole(hermes, tools=TOOLS)["message"]


@pytest.mark.parametrize("ask", [whole, streamed])
def test_one_call_at_most_where_parallel_calls_are_off(hermes: Server, ask: Any) -> None:
    hermes.planner.reset(says(f"{CALL}\n{PINGS}"))
    said = ask(hermes, tools=TOOLS, parallel_tool_calls=False, max_tokens=400)
    assert [name for name, _ in calls_of(said)] == ["weather"]
    assert said["finish_reason"] == "tool_calls"


def test_length_wins_over_calls_at_every_cut(hermes: Server) -> None:
    tokens = len(CALL.encode())
    for limit in range(1, tokens + 1, 3):
        hermes.planner.reset(says(CALL))
        for ask in (whole, streamed):
            said = ask(hermes, tools=TOOLS, tool_choice="required", max_tokens=limit)
            assert said["finish_reason"] == "length"
            for _, arguments in calls_of(said):
                assert '{"city": "Zürich </tool_call>"}'.startswith(arguments.rstrip("\ufffd"))


def test_a_stop_string_inside_of_a_call_makes_it_no_call_to_run(hermes: Server) -> None:
    hermes.planner.reset(says(CALL))
    for ask in (whole, streamed):
        assert ask(hermes, tools=TOOLS, stop="Zü", max_tokens=400)["finish_reason"] == "stop"


@pytest.mark.parametrize("ask", [whole, streamed])
def test_reasoning_has_its_own_field(hermes: Server, ask: Any) -> None:
    hermes.planner.reset(says(f"<think>\nCold, I think.\n</think>\n\nWait: {PINGS}"))
    said = ask(hermes, tools=TOOLS, max_tokens=400)
    assert said["message"]["reasoning_content"] == "Cold, I think."
    assert said["message"]["content"] == "Wait:"
    assert calls_of(said) == [("ping", "{}")]


def test_tools_and_old_calls_are_told_to_a_template_that_knows_none(hermes: Server) -> None:
    hermes.planner.reset(says("Sunny."))
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12 degrees"},
    ]
    answer = hermes.post("/v1/chat/completions", messages=history, tools=TOOLS, max_tokens=4)
    assert answer.status_code == 200
    prompt = hermes.planner.submits[0].prompt[::4].decode()
    assert '"description": "The weather of a city."' in prompt
    assert '<assistant><tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>' in prompt
    assert "<tool>12 degrees" in prompt
    hermes.planner.reset(says("Sunny."))
    hermes.post("/v1/chat/completions", messages=ASK, tools=TOOLS, tool_choice="none")
    assert "weather" not in hermes.planner.submits[0].prompt[::4].decode().lower().replace(
        "weather?", ""
    )


def test_what_is_forced_travels_as_a_grammar(hermes: Server) -> None:
    for asked, kind in (
        ({"tools": TOOLS, "tool_choice": "required"}, GrammarKind.LARK),
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA),
        ({"response_format": {"type": "regex", "regex": "[ab]+"}}, GrammarKind.REGEX),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "null"}},
                }
            },
            GrammarKind.JSON_SCHEMA,
        ),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, GrammarKind.LARK),
    ):
        hermes.planner.reset(says("x"))
        whole(hermes, max_tokens=2, **asked)
        grammar = hermes.planner.submits[0].params.grammar
        assert grammar is not None and grammar.kind is kind
    for free in ({"tools": TOOLS}, {"response_format": {"type": "text"}}, {"tools": []}):
        hermes.planner.reset(says("x"))
        whole(hermes, max_tokens=2, **free)
        assert hermes.planner.submits[0].params.grammar is None


def form(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


SCHEMA = "response_format.json_schema.schema"
NESTED: dict[str, Any] = {"type": "integer"}
for _ in range(12):
    NESTED = {"oneOf": [NESTED, {"type": "object", "properties": {"x": NESTED}}]}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (form({"$ref": "#/$defs/no"}), SCHEMA),
        (form({"$ref": "#"}), SCHEMA),
        (form({"enum": []}), SCHEMA),
        (form({"type": "string", "not": {"const": "a"}}), SCHEMA),
        (form({"type": "wrong"}), SCHEMA),
        (form(NESTED), SCHEMA),
        (form({"type": "object", "properties": {f"p{i}": {} for i in range(9000)}}), SCHEMA),
        (form({"type": "object", "properties": {f"p{i}": {} for i in range(60_000)}}), SCHEMA),
        (form(None), SCHEMA),
        (form(False), SCHEMA),
        ({"response_format": {"type": "json_schema"}}, SCHEMA),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format.regex"),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [PING, PING]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [PING], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [PING], "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": [PING], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        (
            {
                "tools": [
                    PING,
                    {
                        "type": "function",
                        "function": {"name": "bad", "parameters": {"type": "object", "not": {}}},
                    },
                ],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_enforced_is_refused_by_its_field(
    hermes: Server, asked: dict[str, Any], field: str
) -> None:
    hermes.planner.reset(says("x"))
    answer = hermes.post("/v1/chat/completions", messages=ASK, **asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500 and "\n" not in error["message"]
    assert not hermes.planner.submits


def test_a_grammar_on_plain_completions(hermes: Server) -> None:
    hermes.planner.reset(says("x"))
    form = {"type": "regex", "regex": "[ab]+"}
    answer = hermes.post("/v1/completions", prompt="a", max_tokens=2, response_format=form)
    assert answer.status_code == 200
    assert hermes.planner.submits[0].params.grammar == Grammar(GrammarKind.REGEX, "[ab]+")
