"""A Llama of a few thousand random weights, and what transformers makes of it: the reference of the worker tests."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

# The reference shares the cores with the workers under test.
torch.set_num_threads(1)

VOCAB_SIZE = 256
LAYERS = 4


def make(path: Path) -> Path:
    """Write the model to ``path``. Weights are large enough that greedy text does not fall into one token."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path


@cache
def _reference(path: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(path: Path, prompt: list[int], steps: int) -> list[int]:
    """The next ``steps`` tokens, each from a whole forward pass without any cache."""
    tokens = list(prompt)
    for _ in range(steps):
        tokens.append(int(logits(path, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """(len(tokens), vocab)"""
    found: torch.Tensor = _reference(path)(torch.tensor([tokens])).logits[0]
    return found
