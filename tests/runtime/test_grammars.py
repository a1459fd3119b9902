"""Grammars in the sampler: outputs keep to them, whatever the logits say, and however the tokens
come.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from forebay.core.messages import Opening, pack_tokens
from forebay.core.sampling import Grammar, GrammarKind, SamplingParams
from forebay.models.grammar import GrammarCompiler, GrammarError
from forebay.runtime.grammars import Compiled, SlotGrammars
from forebay.runtime.mirror import Step
from forebay.runtime.sampler import Sampler
from tests.frontend.tiny_text import EOS, VOCABULARY, write_text_model

PROMPT = list(b"Say it: ")
COLOURS = {"enum": ["red", "green", "blue"]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    model = write_text_model(tmp_path_factory.mktemp("grammar") / "model")
    return GrammarCompiler(model, VOCABULARY, EOS)


@pytest.fixture
def sampler(compiler: GrammarCompiler) -> Sampler:
    return make_sampler(compiler)


def make_sampler(compiler: GrammarCompiler) -> Sampler:
    grammars = SlotGrammars(Compiled(lambda: compiler), VOCABULARY)
    return Sampler(VOCABULARY, torch.device("cpu"), grammars)


def noise(seed: int, index: int) -> torch.Tensor:
    """The logits of output ``index``, (VOCABULARY,): what a model would say is a function of the
    text, here of the place.
    """
    values = np.random.default_rng([seed, index]).normal(size=VOCABULARY) * 3
    return torch.from_numpy(values.astype(np.float32))


def generate(
    sampler: Sampler,
    params: SamplingParams,
    logits: Callable[[int], torch.Tensor],
    outputs: list[int] | None = None,
    slot: int = 0,
) -> list[int]:
    """Tokens up to the end token or ``max_tokens``. ``outputs``: emitted already, in another life
    of the request.
    """
    assert params.max_tokens is not None
    text = PROMPT + (outputs or [])
    begun = len(text) - len(PROMPT)
    # As the planner does it: the first part is cached, so it comes as history; a piece brings the
    # rest.
    start = len(text) - 2
    history = pack_tokens(text[:start]) if start > len(PROMPT) else b""
    sampler.open(Opening(slot, "r", params, (EOS,), len(PROMPT), begun, history))
    piece = text[start:]
    while len(text) - len(PROMPT) < params.max_tokens:
        index = len(text) - len(PROMPT)
        step = Step(slot, start, np.array(piece, np.uint32), 0, True, index)
        sampler.count([step])
        ((token, _),) = sampler.sample(logits(index).unsqueeze(0), [step])
        if sampler.failure(slot):
            break
        text.append(token)
        if token == EOS:
            break
        start, piece = len(text) - 1, [token]
    return text[len(PROMPT) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_noise_becomes_what_the_schema_asks_for(sampler: Sampler, temperature: float) -> None:
    for seed in range(20):
        params = SamplingParams(
            max_tokens=400, temperature=temperature, seed=seed, grammar=schema(PERSON)
        )
        tokens = generate(sampler, params, partial(noise, seed))
        if tokens[-1] != EOS:  # an integer has no last digit
            continue
        value = json.loads(bytes(tokens[:-1]))
        assert set(value) == {"name", "age"}
        assert len(value["name"]) <= 9
        assert isinstance(value["age"], int)


def test_a_regex_is_kept_to(sampler: Sampler) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[ab]*a[ab]{13}c")
    for seed in range(5):
        params = SamplingParams(max_tokens=2000, seed=seed, grammar=grammar)
        tokens = generate(sampler, params, partial(noise, seed))
        assert tokens[-1] == EOS
        assert tokens[-16:-15] == [ord("a")]


@pytest.mark.parametrize(
    ("regex", "texts", "others"),
    [
        (r"\d{2}/\d\/x", ["12/3/x"], ["12x", "\u0661\u06612/3/x"]),
        ("^(|.*)$", ["", "any"], ["two\nlines"]),
        ("a\nb", ["a\nb"], ["ab"]),
        (r"[\w'\"]+", ["é'\""], ["a b"]),
        ("", [""], ["x"]),
    ],
)
def test_a_regex_is_the_whole_output(
    compiler: GrammarCompiler, regex: str, texts: list[str], others: list[str]
) -> None:
    compiled = compiler.compile(Grammar(GrammarKind.REGEX, regex))
    for text in texts:
        matcher = compiled.copy()
        matcher.accept(list(text.encode()))
        assert matcher.allowed((EOS,))[EOS], text
    for text in others:
        with pytest.raises(GrammarError):
            compiled.copy().accept(list(text.encode()))


def test_a_request_that_comes_back_goes_on_with_the_same_text(
    sampler: Sampler, compiler: GrammarCompiler
) -> None:
    """Retraction, and another grid after kill -9: a new slot is told what was emitted, in whatever
    part of it.
    """
    params = SamplingParams(
        max_tokens=80, seed=3, grammar=schema(PERSON), repetition_penalty=1.2, logprobs=2
    )
    whole = generate(sampler, params, partial(noise, 3))
    assert len(whole) > 20
    for emitted in range(len(whole)):
        again = generate(make_sampler(compiler), params, partial(noise, 3), whole[:emitted], slot=1)
        assert again == whole


@pytest.mark.parametrize(
    "changes",
    [{"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "min_tokens": 100}, {}],
    ids=str,
)
def test_the_end_of_the_grammar_is_the_end_of_the_text(
    sampler: Sampler, changes: dict[str, int]
) -> None:
    params = SamplingParams(max_tokens=100, seed=1, grammar=schema(COLOURS)).replace(**changes)
    tokens = generate(sampler, params, partial(noise, 1))
    assert tokens[-1] == EOS
    assert json.loads(bytes(tokens[:-1])) in COLOURS["enum"]


def test_min_tokens_holds_while_the_grammar_can_go_on(sampler: Sampler) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[0-9]+")
    eager = torch.zeros(VOCABULARY)
    eager[EOS] = 50.0
    params = SamplingParams(max_tokens=40, min_tokens=7, seed=1, grammar=grammar)
    tokens = generate(sampler, params, lambda _: eager)
    assert len(tokens) == 8
    assert bytes(tokens[:-1]).isdigit()


def test_a_bias_against_all_that_is_legal_stays_within_the_grammar(sampler: Sampler) -> None:
    legal = dict.fromkeys((*b'"redgnblu', EOS), -100.0)
    params = SamplingParams(max_tokens=100, seed=1, grammar=schema(COLOURS), logit_bias=legal)
    tokens = generate(sampler, params, partial(noise, 1))
    assert json.loads(bytes(tokens[:-1])) in COLOURS["enum"]


def test_a_grammar_that_cannot_go_on_ends_its_own_request_alone(
    sampler: Sampler, compiler: GrammarCompiler
) -> None:
    """A rank that is given a grammar which no frontend would let through."""
    bad = SamplingParams(max_tokens=9, seed=1, grammar=Grammar(GrammarKind.REGEX, "("))
    good = SamplingParams(max_tokens=100, seed=1, grammar=schema(COLOURS))
    for slot, params in enumerate((bad, good)):
        sampler.open(Opening(slot, "r", params, (EOS,), len(PROMPT), 0, b""))
    steps = [Step(slot, 0, np.array(PROMPT, np.uint32), 0, True, 0) for slot in range(2)]
    sampler.count(steps)
    chosen = sampler.sample(torch.stack([noise(1, 0)] * 2), steps)
    assert "invalid regex" in sampler.failure(0)
    assert sampler.failure(1) == ""
    assert chosen[1][0] == ord('"')


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.REGEX, "("),
        Grammar(GrammarKind.REGEX, "(?=a)b"),
        schema({"$ref": "#/$defs/no"}),
        schema({"$ref": "#"}),
        schema({"enum": []}),
        schema({"type": "object", "properties": {"a": False}, "required": ["a"]}),
        schema({"type": "string", "not": {"const": "a"}}),
        schema({"type": "string", "not": {"const": "a"}, "x-guidance": {"lenient": True}}),
        schema({"type": "string", "format": "no-such-format"}),
        schema({"type": "wrong"}),
        schema({"properties": 5}),
        Grammar(GrammarKind.JSON_SCHEMA, "[1]"),
        Grammar(GrammarKind.JSON_SCHEMA, "true"),
        Grammar(GrammarKind.JSON_SCHEMA, "{"),
    ],
    ids=lambda grammar: grammar.text,
)
def test_what_does_not_compile_is_said_in_one_line(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(grammar)
    assert 0 < len(str(caught.value)) <= 300
    assert "\n" not in str(caught.value)


def test_a_model_without_a_tokenizer_takes_no_grammar(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="tokenizer takes no grammar"):
        GrammarCompiler(tmp_path, VOCABULARY, EOS)
