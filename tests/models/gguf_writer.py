"""A transformers model written as one GGUF file, named and laid out as llama.cpp does."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}
_END = "<|endoftext|>"


def byte_tokens() -> list[str]:
    """Every byte in the alphabet of byte-level BPE, one merge, and a control token."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [
        *(chr(byte if byte in printable else next(others)) for byte in range(256)),
        "ab",
        _END,
        "<|im_start|>",
        "<|im_end|>",
    ]


def write_gguf(path: Path, family: str, model: Any, pre: str = "qwen2") -> Path:
    """``model``: of transformers, of ``family``; its vocabulary must hold `byte_tokens`."""
    config, name = model.config, ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    _add_tokenizer(writer, config.vocab_size, pre)
    for key, value in model.state_dict().items():
        if key != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(_name(key), _rows(key, value, config, name).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, size: int, pre: str) -> None:
    tokens = byte_tokens()
    tokens += [f"[unused{index}]" for index in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokens.index(_END))


def _name(key: str) -> str:
    base, _, suffix = key.rpartition(".")
    words = base.split(".")
    if words[:2] == ["model", "layers"]:
        return f"blk.{words[2]}.{_NAMES['.'.join(words[3:])]}.{suffix}"
    return f"{_NAMES[base]}.{suffix}"


def _rows(key: str, value: torch.Tensor, config: Any, name: str) -> torch.Tensor:
    """llama.cpp rotates neighbours where transformers rotates halves, and lays the rows of Llama's queries and keys so."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        key.split(".")[-2]
    )
    if name != "llama" or heads is None:
        return value.contiguous()
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape).contiguous()


def random_model(family: str, **changes: Any) -> Any:
    """A few thousand weights, none of them zero or one."""
    sizes = {
        "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 2**-17, "tie_word_embeddings": family != "Qwen3",
        "rope_theta": 50000.0, "eos_token_id": byte_tokens().index(_END), "bos_token_id": None,
    }  # fmt: skip
    sizes |= {"Mistral": {"sliding_window": None}, "Qwen3": {"head_dim": 32}}.get(family, {})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**sizes | changes)
    )
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(
            np.random.default_rng(parameter.numel()).standard_normal(
                parameter.shape, dtype=np.float32
            )
        )
    return model.eval()
