"""Tensor parallel ranks in threads, joined by a process group made of nothing but a barrier."""

from __future__ import annotations

import threading

import pytest
import torch

import forebay.models.llama as llama
from forebay.models.batch import SequenceWork, build_batch
from forebay.models.config import load_config
from forebay.models.kv import KVPool
from forebay.models.llama import load_stage
from forebay.models.shard import shards

PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 23, 71, 12, 54, 33, 2, 90, 7, 19, 45]


class ThreadGroup:
    """All-reduce among `size` threads."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts = {}
        self.local = threading.local()

    def all_reduce(self, tensor):
        self.parts[self.local.rank] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(sum(self.parts[rank] for rank in sorted(self.parts)))
        self.barrier.wait()


@pytest.fixture
def thread_reduce(monkeypatch):
    monkeypatch.setattr(llama.dist, "all_reduce", lambda tensor, group: group.all_reduce(tensor))


def run_grid(path, pp, tp, prompt):
    """Last-row logits of every tensor parallel rank of the last stage."""
    config = load_config(path)
    state = [torch.tensor(prompt)] * tp
    for row in shards(config, pp, tp):
        group = ThreadGroup(tp)

        def work(shard, group=group):
            group.local.rank = shard.tp_rank
            with torch.inference_mode():
                stage = load_stage(path, config, shard, torch.float32, tp_group=group)
                pool = KVPool(config, shard, 8, 16, torch.float32, torch.device("cpu"))
                batch = build_batch([SequenceWork(len(prompt), 0, list(range(8)), sample=True)], 16)
                state[shard.tp_rank] = stage.forward(state[shard.tp_rank], batch, pool)

        threads = [threading.Thread(target=work, args=(shard,)) for shard in row]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return state


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("pp", [1, 2])
def test_ranks_agree_with_transformers(make_model, reference, thread_reduce, changes, pp):
    path = make_model(**changes)
    expected = reference(path)(torch.tensor([PROMPT])).logits[0, -1]
    for logits in run_grid(path, pp, 2, PROMPT):
        assert (logits[0] - expected).abs().max() <= 1e-3


def test_demo_over_three_ranks(demo, reference, thread_reduce):
    prompt = list(range(1000, 1100))
    expected = reference(demo)(torch.tensor([prompt])).logits[0, -1]
    for logits in run_grid(demo, 1, 3, prompt):
        assert (logits[0] - expected).abs().max() <= 1e-3
