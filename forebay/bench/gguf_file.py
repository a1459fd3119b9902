"""Our weights as a GGUF file, for llama.cpp to be measured on the same ones. It has no tokenizer: benches speak in token ids.

llama.cpp wants the rows of a Llama model's queries and keys interleaved for its own rotary layout
(`models.gguf` undoes the same).
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.models.config import ModelConfig
from forebay.models.weights import Checkpoint

FORMATS = {"bfloat16": "BF16", "float32": "F32", "float16": "F16", "q8_0": "Q8_0", "q4_1": "Q4_1"}
ARCHITECTURE = "LlamaForCausalLM"

Array = npt.NDArray[Any]


class CannotWrite(Exception):
    """This model has what the file cannot say. One line."""


def write_gguf(model: Path, config: ModelConfig, form: str, target: Path) -> None:
    """``form``: one of `FORMATS`; vectors stay float32, as llama.cpp has them. Raises ``CannotWrite``,
    ``ModelError`` and ``OSError``."""
    from gguf import GGUFWriter
    from gguf.constants import GGMLQuantizationType

    if config.architecture != ARCHITECTURE or config.rope_scaling or config.mlp_bias:
        raise CannotWrite(
            f"{model.name} is {config.architecture}; allowed: {ARCHITECTURE} with plain rotary "
            "positions and no biases in its MLP; take another model, or another peer"
        )
    writer = GGUFWriter(target, "llama")
    _say_shapes(writer, config)
    kind = GGMLQuantizationType[FORMATS[form]]
    with Checkpoint(model) as weights:
        for name, values in _tensors(weights, config):
            _add(writer, name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _say_shapes(writer: Any, config: ModelConfig) -> None:
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _tensors(weights: Checkpoint, config: ModelConfig) -> "list[tuple[str, Array]]":
    """All of them, float32, under the names of the file."""
    hidden, width = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def read(name: str, *shape: int) -> Array:
        values: Array = weights.read(name, shape, torch.float32).numpy()
        return values

    found = [
        ("token_embd.weight", read("model.embed_tokens.weight", config.vocab_size, hidden)),
        ("output_norm.weight", read("model.norm.weight", hidden)),
    ]
    if not config.tied_embeddings:
        found.append(("output.weight", read("lm_head.weight", config.vocab_size, hidden)))
    for layer in range(config.layers):
        own, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        q = read(own + "self_attn.q_proj.weight", queries, hidden)
        k = read(own + "self_attn.k_proj.weight", keys, hidden)
        found += [
            (theirs + "attn_norm.weight", read(own + "input_layernorm.weight", hidden)),
            (theirs + "attn_q.weight", interleaved(q, config.heads)),
            (theirs + "attn_k.weight", interleaved(k, config.kv_heads)),
            (theirs + "attn_v.weight", read(own + "self_attn.v_proj.weight", keys, hidden)),
            (theirs + "attn_output.weight", read(own + "self_attn.o_proj.weight", hidden, queries)),
            (theirs + "ffn_norm.weight", read(own + "post_attention_layernorm.weight", hidden)),
            (theirs + "ffn_gate.weight", read(own + "mlp.gate_proj.weight", width, hidden)),
            (theirs + "ffn_up.weight", read(own + "mlp.up_proj.weight", width, hidden)),
            (theirs + "ffn_down.weight", read(own + "mlp.down_proj.weight", hidden, width)),
        ]
    return found


def interleaved(values: Array, heads: int) -> Array:
    """Each head's two halves row by row in turns."""
    half = values.shape[0] // heads // 2
    turned = values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2)
    return turned.reshape(values.shape)


def _add(writer: Any, name: str, values: Array, kind: Any) -> None:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    if values.ndim == 1 or kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(values))
    else:
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
