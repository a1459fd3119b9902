"""Weight files: only what a shard needs is read, and every kind of damage names its file."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from forebay.models.config import load_config
from forebay.models.errors import ModelError
from forebay.models.fingerprint import fingerprint
from forebay.models.llama import load_stage
from forebay.models.shard import Shard, whole
from forebay.models.weights import Checkpoint


@pytest.fixture(scope="module")
def sharded(make_model):
    path = make_model(shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture
def copy(sharded, tmp_path):
    return shutil.copytree(sharded, tmp_path / "copy")


def load(path, shard=None):
    config = load_config(path)
    return load_stage(path, config, shard or whole(config), torch.float32)


def file_of(path, tensor):
    return (
        path / json.loads((path / "model.safetensors.index.json").read_text())["weight_map"][tensor]
    )


def test_sharded_and_single_hold_the_same(sharded, make_model):
    single = make_model()
    with Checkpoint(sharded) as one, Checkpoint(single) as other:
        shape = (80, 48)
        name = "model.layers.3.mlp.gate_proj.weight"
        assert torch.equal(
            one.read(name, shape, torch.float32), other.read(name, shape, torch.float32)
        )


def test_slices(sharded):
    with Checkpoint(sharded) as files:
        name, shape = "model.layers.0.mlp.gate_proj.weight", (80, 48)
        full = files.read(name, shape, torch.float32)
        assert torch.equal(files.read(name, shape, torch.float32, rows=range(8, 20)), full[8:20])
        assert torch.equal(
            files.read(name, shape, torch.float32, columns=range(8, 20)), full[:, 8:20]
        )
        assert files.read(name, shape, torch.bfloat16, rows=range(8, 20)).dtype == torch.bfloat16


def test_a_stage_needs_only_the_files_of_its_layers(copy):
    """The other stages' files may be absent, let alone read."""
    needed = {
        file_of(copy, name)
        for name in json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
        if name.startswith("model.layers.1.")
    }
    for file in copy.glob("*.safetensors"):
        if file not in needed:
            file.unlink()
    load(copy, Shard(1, 2, 4))
    with pytest.raises(ModelError, match="no such file"):
        load(copy)


def test_missing_shard_names_the_file(copy):
    file = file_of(copy, "model.layers.2.mlp.up_proj.weight")
    file.unlink()
    with pytest.raises(ModelError, match=file.name):
        load(copy)
    with pytest.raises(ModelError, match=file.name):
        fingerprint(copy)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file_names_the_file(copy, keep):
    file = file_of(copy, "model.layers.2.mlp.up_proj.weight")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=file.name):
        load(copy)


def test_corrupt_header_names_the_file(copy):
    file = file_of(copy, "model.layers.2.mlp.up_proj.weight")
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)
    with pytest.raises(ModelError, match=file.name):
        load(copy)


def test_missing_tensor_and_wrong_shape(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(ModelError, match=r"no file for tensor model\.layers\.4"):
        load(copy)
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(ModelError, match=r"gate_proj\.weight has shape \(80, 48\)"):
        load(copy)


@pytest.mark.parametrize(
    "index", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../../etc/passwd"}}']
)
def test_bad_index(copy, index):
    (copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json"):
        load(copy)


def test_no_weights_at_all(copy):
    for file in copy.glob("model*"):
        file.unlink()
    with pytest.raises(ModelError, match="weights must be safetensors"):
        load(copy)


def test_quantised_tensors_are_refused(copy):
    from safetensors.torch import load_file, save_file

    file = file_of(copy, "model.layers.0.mlp.up_proj.weight")
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(
        torch.int8
    )
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"up_proj\.weight is torch\.int8"):
        load(copy)


def test_fingerprint_follows_what_matters(sharded, copy):
    original = fingerprint(sharded)
    assert len(original) == 32
    assert fingerprint(copy) == original
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({**config, "transformers_version": "0", "_name_or_path": "x"}, indent=9)
    )
    assert fingerprint(copy) == original
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    assert fingerprint(copy) != original
    (copy / "config.json").write_text(json.dumps(config))
    file = file_of(copy, "model.layers.2.mlp.up_proj.weight")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert fingerprint(copy) != original
