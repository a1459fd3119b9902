"""Every architecture on every grid, over real processes, against transformers on the same weights."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forebay import LLM, SamplingParams
from forebay.models.gguf import convert_gguf
from tests.models.gguf_writer import write_gguf
from tests.runtime import tiny_llama
from tests.runtime.scripted_planner import ScriptedPlanner
from tests.runtime.test_worker_text import story
from tests.warm_cache import warm_cache

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}  # tp = 4 divides both
GRIDS = [(pp, tp) for pp in (1, 2, 3) for tp in (1, 2, 4)]
FAST = {("Qwen3", 2, 2), ("gguf", 3, 1)}  # beside the Llamas of test_worker_text

Make = Callable[[str], tuple[Path, Path]]


def cases() -> list[Any]:
    every = [
        (family, pp, tp)
        for family in (*FAMILIES, "gguf", "gguf Qwen2", "gguf Qwen3")
        for pp, tp in GRIDS
    ]
    return [
        pytest.param(
            *case,
            marks=() if case in FAST else pytest.mark.slow,
            id=f"{case[0]}-pp{case[1]}-tp{case[2]}",
        )
        for case in every
    ]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """(what the workers load, what the reference is made of)"""

    @cache
    def made(family: str) -> tuple[Path, Path]:
        directory = tmp_path_factory.mktemp(family)
        name = family.removeprefix("gguf ")
        if family == "gguf":
            written = source = tiny_llama.make_gguf(directory / "tiny.gguf")
        else:
            source = tiny_llama.make(
                directory,
                name,
                **HEADS | FAMILIES[name] | ({"vocab_size": 264} if name != family else {}),
            )
            if name == family:
                return source, source
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
            written = write_gguf(directory / "tiny.gguf", name, model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FOREBAY_CACHE_DIR", str(warm_cache(directory / "cache")))
            return convert_gguf(written), source

    return made


@pytest.mark.parametrize(("family", "pp", "tp"), cases())
def test_text_equals_transformers(make: Make, family: str, pp: int, tp: int) -> None:
    model, source = make(family)
    with ScriptedPlanner(model, pp, tp).start() as planner:
        story(planner, source)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tp", [1, 3])
def test_the_demo_model_over_tensor_parallel_ranks(tp: int) -> None:
    """9 heads and 3 key/value heads, float32, the whole engine."""
    from forebay.models.resolve import resolve_model

    chance = random.Random(3)
    prompts = [[chance.randrange(300, 40_000) for _ in range(length)] for length in (5, 70, 200)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(
        "demo",
        tp=tp,
        dtype="float32",
        device_memory="256MiB",
        host_memory="64MiB",
        store="none",
        threads_per_rank=1,
    ) as llm:
        texts = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    oracle = AutoModelForCausalLM.from_pretrained(
        resolve_model("demo").path, dtype=torch.float32
    ).eval()
    for ids, text in zip(prompts, texts, strict=True):
        expected = oracle.generate(
            torch.tensor([ids]),
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
        )
        assert text == expected[0, len(ids) :].tolist()
