"""Sampling values that a model's makers recommend: `generation_config.json` of its directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forebay.core.sampling import SamplingParams
from forebay.models.config import read_json
from forebay.models.errors import ModelError

NAME = "generation_config.json"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# What these change counts only where tokens are drawn.
_OF_DRAWING = ("temperature", "top_p", "top_k", "min_p")


def read_sampling_defaults(path: Path) -> Mapping[str, float]:
    """What a request without these fields gets; empty where the directory says nothing.

    A file that says `do_sample: false` gives a temperature of 0. Raises ModelError for values that
    no request may have.
    """
    file = Path(path) / NAME
    if not file.is_file():
        return {}
    raw = read_json(file)
    found = {name: raw[name] for name in _FIELDS if raw.get(name) is not None}
    if raw.get("do_sample") is False and any(name in found for name in _OF_DRAWING):
        found = {name: value for name, value in found.items() if name not in _OF_DRAWING}
        found["temperature"] = 0.0
    for name, value in found.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{file}: {name} is {value!r}; it must be a number; check the file")
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ModelError(
            f"{file}: {error}; check the file, or leave it out with --generation-config none"
        ) from None
    return found


def in_words(defaults: Mapping[str, float]) -> str:
    """For the line that is said at the start."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
