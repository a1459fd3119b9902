"""Grammars that an output must follow, by llguidance: which tokens may come next.

    Grammar --compile--> Matcher --copy--> one for each request:  accept(tokens) ... allowed()

A matcher's state is its grammar and the tokens that it has taken, nothing else. All work is bounded
by llguidance's fuel: a grammar beyond it is refused when it is compiled, or fails at the token that
needs more. Keywords of a JSON schema that llguidance does not enforce are refused, never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.core.sampling import Grammar, GrammarKind
from forebay.models.config import ModelConfig
from forebay.models.errors import ModelError
from forebay.models.tokenizer import Tokenizer

if TYPE_CHECKING:  # it is loaded with the first compiler: most processes only name these types
    import llguidance
    from llguidance._lib import JsonCompileOptions

# Blanks between the parts of a JSON text: a model that likes blanks must not fill its answer with
# them.
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r"[ \t\r\n]{1,16}",
    "lenient": False,
    "coerce_one_of": False,
}
_LEXER_STATES_MAX = 50_000  # of one request, some 2 KB each
_REASON_CHARS = 300

Allowed = npt.NDArray[np.bool_]


class GrammarError(Exception):
    """A grammar that cannot be compiled, or cannot go on. One line."""


class Matcher:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    def accept(self, tokens: Sequence[int]) -> None:
        """Raises ``GrammarError`` for a token that the grammar does not allow."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise GrammarError(_one_line(self._matcher.get_error()))

    def allowed(self, ends: Sequence[int]) -> Allowed:
        """(vocab,): tokens that may come next. ``ends``: tokens that end the output, where the
        grammar may end.

        Raises ``GrammarError`` if that takes too much work, or if there are none.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(_one_line(self._matcher.get_error()))
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(np.bool_)
        allowed[list(ends)] = self._matcher.is_accepting()
        if not allowed.any():
            raise GrammarError("no token can go on, and the output may not end here")
        return allowed


class GrammarCompiler:
    """For one tokenizer. Loading it takes some tenths of a second and some tens of MiB."""

    def __init__(self, model: Path, vocab_size: int, end: int) -> None:
        """``end``: a token that ends outputs. Raises ``GrammarError`` for a tokenizer that
        llguidance cannot read."""
        try:
            import llguidance

            self._tokenizer = llguidance.LLTokenizer(
                str(model / "tokenizer.json"), n_vocab=vocab_size, eos_token=end
            )
            self._limits = llguidance.LLParserLimits(
                max_lexer_states=_LEXER_STATES_MAX, verbose_errors=False
            )
        except Exception as error:  # the library raises plain ones for every kind of tokenizer
            reason = _one_line(str(error))
            raise GrammarError(f"this model's tokenizer takes no grammar: {reason}") from None
        self._matcher = llguidance.LLMatcher
        self._vocab_size = vocab_size

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of the grammar. Raises ``GrammarError``."""
        try:
            source = self._source(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(_one_line(str(error))) from None
        inner = self._matcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if inner.is_error():
            raise GrammarError(_one_line(inner.get_error()))
        matcher = Matcher(inner, self._vocab_size)
        matcher.copy().allowed(())
        return matcher

    def _source(self, grammar: Grammar) -> str:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                schema = msgspec.json.decode(grammar.text)
                return str(self._matcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS))
            case GrammarKind.REGEX:
                return str(self._matcher.grammar_from_lark(f"start: {regex_rule(grammar.text)}"))
            case GrammarKind.LARK:
                return str(self._matcher.grammar_from_lark(grammar.text))


def regex_rule(regex: str) -> str:
    """``regex`` as Lark writes it. ``\\d`` is a digit from 0 to 9."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(regex, 'd')}/" if regex else '""'


def load_compiler(model: Path, config: ModelConfig) -> GrammarCompiler:
    """Raises ``GrammarError`` for a model whose outputs have no end, or whose tokenizer takes no
    grammar.
    """
    ends = config.eos_ids
    if not ends:
        try:
            ends = tuple(id for id in (Tokenizer(model).eos_id,) if id is not None)
        except ModelError as error:
            raise GrammarError(str(error)) from None
    if not ends:
        raise GrammarError("this model has no token that ends an output, so it takes no grammar")
    return GrammarCompiler(model, config.vocab_size, ends[0])


def _one_line(text: str) -> str:
    """The reason alone, without what the library adds of its own state."""
    line = re.sub(r"\s+", " ", text.partition("<state>")[0]).strip()
    return line[:_REASON_CHARS] or "the grammar has no output"
