"""Every tensor is used, known to be harmless, or the model is refused and the tensor named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from forebay.models import weights
from forebay.models.config import load_config
from forebay.models.errors import ModelError
from forebay.models.header import read_header
from forebay.models.llama import Kernels, load_stage
from forebay.models.shard import whole
from forebay.models.tensors import EMBEDDING, HEAD, check_checkpoint, expected_shapes

LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def model(make_model) -> Path:
    return make_model()


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "copy")


def change(path: Path, edit: Callable[[dict[str, np.ndarray]], object], **config: object) -> Path:
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    said = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(said))
    return path


def check(path: Path) -> None:
    check_checkpoint(path, load_config(path))


def load(path: Path, dtype: torch.dtype = torch.float32) -> None:
    config = load_config(path)
    load_stage(path, config, whole(config), dtype, kernels=Kernels.TORCH)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 8}),
    ],
)
def test_what_is_expected_is_what_is_read(make_model, monkeypatch, family, options) -> None:
    path = make_model(family, **options)
    check(path)
    read: dict[str, tuple[int, ...]] = {}
    original = weights.Checkpoint.read

    def spy(self, name, shape, dtype, **part):
        read[name] = shape
        return original(self, name, shape, dtype, **part)

    monkeypatch.setattr(weights.Checkpoint, "read", spy)
    load(path)
    assert read == expected_shapes(load_config(path))


def test_missing_tensors_are_counted_and_named(copy: Path) -> None:
    def drop(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith(f"{LAYER}mlp")]:
            del tensors[name]
        del tensors["model.norm.weight"]

    with pytest.raises(ModelError, match=r"4 of 39 tensors are missing: .*1\.mlp.* and 1 more"):
        check(change(copy, drop))


def test_an_untied_model_without_a_head_is_incomplete(copy: Path) -> None:
    with pytest.raises(ModelError, match=r"1 of 39 .* lm_head\.weight; .* tie_word_embeddings"):
        check(change(copy, lambda tensors: tensors.pop(HEAD)))


@pytest.mark.parametrize(
    ("name", "size"),
    [(f"{LAYER}self_attn.q_proj.bias", 48), ("model.layers.4.input_layernorm.weight", 48)],
)
def test_what_nobody_would_read_is_refused(copy: Path, name: str, size: int) -> None:
    add = {name: np.ones(size, np.float32)}
    with pytest.raises(ModelError, match=f"1 tensor.* not ask for: {name}"):
        check(change(copy, lambda tensors: tensors.update(add)))


def test_buffers_that_nobody_needs_are_harmless(copy: Path) -> None:
    names = (f"{LAYER}self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    check(change(copy, lambda tensors: tensors.update({n: np.ones(4, np.float32) for n in names})))


def test_a_head_beside_tied_embeddings_must_be_the_same(make_model, tmp_path: Path) -> None:
    tied = shutil.copytree(make_model(tie_word_embeddings=True), tmp_path / "tied")
    change(tied, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].copy()}))
    check(tied)
    load(tied)

    def damage(tensors: dict[str, np.ndarray]) -> None:
        tensors[HEAD][5, 5] += 1

    with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load(change(tied, damage))


def test_a_wrong_shape_is_named(copy: Path) -> None:
    with pytest.raises(ModelError, match=r"gate_proj\.weight has shape \(80, 48\), .* \(96, 48\)"):
        check(change(copy, lambda tensors: None, intermediate_size=96))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [EMBEDDING, f"{LAYER}mlp.down_proj.weight", "model.norm.weight"])
def test_numbers_that_are_none_are_named(copy: Path, name: str, value: float) -> None:
    def poison(tensors: dict[str, np.ndarray]) -> None:
        tensors[name].flat[7] = value

    with pytest.raises(ModelError, match=f"{name} holds NaN or infinity in float32"):
        load(change(copy, poison))


def test_numbers_too_large_for_the_dtype_are_named(copy: Path) -> None:
    def enlarge(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][3] = 3.4e38

    load(change(copy, enlarge))
    with pytest.raises(ModelError, match=r"infinity in bfloat16; .* use --dtype float32"):
        load(copy, torch.bfloat16)


def test_quantised_weights_are_refused(copy: Path) -> None:
    name = f"{LAYER}mlp.up_proj.weight"
    with pytest.raises(ModelError, match=f"{name} is I8; allowed: float32, bfloat16, float16"):
        check(change(copy, lambda tensors: tensors.update({name: tensors[name].astype("i1")})))


@pytest.mark.parametrize("keep", [0, 5, 9, 500, -1])
def test_a_cut_file_is_named(copy: Path, keep: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged or truncated"):
        check(copy)


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"\xff"])
def test_a_header_that_is_none_is_damage(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ModelError, match="damaged or truncated"):
        read_header(file)


def test_a_pointer_is_called_one(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(ModelError, match="pointer of Git LFS"):
        read_header(file)


def test_shards_of_two_models_are_refused(make_model, tmp_path: Path) -> None:
    path = shutil.copytree(make_model(shard_size="60KB"), tmp_path / "sharded")
    check(path)
    first, second, *_ = sorted(path.glob("model-*.safetensors"))
    twice, *_ = load_file(first)
    save_file(load_file(second) | {twice: load_file(first)[twice]}, second)
    with pytest.raises(ModelError, match=f"{twice} is in {first.name} and in {second.name}"):
        check(path)


def test_an_index_that_points_elsewhere_is_refused(make_model, tmp_path: Path) -> None:
    path = shutil.copytree(make_model(shard_size="60KB"), tmp_path / "sharded")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    names = index["weight_map"]
    names[EMBEDDING], names["model.norm.weight"] = names["model.norm.weight"], names[EMBEDDING]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"2 tensor\(s\) are not where it says"):
        check(path)


def test_a_gguf_file_is_checked_before_it_is_converted(tmp_path: Path, monkeypatch) -> None:
    from forebay.models.gguf import convert_gguf
    from tests.models.test_gguf import write_tiny

    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    file = write_tiny(tmp_path / "x.gguf", extra=[("blk.1.attn_q", (64, 64))])
    with pytest.raises(
        ModelError, match=r"x\.gguf: .* not ask for: blk\.1\.attn_q\.weight \(model"
    ):
        convert_gguf(file)
    left = {path.suffix for path in (tmp_path / "cache" / "models").iterdir()}
    assert left == {".lock"}
