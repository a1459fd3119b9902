"""Numbers that are none: the request ends with an error, its neighbours do not notice, and nothing
of it is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay import LLM, SamplingParams
from forebay.frontend.generation import GenerationError
from forebay.models.batch import SequenceWork, build_batch
from forebay.models.config import load_config
from forebay.models.kv import KVPool
from forebay.models.kv_format import kv_format
from forebay.models.llama import Kernels, load_stage
from forebay.models.shard import shards
from tests.frontend.tiny_text import VOCABULARY, write_random_weights, write_text_model

PAGE = 8
HUGE = 7  # a token whose embedding is finite, and has no norm in float32
LARGE = 9  # one whose keys leave float16's range
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_random_weights(write_text_model(tmp_path_factory.mktemp("tainted")))
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    embedding[HUGE] = 1e25
    # The first layer's keys are that large for a token which no other is like.
    tensors["model.layers.0.input_layernorm.weight"][0] = 1e6
    embedding[:, 0] = 0
    embedding[LARGE] = 0
    embedding[LARGE, 0] = 1
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("kernels", [Kernels.TORCH, Kernels.NATIVE])
@pytest.mark.parametrize(
    ("form", "token", "bad_stage"), [("float32", HUGE, 0), ("float16", LARGE, 0)]
)
def test_every_stage_knows_and_keeps_finite_pages(
    model: Path, kernels: Kernels, form: str, token: int, bad_stage: int
) -> None:
    """The rows of one sequence; the other's are what they are alone."""
    config, dtype = load_config(model), torch.float32
    works = [
        SequenceWork(5, 0, [0], sample=True),
        SequenceWork(12, 0, [1, 2], sample=True),
    ]
    ids = [1, 2, 3, 4, 5, 11, 12, 13, token, *range(14, 22)]

    def run(works: list[SequenceWork], ids: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        state, flags = torch.tensor(ids), []
        for (shard,) in shards(config, 2, 1):
            kept = kv_format(form, dtype)
            stage = load_stage(model, config, shard, dtype, kernels=kernels, kv_formats=[kept])
            pool = KVPool(config, shard, 4, PAGE, dtype, torch.device("cpu"), kept)
            batch = build_batch(works, PAGE)
            state = stage.forward(state, batch, pool)
            flags.append(batch.finite)
            assert all(torch.isfinite(p.float()).all() for i in range(2) for p in pool.pieces(i))
        return flags, state

    with torch.inference_mode():
        flags, logits = run(works, ids)
        _, alone = run(works[:1], ids[:5])
    assert torch.equal(logits[:1], alone)
    assert logits.isfinite().all()
    for finite in flags:  # rows of the same sequence may go with it
        assert finite[:5].all() and not finite[8]


@pytest.mark.parametrize("pp", [1, 2])
def test_such_a_request_ends_with_an_error_and_nothing_else_does(
    model: Path, tmp_path: Path, pp: int
) -> None:
    settings = {
        "pp": pp, "page_size": PAGE, "device_memory": "4MiB", "host_memory": "4MiB",
        "threads_per_rank": 1, "chunk_size": PAGE, "store": f"file:{tmp_path}/store",
    }  # fmt: skip
    prefix = list(range(20, 20 + 3 * PAGE))
    bad = [*prefix, HUGE, *range(60, 60 + 2 * PAGE)]
    with LLM(str(model), **settings) as llm:
        good = [*prefix, 50, 51]
        alone = llm.generate(good, GREEDY)[0].outputs[0].token_ids
        for _ in range(2):
            with pytest.raises(GenerationError, match="came to NaN or infinity on this request"):
                llm.generate(bad, GREEDY)
        assert llm.generate(good, GREEDY)[0].outputs[0].token_ids == alone
        snapshot = llm._host.snapshot
        assert snapshot.tainted_requests == 2
        assert snapshot.worker_restarts == 0
    with LLM(str(model), **settings) as llm:
        after = llm.generate([*prefix, 50, 51], GREEDY)[0]
        assert after.outputs[0].token_ids == alone
        with pytest.raises(GenerationError, match="NaN"):
            llm.generate(bad, GREEDY)
        # No page from the tainted one on came out of the store: only those of the sound prefix.
        assert llm._host.snapshot.cached_store_tokens <= 2 * len(prefix)
    assert max(bad) < VOCABULARY
