"""What the grammar of forced calls lets through, the parser of the same format reads back whole."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from forebay.core.sampling import Grammar, GrammarKind
from forebay.frontend.tools import FORMATS, CallArguments, CallStart, ToolCallParser, ToolFormat
from forebay.frontend.tools.enforced import calls_grammar
from forebay.models.grammar import GrammarCompiler
from tests.frontend.tiny_text import EOS, VOCABULARY, write_text_model

MARKERS = {"[TOOL_CALLS]": 257, "<|python_tag|>": 258}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/word"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"word": {"type": "string", "maxLength": 12}},
    },
}
PING: dict[str, Any] = {
    "name": 'ping.it-"now"',
    "parameters": {"type": "object", "additionalProperties": False},
}
TOOLS = {tool["name"]: tool["parameters"] for tool in (WEATHER, PING)}
TOKENS_MAX = 600


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    model: Path = write_text_model(tmp_path_factory.mktemp("calls") / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    assert {marker: tokenizer.token_to_id(marker) for marker in MARKERS} == MARKERS
    tokenizer.save(str(model / "tokenizer.json"))
    return GrammarCompiler(model, VOCABULARY, EOS)


def sample(compiler: GrammarCompiler, grammar: Grammar, seed: int) -> str | None:
    """A text of the grammar, None for one that does not end in time."""
    chosen = random.Random(seed)
    matcher = compiler.compile(grammar)
    text = b""
    names = {token: marker.encode() for marker, token in MARKERS.items()}
    for _ in range(TOKENS_MAX):
        allowed = matcher.allowed((EOS,)).nonzero()[0].tolist()
        if EOS in allowed and (len(allowed) == 1 or chosen.random() < 0.6):
            return text.decode()
        likely = [token for token in allowed if token in frozenset(b'"]}')]
        others = [token for token in allowed if token != EOS]
        token = chosen.choice(likely if likely and chosen.random() < 0.3 else others)
        text += names.get(token) or bytes([token])
        matcher.accept([token])
    return None


def check(format: ToolFormat, text: str, several: bool) -> int:
    parser = ToolCallParser(format, TOOLS)
    pieces = parser.feed(text) + parser.finish()
    assert all(isinstance(piece, CallStart | CallArguments) for piece in pieces), text
    assert not parser.is_broken and parser.calls >= 1, text
    assert several or parser.calls == 1, text
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    arguments = [piece.text for piece in pieces if isinstance(piece, CallArguments)]
    for name, value in zip(names, arguments, strict=True):
        jsonschema.validate(json.loads(value), TOOLS[name])
    return parser.calls


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_read_back(compiler: GrammarCompiler, name: str, several: bool) -> None:
    grammar = calls_grammar(FORMATS[name], (WEATHER, PING), several, MARKERS.get)
    texts = [sample(compiler, grammar, seed) for seed in range(30)]
    counts = [check(FORMATS[name], text, several) for text in texts if text is not None]
    assert len(counts) > 15
    assert max(counts) > 1 or not several


@pytest.mark.parametrize("name", FORMATS)
def test_calls_or_a_form(compiler: GrammarCompiler, name: str) -> None:
    form = Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["yes", "no"]}')
    grammar = calls_grammar(FORMATS[name], (WEATHER,), False, MARKERS.get, form)
    texts = [sample(compiler, grammar, seed) for seed in range(30)]
    answers = [text for text in texts if text in ('"yes"', '"no"')]
    calls = [text for text in texts if text is not None and text not in answers]
    assert answers and calls
    for text in calls:
        check(FORMATS[name], text, several=False)
