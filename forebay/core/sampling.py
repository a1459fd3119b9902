"""How a request wants its tokens chosen: the one parameter object from the API down to the last
stage's sampler.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Self

import msgspec

MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKENS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_CHARS = 64 << 10
SEED_BITS = 64


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"  # llguidance's dialect; made here, not taken from users


class Grammar(msgspec.Struct, frozen=True):
    """What an output must be, from its first character to its last."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"grammar has {len(self.text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed"
            )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters, named as in the OpenAI API and vLLM.

    ``temperature`` 0 is greedy, and so is ``top_p`` 0. ``top_k`` 0 or -1, ``top_p`` 1, ``min_p`` 0
    switch those filters off. ``seed`` makes a request's text repeatable: sampling is counter-based
    on (seed, output index), so a re-run continues the same text. ``logprobs`` asks for that many
    alternatives beside the chosen token's own log-probability (of the distribution before
    temperature and filters), ``prompt_logprobs`` the same for the prompt's own tokens: then all of
    the prompt is computed, cached or not.
    ``grammar``: no token comes that it does not allow, and its end is the end of the text, whatever
    ``min_tokens`` and ``ignore_eos`` say. Raises ``ValueError`` with one line (what was given, what
    is allowed) on bad values.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        set_ = msgspec.structs.force_setattr
        set_(self, "stop", _strings(self.stop))
        set_(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.top_k == -1:
            set_(self, "top_k", 0)
        _within("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within(
            "min_tokens",
            self.min_tokens,
            0,
            self.max_tokens if self.max_tokens is not None else 2**31 - 1,
        )
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # Much smaller ones turn logits into infinities in float32.
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _within("seed", self.seed, -(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed"
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise ValueError(
                    f"a stop string has {len(text)} characters; 1 to {MAX_STOP_STRING_CHARS} are allowed"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKENS} are allowed"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed"
            )
        for bias in self.logit_bias.values():
            _within("logit_bias", bias, -100.0, 100.0)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_p == 0.0

    @property
    def ends_at_eos(self) -> bool:
        return not self.ignore_eos or self.grammar is not None

    @property
    def needs_outputs(self) -> bool:
        """Whether the sampler must know the tokens that were emitted before."""
        return self.has_penalties or self.grammar is not None

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler must know the tokens that came before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def replace(self, **changes: object) -> Self:
        return msgspec.structs.replace(self, **changes)


def _strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also false for NaN
        raise ValueError(f"{name} is {value}; it must be between {low} and {high}")
