"""Tool calls and reasoning out of text: right for the whole text, and the same for every cut of it."""

import codecs
import json
import random
from dataclasses import dataclass
from typing import Protocol

import pytest

from forebay.frontend.reasoning import ReasoningParser
from forebay.frontend.tools import (
    FORMATS,
    CallArguments,
    CallStart,
    Content,
    MarkerEraser,
    Piece,
    Reasoning,
    ToolCallParser,
    choose_format,
)

NAMES = frozenset({"weather", "write", "ping"})


class Parser(Protocol):
    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


@dataclass
class Read:
    """What a client puts together from the pieces."""

    content: str
    calls: list[tuple[str, str]]
    reasoning: str = ""


def put_together(pieces: list[Piece]) -> Read:
    read = Read("", [])
    for piece in pieces:
        match piece:
            case Content(text):
                read.content += text
            case Reasoning(text):
                read.reasoning += text
            case CallStart(index, name):
                assert index == len(read.calls), "calls begin in order, each once"
                read.calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(read.calls) - 1, "arguments are the newest call's"
                read.calls[index] = (read.calls[index][0], read.calls[index][1] + text)
    return read


def read_all(parser: Parser, parts: list[str]) -> Read:
    return put_together([piece for part in parts for piece in parser.feed(part)] + parser.finish())


NASTY = json.dumps(
    {
        "text": 'a </tool_call> } ] [TOOL_CALLS] <|python_tag|> <|im_end|> "quoted\\" { [',
        "path": "C:\\dir\\",
        "é": "\u20ac 中文 😀",
        "n": [1, {"a": None}],
    },
    ensure_ascii=False,
)
ESCAPED = json.dumps({"text": "\u20ac\U0001f600 </tool_call>\n"})
SAMPLES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        "",
        [("ping", "{}")],
    ),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "write", "arguments": {NASTY}}}\n</tool_call>\nAnd\n'
        f'<tool_call>{{"arguments": {ESCAPED}, "name": "write"}}</tool_call>\n\n'
        '<tool_call>\n{"name": "ping"}\n</tool_call>',
        "Let me see.\nAnd",
        [("write", NASTY), ("write", ESCAPED), ("ping", "{}")],
    ),
    ("hermes", "Just <text> and <tool_car>.\n\n", "Just <text> and <tool_car>.\n\n", []),
    ("hermes", "A <tool_call> is a tag", "A <tool_call> is a tag", []),
    ("hermes", "<tool_<tool_call>x", "<tool_<tool_call>x", []),
    ("hermes", '<tool_call>{"no": 1}</tool_call>', '<tool_call>{"no": 1}</tool_call>', []),
    (
        "hermes",
        '<tool_call>{"name": "ping", "arguments": "{\\"a\\": 1}", "id": 7}</tool_call>',
        "",
        [("ping", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "ping", "arguments": null}', "", [("ping", "{}")]),
    (
        "llama3",
        '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "ping", "parameters": {}}',
        "",
        [("weather", '{"city": "Paris"}'), ("ping", "{}")],
    ),
    (
        "llama3",
        f'<|python_tag|>{{"type": "function", "name": "write", "parameters": {NASTY}}}',
        "",
        [("write", NASTY)],
    ),
    ("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3", '{"name": "ping", "age": 3}', '{"name": "ping", "age": 3}', []),
    ("llama3", '{"answer": {"name": "ping"}}', '{"answer": {"name": "ping"}}', []),
    (
        "llama3",
        'So:\n{"name": "ping", "parameters": {}}\nDone',
        "So:\nDone",
        [("ping", "{}")],
    ),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "write", "arguments": {NASTY}}}, '
        '{"name": "ping", "arguments": {}}]',
        "",
        [("write", NASTY), ("ping", "{}")],
    ),
    (
        "mistral",
        f"Hm. [TOOL_CALLS]write[ARGS]{NASTY}[TOOL_CALLS]ping[CALL_ID]abc123def[ARGS]{{}}",
        "Hm.",
        [("write", NASTY), ("ping", "{}")],
    ),
    ("mistral", "[TOOL_CALLS] is a token\n", "[TOOL_CALLS] is a token\n", []),
    (
        "json",
        f'[{{"name": "write", "arguments": {NASTY}}}, {{"name": "ping", "arguments": {{}}}}]',
        "",
        [("write", NASTY), ("ping", "{}")],
    ),
    ("json", "[1, 2]\n{}\n", "[1, 2]\n{}\n", []),
]
SAMPLE_IDS = [f"{name}-{number}" for number, (name, *_) in enumerate(SAMPLES)]


def cuts(text: str) -> list[list[str]]:
    """All cuts in two, one character at a time, and some at random."""
    chosen = random.Random(text)
    found = [[text[:at], text[at:]] for at in range(len(text) + 1)] + [list(text)]
    for _ in range(20):
        places = sorted(chosen.choices(range(len(text) + 1), k=chosen.randrange(2, 12)))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


@pytest.mark.parametrize(("name", "text", "content", "calls"), SAMPLES, ids=SAMPLE_IDS)
def test_calls_are_read_the_same_however_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for parts in cuts(text):
        assert read_all(ToolCallParser(FORMATS[name], NAMES), parts) == Read(content, calls), parts


@pytest.mark.parametrize(("name", "text", "content", "calls"), SAMPLES, ids=SAMPLE_IDS)
def test_cuts_inside_of_a_character_change_nothing(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    data = text.encode()
    for at in (at for at in range(len(data)) if data[at] & 0xC0 == 0x80):
        decoder = codecs.getincrementaldecoder("utf-8")()
        parts = [decoder.decode(data[:at]), decoder.decode(data[at:], final=True)]
        assert read_all(ToolCallParser(FORMATS[name], NAMES), parts) == Read(content, calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), SAMPLES, ids=SAMPLE_IDS)
def test_a_call_that_is_cut_off_is_never_whole(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for length in range(len(text)):
        parser = ToolCallParser(FORMATS[name], NAMES)
        read = read_all(parser, [text[:length]])
        assert len(read.calls) == parser.calls <= len(calls)
        for (got_name, got), (expected_name, expected) in zip(read.calls, calls, strict=False):
            assert got_name == expected_name
            assert expected.startswith(got)
        if not parser.is_broken:
            assert read.calls == calls[: len(read.calls)]


def test_one_call_at_most_where_that_was_asked() -> None:
    text = SAMPLES[1][1]
    for parts in cuts(text):
        parser = ToolCallParser(FORMATS["hermes"], NAMES, calls_max=1)
        assert read_all(parser, parts).calls == [("write", NASTY)]
        assert parser.calls == 3
        assert not parser.is_broken


@pytest.mark.parametrize(
    "text", ['{"name": "ping", "parameters": {"a": 1 2}}', '{"name": "ping", "parameters": [1]}']
)
def test_arguments_that_are_no_json_object_make_a_broken_call(text: str) -> None:
    parser = ToolCallParser(FORMATS["llama3"], NAMES)
    parser.feed(text)
    assert parser.calls == 1
    assert parser.is_broken


def test_markers_are_taken_out_where_no_call_is_wanted() -> None:
    text = 'Ah <tool_<b> <tool_call>\n{"name": "ping"}\n</tool_call>'
    for parts in cuts(text):
        read = read_all(MarkerEraser(FORMATS["hermes"].markers), parts)
        assert read == Read('Ah <tool_<b> \n{"name": "ping"}\n', [])


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm, 1 < 2.\n So.\n</think>\n\nYes.\n", "Hm, 1 < 2.\n So.", "Yes.\n"),
        (True, "\nHm </thin </think>Yes", "Hm </thin", "Yes"),
        (False, "No <think>thought</think>", "", "No <think>thought</think>"),
        (False, "\n <thin", "", "\n <thin"),
        (False, "<think>\n\n</think>\n\nYes", "", "Yes"),
        (True, "never ended </th", "never ended </th", ""),
        (True, "blank end \n", "blank end", ""),
    ],
)
def test_reasoning_is_told_from_the_answer_however_the_text_is_cut(
    opened: bool, text: str, reasoning: str, content: str
) -> None:
    for parts in cuts(text):
        read = read_all(ReasoningParser(opened), parts)
        assert read == Read(content, [], reasoning), parts


@pytest.mark.parametrize(
    ("setting", "template", "vocabulary", "chosen"),
    [
        ("auto", "{{ '<tool_call>' }}", (), "hermes"),
        ("auto", "x <|python_tag|> y", (), "llama3"),
        ("auto", "", ("[TOOL_CALLS]",), "mistral"),
        ("auto", "<tool_call>", ("[TOOL_CALLS]",), "hermes"),
        ("auto", None, (), "json"),
        ("mistral", "<tool_call>", (), "mistral"),
    ],
)
def test_the_format_is_the_models_own(
    setting: str, template: str | None, vocabulary: tuple[str, ...], chosen: str
) -> None:
    assert choose_format(setting, template, vocabulary.__contains__).name == chosen
