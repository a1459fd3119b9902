"""The frontend's half of a model: its name, tokenizer and limits. The weights are the workers' business."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.frontend.sequence import Detokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """``eos`` ends a text; ``vocab_size`` bounds token ids; ``max_context`` is prompt + output in tokens."""

    name: str
    tokenizer: Tokenizer
    eos: tuple[int, ...]
    vocab_size: int
    max_context: int

    def detokenizer(self, skip_special: bool) -> Detokenizer:
        from forebay.models.detokenize import IncrementalDetokenizer

        return IncrementalDetokenizer(self.tokenizer, skip_special)


def load_served_model(path: Path, name: str, max_context: int) -> ServedModel:
    """Raises ``models.errors.ModelError`` when the directory ``path`` is no model."""
    from forebay.models.config import load_config
    from forebay.models.tokenizer import Tokenizer

    config = load_config(path)
    tokenizer = Tokenizer(path)
    for warning in tokenizer.warnings:
        print(f"forebay: warning: {name}: {warning}", file=sys.stderr, flush=True)
    declared = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    ends = (*config.eos_ids, *declared, *tokenizer.turn_end_ids)
    return ServedModel(
        name,
        tokenizer,
        tuple(dict.fromkeys(ends)),
        config.vocab_size,
        max_context,
    )
