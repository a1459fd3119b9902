"""Which files hold a model, and a short name for what they hold. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from forebay.core.identity import ModelIdentity
from forebay.models.config import load_config
from forebay.models.content_hash import (
    FileMark,
    bytes_hash,
    check_unchanged,
    content_hash,
    mark_of,
)
from forebay.models.errors import ModelError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
# What says which text a token id is. Chat templates only choose the text.
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
TOKENIZER_SETTINGS_NAME = "tokenizer_config.json"
_TEMPLATE_KEY = "chat_template"


def weight_files(path: Path) -> list[Path]:
    """The weight files of a model directory, sorted by name. Raises ModelError when there are none, or one is missing."""
    path = Path(path)
    has_index = (path / INDEX_NAME).is_file()
    if (path / SINGLE_NAME).is_file():
        if has_index and set(read_index(path).values()) != {path / SINGLE_NAME}:
            raise ModelError(
                f"{path}: holds two models, {SINGLE_NAME} and what {INDEX_NAME} names; "
                "remove the one that is not meant"
            )
        return [path / SINGLE_NAME]
    if not has_index:
        raise ModelError(
            f"{path}: has neither {SINGLE_NAME} nor {INDEX_NAME}; weights must be safetensors; convert them or check the path"
        )
    files = sorted(set(read_index(path).values()))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: no such file; {INDEX_NAME} names it; fetch the model again")
    return files


def model_marks(path: Path) -> tuple[FileMark, ...]:
    """Marks of the files that decide what a forward pass computes: configuration and weights.

    Raises ModelError when one is missing.
    """
    return tuple(mark_of(file) for file in _computed_from(path))


def check_marks(path: Path, marks: Sequence[FileMark]) -> None:
    """Raises ModelError unless the files of `path` are still those that had ``marks``."""
    files = _computed_from(path)
    if len(files) != len(marks):
        raise ModelError(f"{path}: its files changed while they were read; start again")
    for file, mark in zip(files, marks, strict=True):
        check_unchanged(file, mark)


def fingerprint(path: Path) -> bytes:
    """32 bytes that name a model's KV: equal only for equal weights, configuration and tokenizer.

    Reads all weights unless their hashes are remembered (`models.content_hash`). Raises ModelError
    when the model cannot be read, or changes meanwhile.
    """
    path = Path(path)
    marks = model_marks(path)
    config = load_config(path).canonical()
    identity = ModelIdentity(
        config,
        _tokenizer_hash(path),
        tuple(content_hash(file).hash for file in weight_files(path)),
    )
    check_marks(path, marks)
    return identity.fingerprint()


def _computed_from(path: Path) -> list[Path]:
    return [Path(path) / CONFIG_NAME, *weight_files(path)]


def _tokenizer_hash(path: Path) -> bytes:
    """Over names and contents of the files that are there; of the settings all but the template."""
    parts: list[bytes] = []
    for name in TOKENIZER_NAMES:
        if (path / name).is_file():
            parts += (name.encode(), content_hash(path / name).hash)
    settings = path / TOKENIZER_SETTINGS_NAME
    if settings.is_file():
        parts += (settings.name.encode(), _settings_without_template(settings))
    return bytes_hash(*parts)


def _settings_without_template(file: Path) -> bytes:
    try:
        raw = file.read_bytes()
        settings = json.loads(raw)
    except (OSError, ValueError, RecursionError):
        return b""  # whoever needs them says what is wrong with them
    if not isinstance(settings, dict):
        return raw
    settings.pop(_TEMPLATE_KEY, None)
    return json.dumps(settings, sort_keys=True).encode()


def read_index(path: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index of a sharded checkpoint says."""
    index = path / INDEX_NAME
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (
        OSError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise ModelError(
            f"{index}: not a safetensors index ({error!r}); fetch the model again"
        ) from None
    for file in files.values():
        if Path(file).name != file:
            raise ModelError(
                f"{index}: names {file!r}, which is not a file in its own directory; fetch the model again"
            )
    if not files:
        raise ModelError(f"{index}: names no tensor; fetch the model again")
    return {name: path / file for name, file in files.items()}
