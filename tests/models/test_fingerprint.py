"""Equal fingerprints only for equal weights, configuration and tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from forebay.models.errors import ModelError
from forebay.models.fingerprint import check_marks, fingerprint, model_marks, weight_files


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory) -> Path:
    path = make_model(shard_size="60KB")
    settings = {"bos_token": "<s>", "chat_template": "{{ messages }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    return path


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "copy")


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_copy_has_the_same_and_one_byte_in_the_middle_another(model: Path, copy: Path) -> None:
    assert fingerprint(copy) == fingerprint(model)
    file = max(weight_files(copy), key=lambda path: path.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert fingerprint(copy) != fingerprint(model)


def test_what_a_token_id_means_is_part_of_it_and_the_template_is_not(
    model: Path, copy: Path
) -> None:
    edit(copy / "tokenizer_config.json", chat_template="another")
    assert fingerprint(copy) == fingerprint(model)
    edit(copy / "tokenizer_config.json", bos_token="<b>")
    assert fingerprint(copy) != fingerprint(model)
    shutil.copy(model / "tokenizer_config.json", copy)
    edit(copy / "tokenizer.json", model={"vocab": {"a": 1, "b": 0}})
    assert fingerprint(copy) != fingerprint(model)
    shutil.copy(model / "tokenizer.json", copy)
    (copy / "added_tokens.json").write_text("{}")
    assert fingerprint(copy) != fingerprint(model)


def test_two_models_under_one_name_are_refused(copy: Path) -> None:
    save_file(load_file(weight_files(copy)[0]), copy / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds two models, model\.safetensors and what"):
        fingerprint(copy)


def test_files_that_change_after_the_start_are_noticed(copy: Path) -> None:
    marks = model_marks(copy)
    check_marks(copy, marks)
    file = weight_files(copy)[-1]
    shutil.copy(file, copy / "same")
    (copy / "same").replace(file)
    with pytest.raises(ModelError, match=f"{file.name}: changed while it was read"):
        check_marks(copy, marks)


def test_a_file_more_or_less_is_noticed(copy: Path) -> None:
    marks = model_marks(copy)
    with pytest.raises(ModelError, match="changed while they were read"):
        check_marks(copy, marks[:-1])
