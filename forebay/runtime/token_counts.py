"""How often each token stands in a slot's text: all that penalties need to know of it, in O(new tokens) per plan."""

import numpy as np
import torch
from torch import Tensor

from forebay.core.messages import Opening, unpack_tokens
from forebay.runtime.mirror import Step, Tokens


class TokenCounts:
    """Only slots whose request has penalties: ``seen`` (vocab,) bool, prompt and output; ``emitted`` (vocab,) float32, output."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._seen: dict[int, Tensor] = {}
        self._emitted: dict[int, Tensor] = {}
        self._prompt_tokens: dict[int, int] = {}

    def open(self, opening: Opening) -> None:
        """Forget what the slot held and count the opening's history, if its request has penalties."""
        slot = opening.slot
        for table in (self._seen, self._emitted, self._prompt_tokens):
            table.pop(slot, None)
        if opening.params.has_penalties:
            self._seen[slot] = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            self._emitted[slot] = torch.zeros(
                self._vocab_size, dtype=torch.float32, device=self._device
            )
            self._prompt_tokens[slot] = opening.prompt_tokens
            self._count(slot, 0, unpack_tokens(opening.history))

    def add(self, step: Step) -> None:
        """Count the tokens of one piece; free for a slot without penalties."""
        if step.slot in self._seen:
            self._count(step.slot, step.start, step.tokens)

    def of(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        """``seen`` and ``emitted`` of slots with penalties, both (len(slots), vocab)."""
        return torch.stack([self._seen[slot] for slot in slots]), torch.stack(
            [self._emitted[slot] for slot in slots]
        )

    def _count(self, slot: int, start: int, tokens: Tokens) -> None:
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
        self._seen[slot][ids] = True
        outputs = ids[max(0, self._prompt_tokens[slot] - start) :]
        self._emitted[slot].index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.float32))
