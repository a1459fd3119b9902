"""Turn a .gguf file into a Hugging Face directory, once, in the user's cache directory.

    <cache>/models/<stem>-<hash>/           complete: made by one rename, never written again;
                                            the hash is of the whole source and the converter's version
    <cache>/models/<stem>-<hash>.lock       flock of the converter at work; others wait for it
    <cache>/models/<stem>-<hash>.tmp-<pid>  half-made; removed by the next holder of the lock

The conversion runs in a process of its own (`gguf_apart`).
Weights are dequantised to float32 exactly as the file says. llama.cpp stores the query and key rows of Llama models (Mistral is one
there) permuted for its own rotary layout; they are put back. Qwen's are stored as they are.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.cache import NoCache, cache_directory
from forebay.models.config import parse_config
from forebay.models.content_hash import Content, FileMark, bytes_hash, check_unchanged, content_hash
from forebay.models.errors import ModelError
from forebay.models.gguf_apart import write_directory_apart
from forebay.models.gguf_parts import check_part, gguf_parts
from forebay.models.gguf_tokenizer import build_tokenizer, end_ids
from forebay.models.tensors import check_tensors

CONVERTER_VERSION = 5
_MAGIC = b"GGUF"
_STEM_CHARS = 40  # a directory's name is bounded

ROPE_FACTORS = "rope_freqs"  # no weight of the model: it goes into config.json
_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": ROPE_FACTORS,
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class _Family:
    """``is_permuted``: the rows of its queries and keys lie as llama.cpp rotates them."""

    architecture: str
    is_permuted: bool


# By `general.architecture`.
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", True),
    "qwen2": _Family("Qwen2ForCausalLM", False),
    "qwen3": _Family("Qwen3ForCausalLM", False),
}


@dataclass(frozen=True, slots=True)
class _Source:
    """One tensor of the file: `data` as stored, `heads` > 0 when its rows are permuted by head.
    `known_as`: its name in the file."""

    name: str
    known_as: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]
    kind: Any
    heads: int


def convert_gguf(file: Path) -> Path:
    """The Hugging Face directory for `file`, converted now if it was not before.

    Safe to call from many processes at once. Raises ModelError when the file is missing, damaged, or of a kind that
    cannot be served, or when the cache directory cannot be written.
    """
    file = Path(file)
    parts = [(part, _hashed(part)) for part in gguf_parts(file)]
    version = b"%d" % CONVERTER_VERSION
    made_from = bytes_hash(version, *(source.hash for _, source in parts)).hex()[:32]
    name = f"{file.stem[:_STEM_CHARS]}-{made_from}"
    try:
        target = cache_directory() / "models" / name
    except NoCache as error:
        raise ModelError(
            f"{file} must be converted first, and there is no place: {error}"
        ) from None
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f"{name}.lock"):
            if not target.is_dir():
                _build(file, target, [(part, source.mark) for part, source in parts])
    except OSError as error:
        raise ModelError(
            f"{target}: cannot be written ({error}); free space or set FOREBAY_CACHE_DIR to another directory"
        ) from None
    return target


def _hashed(file: Path) -> Content:
    """Raises ModelError when it is no GGUF file, or changes while it is read."""
    try:
        with file.open("rb") as stream:
            first = stream.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); check the path") from None
    if first != _MAGIC:
        raise ModelError(f"{file}: not a GGUF file (it starts with {first!r}); check the path")
    return content_hash(file)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel drops it when the process dies, so it is never stale."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _build(file: Path, target: Path, marks: Sequence[tuple[Path, FileMark]]) -> None:
    """Convert into a temporary directory and rename it. The caller holds the lock, so other temporary ones are dead."""
    for stale in target.parent.glob(f"{target.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = target.parent / f"{target.name}.tmp-{os.getpid()}"
    work.mkdir()
    try:
        write_directory_apart(file, work)
        for part, mark in marks:
            check_unchanged(part, mark)
        for path in (*work.iterdir(), work):
            _sync(path)
        os.rename(work, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_directory(file: Path, into: Path) -> None:
    """What `gguf_process` runs. Raises ModelError."""
    metadata, sources = _read(file)
    tokenizer, settings = build_tokenizer(metadata, str(file))
    _refuse_twice(sources, file)
    factors = _rope_factors(sources, file)
    sources = [source for source in sources if not source.name.startswith(ROPE_FACTORS)]
    config = _config(metadata, sources, factors, file)
    check_tensors(
        {source.name: source.shape for source in sources},
        parse_config(config, {}, str(file)),
        str(file),
        {source.name: source.known_as for source in sources},
    )
    _write_json(into / "config.json", config)
    _write_json(into / "tokenizer_config.json", settings)
    tokenizer.save(str(into / "tokenizer.json"))
    try:
        _write_safetensors(into / "model.safetensors", sources)
    except (ValueError, IndexError) as error:
        raise ModelError(
            f"{file}: cannot be dequantised ({error}); fetch it again, or use another quantisation of the model"
        ) from None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(
        json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8"
    )


def _read(file: Path) -> tuple[dict[str, Any], list[_Source]]:
    """Metadata by key, and the tensors under their Hugging Face names, of all parts."""
    parts = gguf_parts(file)
    readers = [_open(part) for part in parts]
    metadata = _metadata(readers[0], file)
    for number, (part, reader) in enumerate(zip(parts, readers, strict=True)):
        own = metadata if number == 0 else _metadata(reader, part)
        check_part(part, number, len(parts), own)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    promised = metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise ModelError(
            f"{file}: its {len(parts)} parts hold {len(tensors)} of {promised} tensors; fetch them "
            "again"
        )
    name = str(metadata.get("general.architecture"))
    if name not in _FAMILIES:
        raise ModelError(
            f"{file}: architecture {name!r} is not supported; allowed: {', '.join(_FAMILIES)}; use another file"
        )
    read = _Metadata(metadata, file)
    heads = read.size("attention.head_count")
    permuted = {"attn_q": heads, "attn_k": read.size("attention.head_count_kv", heads)}
    for tensor in tensors:
        if not _can_dequantise(tensor.tensor_type):
            raise _unknown_quantisation(file, tensor.tensor_type.name)
    return metadata, [
        _source(tensor, permuted if _FAMILIES[name].is_permuted else {}, file) for tensor in tensors
    ]


def _open(file: Path) -> Any:
    """The library's reader of one file, which maps it."""
    from gguf import GGUFReader  # costs 100 ms; only a conversion needs it

    try:
        return GGUFReader(file)
    except (ValueError, IndexError, KeyError, TypeError, OSError) as error:
        if unknown := re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error)):
            raise _unknown_quantisation(file, unknown[1]) from None
        raise ModelError(f"{file}: damaged or truncated ({error}); fetch it again") from None


def _metadata(reader: Any, file: Path) -> dict[str, Any]:
    try:
        return {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: damaged or truncated ({error}); fetch it again") from None


def _can_dequantise(kind: Any) -> bool:
    """Whether the library turns weights of that type into numbers; it says so only when it is asked to."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True


def _unknown_quantisation(file: Path, name: str) -> ModelError:
    from gguf import GGMLQuantizationType

    allowed = [kind.name for kind in GGMLQuantizationType if _can_dequantise(kind)]
    return ModelError(
        f"{file}: weights of type {name} are not supported; allowed: {', '.join(allowed)}; use one of these"
    )


def _source(tensor: Any, permuted: Mapping[str, int], file: Path) -> _Source:
    base, _, suffix = tensor.name.rpartition(".")
    shape = tuple(int(size) for size in reversed(tensor.shape))
    block = base.split(".")
    if base in _NAMES:
        return _Source(
            f"{_NAMES[base]}.{suffix}", tensor.name, shape, tensor.data, tensor.tensor_type, 0
        )
    if (
        len(block) == 3
        and block[0] == "blk"
        and re.fullmatch("[0-9]{1,9}", block[1])
        and block[2] in _LAYER_NAMES
    ):
        name = f"model.layers.{int(block[1])}.{_LAYER_NAMES[block[2]]}.{suffix}"
        return _Source(
            name, tensor.name, shape, tensor.data, tensor.tensor_type, permuted.get(block[2], 0)
        )
    raise ModelError(
        f"{file}: tensor {tensor.name} is no part of a plain Llama or Qwen model; use its Hugging Face directory, or another model"
    )


def _refuse_twice(sources: Sequence[_Source], file: Path) -> None:
    """Two spellings of one layer's number name the same tensor, and one would be lost."""
    seen: dict[str, str] = {}
    for source in sources:
        if source.name in seen:
            raise ModelError(
                f"{file}: tensors {seen[source.name]} and {source.known_as} are the same one; "
                "fetch it again or use another file"
            )
        seen[source.name] = source.known_as


def _rope_factors(sources: list[_Source], file: Path) -> list[float] | None:
    """What each rotary frequency is divided by, where the file has a tensor for it (Llama 3.1)."""
    from gguf.quants import dequantize

    found = next((source for source in sources if source.name.startswith(ROPE_FACTORS)), None)
    if found is None:
        return None
    try:
        return [float(factor) for factor in dequantize(found.data, found.kind).reshape(-1)]
    except (ValueError, IndexError) as error:
        raise ModelError(f"{file}: rope_freqs cannot be read ({error}); fetch it again") from None


def _config(
    metadata: Mapping[str, Any], sources: list[_Source], factors: list[float] | None, file: Path
) -> dict[str, Any]:
    """config.json; the dtype is bfloat16, since the weights were quantised from it and `--dtype auto` follows it."""
    names = {source.name: source for source in sources}
    if "model.embed_tokens.weight" not in names:
        raise ModelError(
            f"{file}: holds no token embeddings; it may be one part of a split file; join the parts first"
        )
    read = _Metadata(metadata, file)
    heads, hidden, context = (
        read.size("attention.head_count"),
        read.size("embedding_length"),
        read.size("context_length"),
    )
    scaling = _rope_scaling(read, factors)
    _refuse_window(read, context)
    return {
        "architectures": [_FAMILIES[read.family].architecture],
        "model_type": read.family,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": end_ids(metadata, str(file)) or None,
        "head_dim": _head_dim(read, hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": read.size("feed_forward_length"),
        "max_position_embeddings": context,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in names,
        "num_attention_heads": heads,
        "num_hidden_layers": read.size("block_count"),
        "num_key_value_heads": read.size("attention.head_count_kv", heads),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "vocab_size": names["model.embed_tokens.weight"].shape[0],
    } | ({"rope_scaling": scaling} if scaling else {})


@dataclass(frozen=True, slots=True)
class _Metadata:
    """What the file says of its family: keys without the family's name."""

    all: Mapping[str, Any]
    file: Path

    @property
    def family(self) -> str:
        return str(self.all["general.architecture"])

    def value(self, key: str, default: Any = None) -> Any:
        """Raises ModelError for one that is absent and has no default."""
        found = self.all.get(f"{self.family}.{key}", default)
        if found is None:
            raise ModelError(
                f"{self.file}: metadata lacks {self.family}.{key}; fetch it again or use another file"
            )
        return found

    def size(self, key: str, default: int | None = None) -> int:
        found = self.value(key, default)
        if not isinstance(found, int):
            raise ModelError(
                f"{self.file}: {self.family}.{key} is {found!r}; one whole number is supported; use another file"
            )
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A finite one that is not negative; `parse_config` knows what more each must be."""
        found = self.value(key, default)
        if (
            not isinstance(found, int | float)
            or isinstance(found, bool)
            or not 0 <= found < math.inf
        ):
            raise ModelError(
                f"{self.file}: {self.family}.{key} is {found!r}; it must be a finite number, 0 or "
                "above; use another file"
            )
        return float(found)


def _head_dim(read: _Metadata, default: int) -> int:
    """Size of a head; a file may also say it of values and of what is rotated, which must be the same."""
    size = read.size("attention.key_length", read.size("rope.dimension_count", default))
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.size(key, size) != size:
            raise ModelError(
                f"{read.file}: {key} is {read.size(key)} and heads have {size}; only equal ones are supported; use another file"
            )
    return size


def _refuse_window(read: _Metadata, context: int) -> None:
    window = read.value("attention.sliding_window", context)
    if window and window != context:
        raise ModelError(
            f"{read.file}: a sliding window of {window} tokens is in use; only full attention is supported; use another file"
        )


def _rope_scaling(read: _Metadata, factors: list[float] | None) -> dict[str, Any] | None:
    """As config.json says it. A file with a factor and no type is linear, as llama.cpp reads it."""
    factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 0.0))
    kind = read.value("rope.scaling.type", "linear" if factor not in (0.0, 1.0) else "none")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{read.file}: rope scaling {kind!r} is not supported; allowed: none, linear, yarn; use another file"
        )
    if kind == "linear" and not factor:
        kind = "none"
    scaling: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    if kind != "none":
        scaling["factor"] = factor or 1.0
    if kind == "yarn":
        original = read.size("rope.scaling.original_context_length", read.size("context_length"))
        attention = read.number(
            "rope.scaling.attn_factor", read.number("rope.scaling.yarn_attn_factor", 1.0)
        )
        scaling |= {
            "original_max_position_embeddings": original,
            "attention_factor": attention * (0.1 * math.log(max(factor, 1.0)) + 1.0),
            "beta_fast": read.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": read.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    if factors is not None:
        scaling["frequency_factors"] = factors
    return None if scaling == {"rope_type": "default"} else scaling


def _write_safetensors(path: Path, sources: list[_Source]) -> None:
    """Dequantise and write one tensor at a time, so the model is never in memory as a whole."""
    from gguf.quants import dequantize

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for source in sources:
        size = 4 * int(np.prod(source.shape))
        header[source.name] = {
            "dtype": "F32",
            "shape": source.shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for source in sources:
            values = (
                dequantize(source.data, source.kind).astype("<f4", copy=False).reshape(source.shape)
            )
            stream.write(np.ascontiguousarray(_unpermute(values, source.heads)).tobytes())


def _unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's interleaving of each head's two halves (convert_hf_to_gguf.py, LlamaModel.permute)."""
    if heads == 0:
        return values
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
