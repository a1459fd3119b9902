"""Models as people have them on disk: hub caches, clones without their large files, and names."""

from pathlib import Path

import pytest

from forebay.models.errors import ModelError
from forebay.models.resolve import resolve_model

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
COMMIT = "ab" * 20


def snapshot(path: Path, commit: str = COMMIT) -> Path:
    found = path / "models--org--small-chat" / "snapshots" / commit
    found.mkdir(parents=True)
    (found / "config.json").write_text("{}")
    return found


def test_a_snapshot_is_called_by_its_repository(tmp_path: Path) -> None:
    found = resolve_model(str(snapshot(tmp_path)))
    assert (found.name, found.path.name) == ("small-chat", COMMIT)
    (tmp_path / "link").symlink_to(found.path)
    assert resolve_model(str(tmp_path / "link")).name == "small-chat"
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "mine").mkdir()
    assert resolve_model(str(tmp_path / "snapshots" / "mine")).name == "mine"


def test_a_repository_of_a_hub_cache_is_its_main(tmp_path: Path) -> None:
    only = snapshot(tmp_path)
    repository = tmp_path / "models--org--small-chat"
    assert resolve_model(str(repository)).path == only
    other = snapshot(tmp_path, "cd" * 20)
    with pytest.raises(ModelError, match="2 snapshots and no main"):
        resolve_model(str(repository))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(other.name)
    assert resolve_model(str(repository)).path == other


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_is_called_one(tmp_path: Path, name: str) -> None:
    path = snapshot(tmp_path)
    (path / name).write_bytes(POINTER)
    with pytest.raises(ModelError, match=rf"{name}: is a Git LFS pointer, not the file.*git lfs"):
        resolve_model(str(path))


def test_a_gguf_file_may_be_one_too(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(POINTER)
    with pytest.raises(ModelError, match=r"x\.gguf: is a Git LFS pointer"):
        resolve_model(str(tmp_path / "x.gguf"))


def test_a_directory_of_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"no config\.json, and x\.gguf; give the \.gguf file"):
        resolve_model(str(tmp_path))
