"""docs/HTTP.md lists every field of both endpoints with what happens; here it is held against the parser."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.frontend.asked import Asked
from forebay.frontend.errors import ApiError
from forebay.frontend.parse import parse_chat, parse_completion
from forebay.frontend.protocol import HINTS, NEUTRAL, ChatRequest, CompletionRequest

TABLE = (Path(__file__).parents[2] / "docs" / "HTTP.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (\w+) \| (.+) \|$", re.MULTILINE)
ROWS = {name: (completions, chat, text) for name, completions, chat, text in ROW.findall(TABLE)}
ENDPOINTS = ("completions", "chat")
EACH = [(name, endpoint) for name in ROWS for endpoint in ENDPOINTS]


def parsed(endpoint: str, **more: Any) -> Asked:
    if endpoint == "completions":
        return parse_completion(json.dumps({"model": "m", "prompt": "x"} | more).encode())
    messages = [{"role": "user", "content": "x"}]
    return parse_chat(json.dumps({"model": "m", "messages": messages} | more).encode())


def said(name: str, endpoint: str) -> str:
    return ROWS[name][ENDPOINTS.index(endpoint)]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_table_has_every_field_and_no_other(endpoint: str) -> None:
    kind = CompletionRequest if endpoint == "completions" else ChatRequest
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    assert {name for name in ROWS if said(name, endpoint) != "unknown"} == set(known)
    for name, type_ in known.items():
        untyped = "hint" if name in HINTS else "refused"
        assert said(name, endpoint) == (untyped if type_ is msgspec.Raw else "used"), name


@pytest.mark.parametrize(("name", "endpoint"), EACH)
def test_what_happens_to_a_field(name: str, endpoint: str) -> None:
    match said(name, endpoint):
        case "hint":
            for value in (True, "any", ["thing"], {"a": 1}, 5, None):
                assert parsed(endpoint, **{name: value}) == parsed(endpoint)
        case "refused":
            taken = re.findall(r"`([^`]+)`", ROWS[name][2].partition("taken as ")[2])
            assert [json.loads(value) for value in taken] == [None, *NEUTRAL[name]]
            for value in taken:
                assert parsed(endpoint, **{name: json.loads(value)}) == parsed(endpoint)
            with pytest.raises(ApiError) as error:
                parsed(endpoint, **{name: {"something": "else"}})
            assert (error.value.status, error.value.param) == (400, name)
        case "used":
            with pytest.raises(ApiError) as error:
                parsed(endpoint, **{name: [{}]})
            assert error.value.status == 400
            assert (error.value.param or "").startswith(name)
        case "unknown":
            with pytest.raises(ApiError) as error:
                parsed(endpoint, **{name: None})
            assert (error.value.param, error.value.code) == (name, "unknown_field")


def test_null_is_not_given() -> None:
    optional = [name for name in ROWS if name not in ("model", "messages", "prompt")]
    for endpoint in ENDPOINTS:
        nulls = {name: None for name in optional if said(name, endpoint) != "unknown"}
        assert parsed(endpoint, **nulls) == parsed(endpoint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 3.0),
        ("max_completion_tokens", 3.0),
        ("min_tokens", 2.0),
        ("n", 2.0),
        ("seed", -7.0),
        ("top_k", 5.0),
        ("priority", 1.0),
        ("stop_token_ids", [1.0, 2]),
        ("temperature", 1),
        ("top_p", 1),
        ("prompt_logprobs", 1.0),
    ],
)
def test_numbers_as_json_writers_print_them(name: str, value: Any) -> None:
    plain = [int(v) for v in value] if isinstance(value, list) else value
    whole = plain if isinstance(plain, list) else int(plain)
    for endpoint in ENDPOINTS:
        found = parsed(endpoint, **{name: value})
        assert found == parsed(endpoint, **{name: whole})
        assert type(found.priority) is int
        msgspec.json.encode(found.params)  # no type of the parser's own goes on


@pytest.mark.parametrize("value", [2.5, "2", True, 1e400, [2], {}])
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": value}).encode()
    with pytest.raises(ApiError) as error:
        parse_completion(body.replace(b"Infinity", b"1e400"))
    assert error.value.param == "max_tokens"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_log_probabilities_in_either_endpoints_spelling(endpoint: str) -> None:
    def asked(**more: Any) -> int | None:
        return parsed(endpoint, **more).params.logprobs

    assert asked() is asked(logprobs=False) is asked(logprobs=None, top_logprobs=0) is None
    assert asked(logprobs=True) == asked(logprobs=0) == 0
    assert asked(logprobs=True, top_logprobs=4) == asked(logprobs=4) == 4


def test_a_history_of_tools_reaches_the_template_as_templates_expect_it() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "name": "bob", "content": "what?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                {"id": "2", "function": {"name": "g", "arguments": "no json"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "assistant", "function_call": {"name": "h", "arguments": "{}"}},
        {"role": "function", "name": "h", "content": "43"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    asked = parse_chat(json.dumps({"model": "m", "messages": messages}).encode())
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "no json"}},
    ]
    older = [{"type": "function", "function": {"name": "h", "arguments": {}}}]
    assert list(asked.source.messages) == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "what?", "name": "bob"},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": older},
        {"role": "tool", "content": "43", "name": "h"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "and?"},
    ]
