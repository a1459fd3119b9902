"""The peer llama.cpp: our weights reach it as they are, and it says with them what we say."""

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from forebay import LLM, SamplingParams
from forebay.bench.engine import Peer, run
from forebay.bench.gguf_file import CannotWrite, interleaved, write_gguf
from forebay.bench.llama_cpp import LlamaCpp
from forebay.models.config import load_config
from forebay.models.weights import Checkpoint
from forebay.settings import resolve
from tests.frontend.tiny_text import write_random_weights, write_text_model

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="the extra llama is not installed"
)
THREADS, CONTEXT = 1, 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(write_text_model(tmp_path_factory.mktemp("model")))


def test_weights_are_written_as_they_are(model: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    config = load_config(model)
    write_gguf(model, config, "float32", tmp_path / "tiny.gguf")
    found = {
        tensor.name: np.array(tensor.data)
        for tensor in GGUFReader(tmp_path / "tiny.gguf", "r").tensors
    }
    heads = config.heads * config.head_dim
    with Checkpoint(model) as weights:
        for name, own in (
            ("blk.1.ffn_down", "mlp.down_proj"),
            ("blk.1.attn_output", "self_attn.o_proj"),
        ):
            shape = found[f"{name}.weight"].shape
            expected = weights.read(f"model.layers.1.{own}.weight", shape, torch.float32)
            assert (found[f"{name}.weight"] == expected.numpy()).all()
        queries = weights.read(
            "model.layers.0.self_attn.q_proj.weight", (heads, config.hidden_size), torch.float32
        )
    assert (found["blk.0.attn_q.weight"] == interleaved(queries.numpy(), config.heads)).all()
    assert len(found) == 2 + 9 * config.layers + (not config.tied_embeddings)


def test_a_model_that_the_file_cannot_say_is_one_line(model: Path, tmp_path: Path) -> None:
    import dataclasses

    config = dataclasses.replace(load_config(model), architecture="Qwen2ForCausalLM")
    with pytest.raises(CannotWrite, match="is Qwen2ForCausalLM; allowed: LlamaForCausalLM"):
        write_gguf(model, config, "float32", tmp_path / "no.gguf")


@needs_llama_cpp
def test_it_says_what_we_say_cold_cached_and_several_at_once(model: Path, tmp_path: Path) -> None:
    config = load_config(model)
    write_gguf(model, config, "float32", tmp_path / "tiny.gguf")
    dice = random.Random(3)
    prompts = [[dice.randrange(5, config.vocab_size) for _ in range(40)] for _ in range(3)]
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with LLM(str(model), dtype="float32", device_memory="4MiB", host_memory=1, store="none") as llm:
        ours = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy)]
    peer = LlamaCpp(tmp_path / "tiny.gguf", THREADS, CONTEXT)
    try:
        assert peer.generate(prompts, 6) == ours
        assert peer.generate(prompts[:1], 6) == ours[:1]
        assert peer.generate(prompts[1:], 6) == ours[1:]
    finally:
        peer.close()


@pytest.mark.slow
@needs_llama_cpp
def test_all_its_columns_are_in_the_document() -> None:
    settings = resolve({"store": "none"}, environment={})
    result = run("demo", settings, Peer("llama.cpp"), 1, print, ["hit_ttft/2048x1"])
    (row,) = result["rows"]
    assert row["ratio"] == row["forebay"] / row["peer"]
    assert set(row["beside"]) == {"q8_0", "q4_1"} and min(row["beside"].values()) > 0
