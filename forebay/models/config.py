"""What a checkpoint is: its shapes and options, read once from a Hugging Face directory.

Nothing is guessed. A structural key that is absent, an option that would change the arithmetic and is not implemented,
or an architecture outside `ARCHITECTURES` is a `ModelError`. Defaults are used only where the Hugging Face
configuration class of that architecture documents one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.models.config_reader import ConfigReader
from forebay.models.errors import ModelError
from forebay.models.rope_scaling import RopeScaling, read_rope

DTYPES = ("float32", "bfloat16", "float16")


MAX_CONTEXT = 1 << 30


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one Hugging Face architecture differs from Llama.

    `None` for a bias means that the configuration's key decides.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None
    kv_heads: int | None = None
    max_context: int = 2048
    needs_sliding_window_key: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        kv_heads=8,
        max_context=131072,
        needs_sliding_window_key=True,
    ),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True, o_bias=False, mlp_bias=False, kv_heads=32, max_context=32768
    ),
    "Qwen3ForCausalLM": Architecture(
        mlp_bias=False, qk_norm=True, head_dim=128, kv_heads=32, max_context=32768
    ),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and options of one model. Sizes count elements; `max_context` counts tokens."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    eos_ids: tuple[int, ...]
    bos_id: int | None

    def canonical(self) -> bytes:
        """The same bytes for the same model, whatever the order and spelling of the file."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()


def load_config(path: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for end tokens) of the directory `path`.

    Raises ModelError when the directory is no model, or is one that cannot be served.
    """
    path = Path(path)
    where = str(path / "config.json")
    generation_path = path / "generation_config.json"
    try:
        raw = read_json(path / "config.json")
        generation = read_json(generation_path) if generation_path.exists() else {}
        return parse_config(raw, generation, where)
    except (
        AttributeError,
        TypeError,
        ValueError,
        KeyError,
        RecursionError,
        OverflowError,
    ) as error:
        # A value of another type than any model has; which one, the error says better than a check of every field would.
        raise ModelError(
            f"{where}: not a model's configuration ({type(error).__name__}: {error}); check the file"
        ) from error


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Turn a parsed config.json into a ModelConfig; `where` names its source in errors."""
    names = raw.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise ModelError(
            f"{where}: architecture {name!r} is not supported; allowed: {', '.join(sorted(ARCHITECTURES))}; use a model of one of these"
        )
    assert isinstance(name, str)
    read = ConfigReader(raw, where)
    heads = read.size("num_attention_heads")
    hidden_size = read.size("hidden_size")
    rope = read_rope(raw, read.size("max_position_embeddings", architecture.max_context), where)
    max_context = rope.max_context
    if max_context > MAX_CONTEXT:
        raise ModelError(
            f"{where}: max_position_embeddings, with its rope scaling, is {max_context}; at most "
            f"{MAX_CONTEXT} is supported; check the file"
        )
    head_dim = read.size("head_dim", architecture.head_dim or hidden_size // heads)
    _refuse_unsupported(raw, architecture, max_context, where)
    if head_dim % 2:
        raise ModelError(
            f"{where}: head_dim {head_dim} is odd; rotary embeddings need an even one; check the file"
        )
    kv_heads = read.size("num_key_value_heads", architecture.kv_heads or heads)
    if heads % kv_heads:
        raise ModelError(
            f"{where}: {heads} heads cannot share {kv_heads} key/value heads; check the file"
        )
    attention_bias = read.flag("attention_bias", False)
    vocab_size = read.size("vocab_size")
    eos_ids = _token_ids("eos_token_id", generation, raw, where)
    if eos_ids and max(eos_ids) >= vocab_size:
        raise ModelError(
            f"{where}: eos_token_id is {max(eos_ids)} and the vocabulary has {vocab_size} tokens; "
            "no text would end; check config.json and generation_config.json"
        )
    return ModelConfig(
        architecture=name,
        layers=read.size("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=read.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context=max_context,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tied_embeddings=read.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        o_bias=attention_bias if architecture.o_bias is None else architecture.o_bias,
        mlp_bias=read.flag("mlp_bias", False)
        if architecture.mlp_bias is None
        else architecture.mlp_bias,
        qk_norm=architecture.qk_norm,
        dtype=_dtype(raw, where),
        eos_ids=eos_ids,
        bos_id=next(iter(_token_ids("bos_token_id", generation, raw, where)), None),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path}: no such file; a model directory needs it; check the path"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(
            f"{path}: cannot be read as JSON ({error}); fetch the model again"
        ) from None
    if not isinstance(value, dict):
        raise ModelError(
            f"{path}: holds {type(value).__name__}, expected a JSON object; fetch the model again"
        )
    return value


def _refuse_unsupported(
    raw: Mapping[str, Any], architecture: Architecture, max_context: int, where: str
) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{where}: quantised weights ({method}) are not supported; "
            "allowed: float32, bfloat16 and float16 safetensors, or a .gguf file; use one of these"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(
            f"{where}: hidden_act {activation!r} is not supported; allowed: silu; use another model"
        )
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"{where}: partial_rotary_factor other than 1.0 is not supported; use another model"
        )
    window = _sliding_window(raw, architecture, where)
    if window is not None and window < max_context:
        raise ModelError(
            f"{where}: a sliding window of {window} tokens is in use; only full attention is supported; use a model without one"
        )


def _sliding_window(raw: Mapping[str, Any], architecture: Architecture, where: str) -> int | None:
    """Tokens of the attention window that some layer uses, None for full attention everywhere."""
    layer_types = raw.get("layer_types")
    if layer_types and any(kind != "full_attention" for kind in layer_types):
        return int(raw.get("sliding_window") or 0)
    if architecture.needs_sliding_window_key and "sliding_window" not in raw:
        raise ModelError(
            f"{where}: sliding_window is absent, which means 4096; only null is supported"
        )
    switched_off = not raw.get("use_sliding_window", architecture.needs_sliding_window_key)
    window = raw.get("sliding_window")
    return None if switched_off or window is None else int(window)


def _dtype(raw: Mapping[str, Any], where: str) -> str:
    """The dtype the model was published in; float32, which loses nothing, where the file does not say."""
    value = raw.get("dtype", raw.get("torch_dtype")) or "float32"
    if value not in DTYPES:
        raise ModelError(
            f"{where}: dtype {value!r} is not supported; allowed: {', '.join(DTYPES)}; use another model"
        )
    return str(value)


def _token_ids(
    key: str, generation: Mapping[str, Any], raw: Mapping[str, Any], where: str
) -> tuple[int, ...]:
    """Ids as an int, a list or absent; the generation config's word counts before the model's."""
    value = generation.get(key)
    value = raw.get(key) if value is None else value
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(
        isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**32
        for token in ids
    ):
        raise ModelError(
            f"{where}: {key} is {value!r}; it must be a token id or a list of them; check the file"
        )
    return tuple(ids)
