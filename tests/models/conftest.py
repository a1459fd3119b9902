"""Small random models on disk, the packaged demo model, and drivers that run stages the dumb way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.models.batch import SequenceWork, build_batch
from forebay.models.config import ModelConfig, load_config
from forebay.models.kv import KVPool
from forebay.models.kv_format import KvFormat
from forebay.models.llama import Kernels, Stage, load_stage
from forebay.models.resolve import resolve_model
from forebay.models.shard import shards
from tests.warm_cache import warm_cache

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PAGE = 16

# One thread: the small models gain nothing from more, and OpenMP threads that spin starve each other on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass
class Pipeline:
    """All stages of one model in this process, each with its own pool."""

    config: ModelConfig
    stages: list[Stage]
    pools: list[KVPool]
    seen_layers: list[int] = field(default_factory=list)

    @classmethod
    def load(
        cls,
        path: Path,
        pp: int = 1,
        dtype: torch.dtype = torch.float32,
        pages: int = 64,
        page: int = PAGE,
        form: KvFormat | None = None,
        kernels: Kernels = Kernels.NATIVE,
    ) -> Pipeline:
        config = load_config(path)
        row = [stage[0] for stage in shards(config, pp, 1)]
        return cls(
            config,
            [
                load_stage(
                    path,
                    config,
                    shard,
                    dtype,
                    kernels=kernels,
                    kv_formats=() if form is None else (form,),
                )
                for shard in row
            ],
            [KVPool(config, shard, pages, page, dtype, torch.device("cpu"), form) for shard in row],
        )

    def run(self, ids: Sequence[int], works: Sequence[SequenceWork]) -> torch.Tensor:
        """Token ids of all rows through all stages; logits of the sampled rows."""
        batch = build_batch(works, self.pools[0].page_size)
        state = torch.tensor(ids)
        for stage, pool in zip(self.stages, self.pools, strict=True):
            state = stage.forward(state, batch, pool, self.seen_layers.append)
        return state

    def generate(
        self, prompt: Sequence[int], steps: int, pages: Sequence[int]
    ) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens and the logits of every step, for one sequence whose pages are `pages`."""
        rows = [self.run(prompt, [SequenceWork(len(prompt), 0, pages, sample=True)])]
        tokens = [int(rows[0].argmax())]
        while len(tokens) < steps:
            rows.append(
                self.run(
                    tokens[-1:],
                    [SequenceWork(1, len(prompt) + len(tokens) - 1, pages, sample=True)],
                )
            )
            tokens.append(int(rows[-1].argmax()))
        return tokens, torch.cat(rows)


@pytest.fixture(scope="session")
def pipeline() -> Callable[..., Pipeline]:
    return Pipeline.load


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the session and all its processes, unless the caller already keeps one."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path = Path(os.environ.get("FOREBAY_TEST_CACHE_DIR") or shared / "cache")
    os.environ["FOREBAY_CACHE_DIR"] = str(warm_cache(path))
    return path


@pytest.fixture(scope="session")
def demo(cache_dir: Path) -> Path:
    return resolve_model("demo").path


SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a small random model with transformers; keyword arguments change its configuration."""

    def make(family: str = "Llama", shard_size: str = "5GB", **changes: Any) -> Path:
        import transformers

        torch.manual_seed(7)
        config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
        with torch.inference_mode(False):
            model = getattr(transformers, f"{family}ForCausalLM")(config)
            for name, parameter in model.named_parameters():
                scale = 0.3 if "norm" in name or "bias" in name else 0.15
                parameter.data += scale * torch.randn_like(parameter)
        path = tmp_path_factory.mktemp("model")
        model.save_pretrained(path, max_shard_size=shard_size)
        return path

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[..., Any]:
    """The same directory in transformers."""

    def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa"
        ).eval()

    return load
