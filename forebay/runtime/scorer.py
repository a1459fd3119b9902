"""Log-probabilities of given text: what the model thought of each token of a prompt, from the logits behind the token before it.

    piece 1   rows 0 .. k-1 score tokens 1 .. k-1, and the row behind token k-1 waits
    piece 2   the waiting row scores token k, its own rows the tokens after that, and so on

A prompt is cut into pieces as plans have it; the scores do not depend on where.
"""

import torch
from torch import Tensor

from forebay.core.messages import Scores, TokenLogprobs
from forebay.runtime.mirror import Step

# Rows whose log-probabilities are worked out at once: a bound on memory beside the logits themselves.
_ROWS = 64


class PromptScorer:
    """Keeps, for each slot whose prompt is not at its end, the logits behind its last token so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: dict[int, Tensor] = {}

    def score(self, step: Step, logits: Tensor) -> Scores:
        """``logits``: (T, V) float32, of all rows of ``step``, whose ``score`` is set."""
        assert step.score is not None and len(logits) == len(step.tokens)
        tokens = torch.from_numpy(step.tokens.astype("int64")).to(self._device)
        before = self._waiting.pop(step.slot, None)
        if not step.sample:
            self._waiting[step.slot] = logits[-1:].clone()
        if step.start == 0:
            return Scores(step.slot, 1, _logprobs(logits[:-1], tokens[1:], step.score))
        assert before is not None, "a prompt that is scored is computed from its beginning"
        first = _logprobs(before, tokens[:1], step.score)
        return Scores(step.slot, step.start, first + _logprobs(logits[:-1], tokens[1:], step.score))


def _logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[TokenLogprobs, ...]:
    """Of ``tokens`` (T,) and of the ``count`` most likely ones, each from its row of ``logits`` (T, V)."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(logits), _ROWS):
        logprobs = logits[start : start + _ROWS].log_softmax(dim=-1)
        chosen = logprobs.gather(1, tokens[start : start + _ROWS].unsqueeze(1)).squeeze(1)
        top = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
        found += [
            TokenLogprobs(own, tuple(ids), tuple(values))
            for own, ids, values in zip(
                chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
            )
        ]
    return tuple(found)
