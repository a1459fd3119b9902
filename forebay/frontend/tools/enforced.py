"""The grammar of an answer that must be calls, in the words of the model's own format.

hermes     start: call ("\\n" call)*        call: "<tool_call>\\n" f0 "\\n</tool_call>" | ...
                                           f0:   "{\\"name\\": \\"weather\\", \\"arguments\\": " <its schema> "}"
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forebay.core.sampling import Grammar, GrammarKind
from forebay.frontend.tools.formats import ToolFormat
from forebay.models.grammar import regex_rule

# As for answers (`models.grammar`); it also replaces what a schema says here for itself.
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,16}", "lenient": False, "coerce_one_of": False}
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def calls_grammar(
    format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    several: bool,
    special_id: Callable[[str], int | None],
    answer: Grammar | None = None,
) -> Grammar:
    """Calls of ``tools`` (functions in OpenAI's form), more than one if ``several``; or ``answer``,
    where that is given.

    ``special_id``: the id of a marker that is a special token, whose text no other tokens can make.
    Raises ``ValueError`` where the grammar is too long.
    """

    def marker(text: str) -> str:
        token = special_id(text)
        return _quoted(text) if token is None else f"<[{token}]>"

    rules = [_function(number, tool, format) for number, tool in enumerate(tools)]
    rules.append("object: " + " | ".join(f"f{number}" for number in range(len(tools))))
    rules.append("calls: " + _calls(format, several, marker))
    rules.append("start: calls" if answer is None else f"start: calls | {_answer(answer)}")
    return Grammar(GrammarKind.LARK, "\n".join(rules))


def _calls(format: ToolFormat, several: bool, marker: Callable[[str], str]) -> str:
    if format.listed:
        opening = marker(format.opening) + " " if format.opening else ""
        more = ' (", " object)*' if several else ""
        return f'{opening}"[" object{more} "]"'
    one = "object"
    if format.closing:
        one = f'{marker(format.opening)} "\\n" object "\\n" {marker(format.closing)}'
    return f"{one} ({_quoted(format.separator)} {one})*" if several else one


def _function(number: int, tool: Mapping[str, Any], format: ToolFormat) -> str:
    head = f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "{format.arguments}": '
    schema = {**(tool.get("parameters") or ANY_OBJECT), "x-guidance": JSON_OPTIONS}
    return f'f{number}: {_quoted(head)} %json {json.dumps(schema)} "}}"'


def _answer(grammar: Grammar) -> str:
    if grammar.kind is GrammarKind.REGEX:
        return regex_rule(grammar.text)
    return f"%json {json.dumps({**json.loads(grammar.text), 'x-guidance': JSON_OPTIONS})}"


def _quoted(text: str) -> str:
    return json.dumps(text)
