"""Models of a few thousand random weights, and what transformers makes of them: the reference of the worker tests."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

# The reference shares the cores with the workers under test.
torch.set_num_threads(1)

VOCAB_SIZE = 256
LAYERS = 4
BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}


def make(path: Path, family: str = "Llama", **changes: Any) -> Path:
    """Write the model to ``path``. Weights are large enough that greedy text does not fall into one token."""
    config = getattr(transformers, f"{family}Config")(**BASE | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # made as zeros and ones, which would hide them
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path


def gguf_config() -> Any:
    return transformers.LlamaConfig(**BASE | {"num_attention_heads": 8, "num_key_value_heads": 4})


def make_gguf(path: Path) -> Path:
    """A Llama as one GGUF file, float32."""
    import gguf

    config = gguf_config()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [chr(0x100 + code) for code in range(VOCAB_SIZE - 1)]
    writer.add_token_list([*letters, letters[0] + letters[1]])
    writer.add_token_types([1] * VOCAB_SIZE)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(0)
    for name, shape in _gguf_shapes(config):
        value = torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
        writer.add_tensor(name, (value + 0.2 * torch.randn(shape)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_shapes(config: Any) -> list[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    kv = hidden // config.num_attention_heads * config.num_key_value_heads
    layer = {
        "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    found: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (VOCAB_SIZE, hidden)),
        ("output_norm.weight", (hidden,)),
    ]
    for index in range(config.num_hidden_layers):
        found += [(f"blk.{index}.{name}.weight", shape) for name, shape in layer.items()]
    return found


@cache
def _reference(path: Path) -> Any:
    if path.suffix != ".gguf":
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # What transformers itself reads from the file (`from_pretrained` does the same and wants one more package for it).
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = transformers.LlamaForCausalLM(gguf_config()).to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(
        load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"],
        strict=False,
    )
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model


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
