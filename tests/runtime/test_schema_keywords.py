"""Every keyword of JSON Schema 2020-12, alone and two on one value: enforced, or refused.

A sample is made of tokens drawn from what the grammar allows, with no model to make it likely.
"""

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

from forebay.core.sampling import Grammar, GrammarKind
from forebay.models.grammar import GrammarCompiler, GrammarError
from tests.frontend.tiny_text import EOS, VOCABULARY, write_text_model

SAMPLES = 20
TOKENS_MAX = 400
STRING: dict[str, Any] = {
    "minLength": 2,
    "maxLength": 4,
    "pattern": "^[a-f]+[0-9]?$",
    "enum": ["ab", "abcd1", "c"],
    "const": "abc",
    "format": "date",
    "not": {"const": "abc"},
    "contentEncoding": "base64",
    "contentMediaType": "application/json",
    "anyOf": [{"maxLength": 3}, {"pattern": "^x"}],
    "oneOf": [{"const": "ab"}, {"const": "cd"}],
    "allOf": [{"minLength": 3}, {"maxLength": 5}],
    "if": {"minLength": 3},
    "$ref": "#/$defs/short",
}
NUMBER: dict[str, Any] = {
    "minimum": 3,
    "maximum": 20,
    "exclusiveMinimum": 3,
    "exclusiveMaximum": 9.5,
    "multipleOf": 3,
    "enum": [4, 6, 9],
    "const": 6,
    "not": {"const": 6},
}
ARRAY: dict[str, Any] = {
    "items": {"enum": [1, 2, "x"]},
    "prefixItems": [{"const": 1}, {"const": "x"}],
    "minItems": 1,
    "maxItems": 3,
    "uniqueItems": True,
    "contains": {"const": 2},
    "minContains": 2,
    "maxContains": 2,
    "unevaluatedItems": False,
}
OBJECT: dict[str, Any] = {
    "properties": {"a": {"type": "boolean"}, "b": {"const": 1}},
    "required": ["a"],
    "additionalProperties": False,
    "patternProperties": {"^[xy]$": {"type": "null"}},
    "propertyNames": {"enum": ["a", "b", "x"]},
    "minProperties": 1,
    "maxProperties": 2,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "unevaluatedProperties": False,
}
CLOSING = frozenset(b'"]}')
COMMON = frozenset(b'abcx123",:')
KINDS = {"string": STRING, "number": NUMBER, "integer": NUMBER, "array": ARRAY, "object": OBJECT}


def schemas(kind: str) -> list[dict[str, Any]]:
    keywords = KINDS[kind].items()
    defs = {"$defs": {"short": {"type": "string", "maxLength": 2}}}
    return [
        {"type": kind, **dict(chosen), **(defs if kind == "string" else {})}
        for count in (1, 2)
        for chosen in itertools.combinations(keywords, count)
    ]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    model = write_text_model(tmp_path_factory.mktemp("grammar") / "model")
    return GrammarCompiler(model, VOCABULARY, EOS)


def sample(compiler: GrammarCompiler, schema: Any, seed: int) -> str | None:
    """A text of the grammar; None for one that does not end in time. Raises ``GrammarError``."""
    chosen = random.Random(seed)
    matcher = compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    tokens: list[int] = []
    while len(tokens) < TOKENS_MAX:
        allowed = matcher.allowed((EOS,)).nonzero()[0].tolist()
        if EOS in allowed and (len(allowed) == 1 or chosen.random() < 0.3):
            return bytes(tokens).decode()
        closing = [token for token in allowed if token in CLOSING] if chosen.random() < 0.3 else []
        common = [token for token in allowed if token in COMMON] * (chosen.random() < 0.5)
        token = chosen.choice(closing or common or [one for one in allowed if one != EOS])
        tokens.append(token)
        matcher.accept([token])
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_keywords_are_enforced_or_refused(compiler: GrammarCompiler, kind: str) -> None:
    wrong: list[str] = []
    enforced = 0
    for schema in schemas(kind):
        try:
            texts = [sample(compiler, schema, seed) for seed in range(SAMPLES)]
        except GrammarError:
            continue
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.FormatChecker()
        )
        whole = [text for text in texts if text is not None]
        bad = [text for text in whole if not validator.is_valid(json.loads(text))]
        if bad:
            wrong.append(f"{json.dumps(schema)}: {bad[0]}")
        enforced += bool(whole)
    assert not wrong, "\n".join(wrong)
    assert enforced >= 8
