"""The frontend's half of a model: its name, tokenizer and limits. The weights are the workers' business."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from forebay.frontend.sequence import Detokenizer
from forebay.settings import GenerationConfig

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.models.spelling import Spelling
    from forebay.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """``eos`` ends a text; ``vocab_size`` bounds token ids; ``max_context`` is prompt + output in tokens;
    ``sampling``: what a request without these fields gets, by name."""

    name: str
    tokenizer: Tokenizer
    eos: tuple[int, ...]
    vocab_size: int
    max_context: int
    sampling: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def spelling(self) -> Spelling:
        from forebay.models.spelling import Spelling

        return Spelling(self.tokenizer)

    def detokenizer(self, skip_special: bool) -> Detokenizer:
        from forebay.models.detokenize import IncrementalDetokenizer

        return IncrementalDetokenizer(self.tokenizer, skip_special)


def load_served_model(
    path: Path,
    name: str,
    max_context: int,
    generation_config: GenerationConfig = GenerationConfig.AUTO,
) -> ServedModel:
    """Raises ``models.errors.ModelError`` when the directory ``path`` is no model."""
    from forebay.models.config import load_config
    from forebay.models.sampling_defaults import NAME, in_words, read_sampling_defaults
    from forebay.models.tokenizer import Tokenizer

    config = load_config(path)
    tokenizer = Tokenizer(path)
    for warning in tokenizer.warnings:
        print(f"forebay: warning: {name}: {warning}", file=sys.stderr, flush=True)
    sampling = read_sampling_defaults(path) if generation_config is GenerationConfig.AUTO else {}
    if sampling:
        print(
            f"forebay: requests without sampling fields get those of the model's {NAME}: "
            f"{in_words(sampling)}; --generation-config none leaves them out",
            file=sys.stderr,
            flush=True,
        )
    declared = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    ends = (*config.eos_ids, *declared, *tokenizer.turn_end_ids)
    return ServedModel(
        name,
        tokenizer,
        tuple(dict.fromkeys(ends)),
        config.vocab_size,
        max_context,
        sampling,
    )
