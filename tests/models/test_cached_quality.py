"""What a cached prefix does to the distribution of the next token, against what cutting a prompt into other chunks does to it anyway.

bfloat16 sums in another order for other chunks, so two runs without any cache differ a little; a cached prefix may add nothing to that.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from forebay.models.batch import SequenceWork
from forebay.models.tokenizer import Tokenizer
from tests.models.conftest import Pipeline
from tests.models.test_demo import prompts

PAGE = 64
PREFIX = 6 * PAGE + 40
TAIL = 8
CACHED = 4 * PAGE
TABLE = list(range(8))
COARSE = [0, 256, PREFIX]
FINE = [0, 64, 128, 192, 256, 320, 384, PREFIX]


def fill(model: Pipeline, tokens: list[int], borders: list[int]) -> None:
    for start, stop in pairwise(borders):
        model.run(tokens[start:stop], [SequenceWork(stop - start, start, TABLE, sample=True)])


def tail(model: Pipeline, tokens: list[int]) -> Tensor:
    """Log-probabilities (TAIL, vocabulary) after each token behind the prefix, one at a time."""
    rows = [
        model.run([tokens[at]], [SequenceWork(1, at, TABLE, sample=True)])[0]
        for at in range(PREFIX, PREFIX + TAIL)
    ]
    return torch.log_softmax(torch.stack(rows).float(), -1)


def mean_kl(expected: Tensor, got: Tensor) -> float:
    """KL divergence in nats, averaged over positions (Kullback and Leibler, 1951)."""
    return float((expected.exp() * (expected - got)).sum(-1).mean())


def measure(pipeline, demo, texts: list[list[int]]) -> tuple[float, float]:
    """Mean KL of (fine chunks, a prefix cached in fine chunks and gone on with in coarse ones) against coarse chunks."""
    between_runs, cached = 0.0, 0.0
    for tokens in texts:
        model = pipeline(demo, 2, torch.bfloat16, pages=len(TABLE), page=PAGE)
        fill(model, tokens, COARSE)
        coarse = tail(model, tokens)
        fill(model, tokens, FINE)
        fine = tail(model, tokens)
        fill(model, tokens, [border for border in FINE if border <= CACHED])
        fill(model, tokens, [CACHED, *(border for border in COARSE if border > CACHED)])
        between_runs += mean_kl(coarse, fine) / len(texts)
        cached += mean_kl(coarse, tail(model, tokens)) / len(texts)
    return between_runs, cached


def long_texts(demo, count: int) -> list[list[int]]:
    return [(prompt * 40)[: PREFIX + TAIL] for prompt in prompts(Tokenizer(demo), count)]


@pytest.mark.slow
def test_a_cached_prefix_costs_no_more_than_other_chunks_do(demo, pipeline) -> None:
    between_runs, cached = measure(pipeline, demo, long_texts(demo, 8))
    print(
        f"mean KL: {between_runs:.3e} between two runs without a cache, {cached:.3e} with a cached prefix"
    )
    assert cached <= 1.2 * between_runs + 1e-9


def test_equal_chunk_borders_give_equal_bits(demo, pipeline) -> None:
    (tokens,) = long_texts(demo, 1)
    model = pipeline(demo, 2, torch.bfloat16, pages=len(TABLE), page=PAGE)
    fill(model, tokens, COARSE)
    whole = tail(model, tokens)
    again = pipeline(demo, 2, torch.bfloat16, pages=len(TABLE), page=PAGE)
    for ours, theirs in zip(again.pools, model.pools, strict=True):
        for layer in range(ours.layers):
            for mine, cached in zip(ours.pieces(layer), theirs.pieces(layer), strict=True):
                mine[: COARSE[1] // PAGE] = cached[: COARSE[1] // PAGE]
    fill(again, tokens, COARSE[1:])
    assert torch.equal(tail(again, tokens), whole)
