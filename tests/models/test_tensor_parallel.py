"""Tensor parallel ranks together compute what transformers does."""

from __future__ import annotations

import pytest
import torch

from forebay.models.batch import SequenceWork, build_batch
from forebay.models.config import load_config
from forebay.models.kv import KVPool
from forebay.models.llama import Kernels, load_stage
from forebay.models.shard import shards
from tests.models.thread_ranks import run_ranks

PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 23, 71, 12, 54, 33, 2, 90, 7, 19, 45]


def run_grid(path, pp, tp, prompt):
    """Last-row logits of every tensor parallel rank of the last stage."""
    config = load_config(path)
    state = [torch.tensor(prompt)] * tp
    for row in shards(config, pp, tp):

        def work(rank, group, row=row, inputs=state):
            with torch.inference_mode():
                stage = load_stage(path, config, row[rank], torch.float32, tp_group=group)
                pool = KVPool(config, row[rank], 8, 16, torch.float32, torch.device("cpu"))
                batch = build_batch([SequenceWork(len(prompt), 0, list(range(8)), sample=True)], 16)
                return stage.forward(inputs[rank], batch, pool)

        state = run_ranks(tp, work)
    return state


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("pp", [1, 2])
def test_ranks_agree_with_transformers(make_model, reference, changes, pp):
    path = make_model(**changes)
    expected = reference(path)(torch.tensor([PROMPT])).logits[0, -1]
    for logits in run_grid(path, pp, 2, PROMPT):
        assert (logits[0] - expected).abs().max() <= 1e-3


def test_demo_over_three_ranks(demo, reference):
    prompt = list(range(1000, 1100))
    expected = reference(demo)(torch.tensor([prompt])).logits[0, -1]
    for logits in run_grid(demo, 1, 3, prompt):
        assert (logits[0] - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_row_depends_on_nothing_but_what_it_attends_to(make_model, dtype, tp):
    """Bit for bit, on every rank: in one pass, in chunks, one by one, beside another sequence."""
    path = make_model(
        num_attention_heads=2 * tp, num_key_value_heads=tp, head_dim=8, intermediate_size=16 * tp
    )
    config = load_config(path)
    (row,) = shards(config, 1, tp)

    def in_chunks(rank, group, chunks, beside):
        with torch.inference_mode():
            stage = load_stage(
                path, config, row[rank], dtype, tp_group=group, kernels=Kernels.NATIVE
            )
            pool = KVPool(config, row[rank], 8, 16, dtype, torch.device("cpu"))
            found, done = [], 0
            for chunk in chunks:
                works = [SequenceWork(beside, 0, [7])] if beside else []
                works.append(SequenceWork(chunk, done, [5, 2], sample=True))
                tokens = PROMPT[:beside] + PROMPT[done : done + chunk]
                found.append(stage.forward(torch.tensor(tokens), build_batch(works, 16), pool)[-1])
                done += chunk
            return found[-1]

    whole = run_ranks(tp, lambda rank, group: in_chunks(rank, group, [18], 0))
    assert all(torch.equal(logits, whole[0]) for logits in whole)
    for chunks, beside in (([18], 3), ([1] * 18, 0), ([7, 1, 8, 2], 9)):
        cut = run_ranks(
            tp,
            lambda rank, group, chunks=chunks, beside=beside: in_chunks(
                rank, group, chunks, beside
            ),
        )
        assert all(torch.equal(logits, whole[0]) for logits in cut), (chunks, beside)
