"""Chooses tokens: from the last stage's logits and each request's parameters to token ids and
log-probabilities.

    logits (S, V) --> edits: bias, min_tokens, penalties, grammar --+--> greedy rows: argmax
         |                                                          '--> sampled rows: / temperature,
         |                                                                 min_p, top_k, top_p, draw
         '--> log-probabilities, of the logits as the model gave them

The order is vLLM's (`v1/sample/sampler.py`). A draw needs one uniform number, made from (seed,
output index) alone (rule R3): a re-run after a crash, another batch or another plan continue the
same text. A filter keeps *all* tokens that tie with the last one it keeps, so the outcome does not
depend on how a sort breaks ties. Each stage works on the rows that need it, all at once.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.core.messages import Opening, TokenLogprobs
from forebay.core.sampling import SEED_BITS, SamplingParams
from forebay.runtime.grammars import SlotGrammars
from forebay.runtime.mirror import Step
from forebay.runtime.token_counts import TokenCounts

_COUNTER = struct.Struct("<QQ")
_MANTISSA_BITS = 53
# Tokens looked at first for top_p: the set seldom has more, and finding it among all costs three
# times as much.
_NUCLEUS_FIRST = 256
# The upper 16 bits of the float 1.0 are 0x3F80.
_BUCKETS = 0x3F80 + 1
_CPU_ROWS = 1
# Below this everything but the peak has weight 0 anyway, and float32 would make it 0.
_TEMPERATURE_MIN = 1e-8

Chosen = tuple[int, TokenLogprobs | None]


def uniform(seed: int, output_index: int) -> float:
    """The number in [0, 1) that chooses a request's token ``output_index``: the top 53 bits of
    BLAKE2b(seed, index).
    """
    counter = _COUNTER.pack(seed % (1 << SEED_BITS), output_index)
    bits = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little")
    return (bits >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS


@dataclass(frozen=True, slots=True)
class _Slot:
    """What was worked out once for a request. ``banned``: tokens that may not come before
    ``params.min_tokens``.
    """

    params: SamplingParams
    bias_ids: Tensor
    bias: Tensor
    banned: Tensor

    def edits(self, output_index: int) -> bool:
        """Whether the request's logits are changed before anything is chosen."""
        params = self.params
        return (
            bool(params.logit_bias)
            or params.has_penalties
            or params.grammar is not None
            or output_index < params.min_tokens
        )


class Sampler:
    """Keeps per slot what its request asked for. ``open`` a slot, ``count`` every piece of it, then
    ``sample``.
    """

    def __init__(self, vocab_size: int, device: torch.device, grammars: SlotGrammars) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts = TokenCounts(vocab_size, device)
        self._grammars = grammars
        self._slots: dict[int, _Slot] = {}

    def open(self, opening: Opening) -> None:
        params = opening.params
        bias = {
            token: value
            for token, value in params.logit_bias.items()
            if 0 <= token < self._vocab_size
        }
        banned = sorted(
            {
                token
                for token in (*opening.eos, *params.stop_token_ids)
                if 0 <= token < self._vocab_size
            }
        )
        self._slots[opening.slot] = _Slot(
            params,
            torch.tensor(list(bias), dtype=torch.int64, device=self._device),
            torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device),
            torch.tensor(banned, dtype=torch.int64, device=self._device),
        )
        self._counts.open(opening)
        self._grammars.open(opening)

    def count(self, steps: Sequence[Step]) -> None:
        """Note the tokens of one plan's pieces, sampled or not."""
        for step in steps:
            self._counts.add(step)
            self._grammars.add(step)

    def sample(self, logits: Tensor, steps: Sequence[Step]) -> list[Chosen]:
        """One token per row. ``logits``: (S, V) float32, left as they are; ``steps``: the S
        sampling pieces, already counted.
        """
        slots = [self._slots[step.slot] for step in steps]
        edited = self._edit(logits, steps, slots)
        drawn = [row for row, slot in enumerate(slots) if not slot.params.is_greedy]
        tokens = _argmax(edited) if len(drawn) < len(slots) else [0] * len(slots)
        for part in self._parts(drawn):
            rows = torch.tensor(part, device=self._device)
            found = self._draw(
                edited[rows], [slots[row].params for row in part], [steps[row] for row in part]
            )
            for row, token in zip(part, found, strict=True):
                tokens[row] = token
        return list(zip(tokens, self._logprobs(logits, tokens, slots), strict=True))

    def failure(self, slot: int) -> str:
        """Why the grammar of a slot allows no token; empty while it does, or without one."""
        return self._grammars.failure(slot)

    def _parts(self, rows: list[int]) -> Iterator[list[int]]:
        """A GPU draws all rows at once; a CPU one by one, since a row and its temporaries just fit
        its cache.
        """
        count = _CPU_ROWS if self._device.type == "cpu" else max(len(rows), 1)
        return (rows[start : start + count] for start in range(0, len(rows), count))

    def _edit(self, logits: Tensor, steps: Sequence[Step], slots: list[_Slot]) -> Tensor:
        """Logits after bias, min_tokens and penalties: the same tensor if no row asks for any, else
        a copy.
        """
        rows = [row for row, slot in enumerate(slots) if slot.edits(steps[row].output_index)]
        if not rows:
            return logits
        edited = logits.clone()
        for row in rows:
            slot = slots[row]
            if slot.params.logit_bias:
                edited[row].index_add_(0, slot.bias_ids, slot.bias)
            if slot.params.grammar is None and steps[row].output_index < slot.params.min_tokens:
                edited[row, slot.banned] = -math.inf
        penalised = [row for row in rows if slots[row].params.has_penalties]
        if penalised:
            index = torch.tensor(penalised, device=self._device)
            seen, emitted = self._counts.of([steps[row].slot for row in penalised])
            edited[index] = self._penalise(
                edited[index], seen, emitted, [slots[row].params for row in penalised]
            )
        for row in rows:
            if (allowed := self._grammars.allowed(steps[row])) is not None:
                _refuse(edited[row], ~allowed)
        return edited

    def _penalise(
        self, logits: Tensor, seen: Tensor, emitted: Tensor, params: list[SamplingParams]
    ) -> Tensor:
        """Repetition (CTRL, arXiv 1909.05858, 4.1) over the whole text; frequency and presence
        (OpenAI) over the output.
        """
        repetition = self._column([p.repetition_penalty for p in params])
        frequency = self._column([p.frequency_penalty for p in params])
        presence = self._column([p.presence_penalty for p in params])
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - frequency * emitted - presence * (emitted > 0)

    def _draw(self, logits: Tensor, params: list[SamplingParams], steps: list[Step]) -> list[int]:
        """Inverse of the cumulative distribution, in order of token id. ``logits`` (R, V) may be
        overwritten.
        """
        # The peak goes first: divided by a tiny temperature it would be infinite.
        logits -= logits.amax(dim=-1, keepdim=True)
        logits /= self._column([max(p.temperature, _TEMPERATURE_MIN) for p in params])
        weights = _exp(logits)
        self._filter(weights, params)
        cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
        totals = cumulated[:, -1:]
        numbers = [
            uniform(p.seed or 0, step.output_index) for p, step in zip(params, steps, strict=True)
        ]
        points = self._column(numbers, torch.float64)
        # Strictly below the total, whatever the product rounds to: then the token found has a
        # weight above zero.
        targets = torch.minimum(points * totals, torch.nextafter(totals, torch.zeros_like(totals)))
        found = torch.searchsorted(cumulated, targets, right=True).squeeze(-1)
        tokens: list[int] = found.clamp_(max=self._vocab_size - 1).tolist()
        return tokens

    def _filter(self, weights: Tensor, params: list[SamplingParams]) -> None:
        """Zero what min_p, then top_k, then top_p take out. ``weights`` (R, V): exp(logit - the
        row's largest).
        """
        self._cut(weights, params, lambda p: p.min_p > 0, self._min_p_floor)
        self._cut(weights, params, lambda p: 0 < p.top_k < self._vocab_size, self._top_k_floor)
        self._cut(weights, params, lambda p: p.top_p < 1, self._top_p_floor)

    def _cut(
        self,
        weights: Tensor,
        params: list[SamplingParams],
        asks: Callable[[SamplingParams], bool],
        floor: Callable[[Tensor, list[SamplingParams]], Tensor],
    ) -> None:
        """Zero the weights below the floor, in the rows that ask for this filter alone."""
        rows = [row for row, p in enumerate(params) if asks(p)]
        if len(rows) == len(params):
            weights.masked_fill_(weights < floor(weights, params), 0.0)
        elif rows:
            index = torch.tensor(rows, device=self._device)
            part = weights[index]
            weights[index] = part.masked_fill(
                part < floor(part, [params[row] for row in rows]), 0.0
            )

    def _min_p_floor(self, weights: Tensor, params: list[SamplingParams]) -> Tensor:
        # The largest weight is exp(0) = 1.
        return self._column([p.min_p for p in params])

    def _top_k_floor(self, weights: Tensor, params: list[SamplingParams]) -> Tensor:
        largest = weights.topk(max(p.top_k for p in params), dim=-1).values
        return largest.gather(1, torch.tensor([[p.top_k - 1] for p in params], device=self._device))

    def _top_p_floor(self, weights: Tensor, params: list[SamplingParams]) -> Tensor:
        """Weight of the last token of the smallest set of likeliest tokens whose share is at least
        top_p (arXiv 1904.09751).
        """
        share = self._column([p.top_p for p in params], torch.float64)
        needed = weights.sum(dim=-1, keepdim=True, dtype=torch.float64) * share
        largest = weights.topk(min(_NUCLEUS_FIRST, self._vocab_size), dim=-1).values
        sums = largest.cumsum(dim=-1, dtype=torch.float64)
        if bool((sums[:, -1:] < needed).any()):
            return _share_floor(weights, share)
        # A row that is not finite (a model's own NaN) has no such place: its last candidate is as
        # good as any.
        return largest.gather(1, torch.searchsorted(sums, needed).clamp_(max=sums.shape[1] - 1))

    def _logprobs(
        self, logits: Tensor, tokens: list[int], slots: list[_Slot]
    ) -> list[TokenLogprobs | None]:
        """Of the chosen token and the most likely ones, for the rows that ask; log-softmax in
        float32 over raw logits.
        """
        found: list[TokenLogprobs | None] = [None] * len(slots)
        rows = [row for row, slot in enumerate(slots) if slot.params.logprobs is not None]
        if not rows:
            return found
        index = torch.tensor(rows, device=self._device)
        logprobs = logits[index].log_softmax(dim=-1)
        chosen = (
            logprobs.gather(1, torch.tensor([[tokens[row]] for row in rows], device=self._device))
            .squeeze(1)
            .tolist()
        )
        top = logprobs.topk(
            min(max(slots[row].params.logprobs or 0 for row in rows), self._vocab_size), dim=-1
        )
        for row, own, values, ids in zip(
            rows, chosen, top.values.tolist(), top.indices.tolist(), strict=True
        ):
            count = slots[row].params.logprobs or 0
            found[row] = TokenLogprobs(own, tuple(ids[:count]), tuple(values[:count]))
        return found

    def _column(self, values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """(len(values), 1)"""
        return torch.tensor(values, dtype=dtype, device=self._device).unsqueeze(1)


def _exp(logits: Tensor) -> Tensor:
    """In place. PyTorch's takes four times as long on a CPU where many are minus infinity; NumPy's
    does not.
    """
    if logits.device.type != "cpu":
        return logits.exp_()
    values = logits.numpy()
    np.exp(values, out=values)
    return logits


def _refuse(logits: Tensor, refused: npt.NDArray[np.bool_]) -> None:
    """Minus infinity for ``refused`` (V,) of one row (V,). NumPy's is five times faster on a CPU (8
    us).
    """
    if logits.device.type == "cpu":
        np.copyto(logits.numpy(), np.float32(-math.inf), where=refused)
    else:
        logits.masked_fill_(torch.from_numpy(refused).to(logits.device), -math.inf)


def _argmax(logits: Tensor) -> list[int]:
    """The first largest entry of each row. NumPy's is ten times faster than PyTorch's on a CPU (4
    us for 49,152 entries).
    """
    if logits.device.type == "cpu":
        return np.argmax(logits.numpy(), axis=-1).tolist()  # type: ignore[no-any-return]
    found: list[int] = logits.argmax(dim=-1).tolist()
    return found


def _share_floor(weights: Tensor, share: Tensor) -> Tensor:
    """The largest floor (R, 1) such that the weights not below it make up ``share`` (R, 1) of their
    row's sum. No sort.

    ``weights`` (R, V) are from 0 to 1. Floats are in the order of their bits, so the upper half of
    the bits says which of some thousand buckets a weight is in, and only the bucket in which the
    share is reached needs a closer look.
    """
    rows = torch.arange(len(weights), device=weights.device).unsqueeze(1)
    buckets = (_BUCKETS - 1) - (weights.view(torch.int32) >> 16)  # the largest weights first
    flat = (buckets + (rows * _BUCKETS).int()).flatten()
    sums = (
        torch.bincount(flat, weights.double().flatten(), len(weights) * _BUCKETS)
        .view(-1, _BUCKETS)
        .cumsum(-1)
    )
    needed = sums[:, -1:] * share
    reached = torch.searchsorted(sums, needed).clamp_(max=_BUCKETS - 1)
    inside = buckets == reached
    counts = inside.sum(dim=-1, keepdim=True)
    largest = weights.where(inside, 0.0).topk(max(int(counts.max()), 1), dim=-1).values
    before = torch.where(reached > 0, sums.gather(1, (reached - 1).clamp(min=0)), 0.0)
    last = torch.searchsorted(before + largest.cumsum(dim=-1, dtype=torch.float64), needed)
    # Sums in another order may differ in their last digit: the bucket's own last weight is then the
    # one.
    return largest.gather(1, torch.minimum(last, counts - 1).clamp_(min=0))
