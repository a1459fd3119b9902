"""Every tensor of a checkpoint is used, known to be harmless, or the model is refused by name.

A tensor that nobody reads is a model that was meant otherwise: a bias that the configuration does
not mention, a layer more, another architecture. Leaving it out would give wrong text in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from forebay.models.config import ModelConfig
from forebay.models.errors import ModelError
from forebay.models.fingerprint import INDEX_NAME, SINGLE_NAME, read_index, weight_files
from forebay.models.header import Entry, read_header

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_ALLOWED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NAMES_SHOWN = 3
# Buffers that older versions of the transformers library saved and no version reads: rotary tables
# follow from the configuration, masks from the positions.
_HARMLESS = re.compile(
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|.*\.(attn|self_attn)\.(bias|masked_bias)"
)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that a forward pass reads, by name."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * head_dim, config.kv_heads * head_dim
    projections = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.layers):
        layer = f"model.layers.{index}."
        shapes |= {f"{layer}{name}.weight": (size,) for name, size in norms.items()}
        for name, (outputs, inputs, has_bias) in projections.items():
            shapes[f"{layer}{name}.weight"] = (outputs, inputs)
            if has_bias:
                shapes[f"{layer}{name}.bias"] = (outputs,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes[HEAD] = shapes[EMBEDDING]
    return shapes


def check_checkpoint(path: Path, config: ModelConfig) -> None:
    """Raises ModelError unless the weight files of directory `path` are whole and hold just what
    the configuration asks for. Reads headers only; what the numbers are, `models.weights` says."""
    found: dict[str, Entry] = {}
    file_of: dict[str, Path] = {}
    for file in weight_files(path):
        for name, entry in read_header(file).items():
            if name in found:
                raise ModelError(
                    f"{path}: tensor {name} is in {file_of[name].name} and in {file.name}; "
                    "these are files of two models; fetch the model again"
                )
            found[name], file_of[name] = entry, file
    check_tensors({name: entry.shape for name, entry in found.items()}, config, str(path))
    if not (path / SINGLE_NAME).is_file():
        _check_index(path, file_of)
    for name in expected_shapes(config):
        if found[name].dtype not in _ALLOWED_DTYPES:
            raise ModelError(
                f"{file_of[name]}: tensor {name} is {found[name].dtype}; "
                f"allowed: {', '.join(_ALLOWED_DTYPES.values())}; use an unquantised model"
            )


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    where: str,
    known_as: Mapping[str, str] | None = None,
) -> None:
    """``found``: shapes by name. ``known_as``: what the file itself calls a tensor, if otherwise.

    Raises ModelError that says which are missing, of another shape, or of no use.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        hint = (
            "; if the head is meant to be the embedding, config.json must say tie_word_embeddings"
            if missing == [HEAD]
            else ""
        )
        raise ModelError(
            f"{where}: {len(missing)} of {len(expected)} tensors are missing: {_some(missing)}; "
            f"fetch the model again{hint}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(
                f"{where}: tensor {name} has shape {found[name]}, config.json asks for {shape}; "
                "fetch the model again"
            )
    unused = [name for name in found if name not in expected and not _is_harmless(name, config)]
    if unused:
        names = [f"{known_as[name]} ({name})" if known_as else name for name in unused]
        raise ModelError(
            f"{where}: {len(unused)} tensor(s) that its configuration does not ask for: "
            f"{_some(names)}; without them the text would be another model's; "
            "use the configuration that belongs to these weights, or another model"
        )


def _check_index(path: Path, file_of: Mapping[str, Path]) -> None:
    """Ranks look for a tensor where the index says."""
    index = read_index(path)
    wrong = [name for name, file in index.items() if file_of.get(name) != file]
    wrong += [name for name in file_of if name not in index]
    if wrong:
        raise ModelError(
            f"{path / INDEX_NAME}: {len(wrong)} tensor(s) are not where it says: {_some(wrong)}; "
            "fetch the model again"
        )


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """A head beside tied embeddings is compared with them when it is loaded."""
    return bool(_HARMLESS.fullmatch(name)) or (config.tied_embeddings and name == HEAD)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _NAMES_SHOWN
    return ", ".join(listed[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
