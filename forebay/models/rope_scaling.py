"""What a configuration says of rotary positions: base, scaling, and the context that they reach.

transformers 5 keeps all of it under `rope_parameters`; older files have `rope_theta` and
`rope_scaling`. Where both are there, `rope_scaling` counts, as it does there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.models.config_reader import ConfigReader
from forebay.models.errors import ModelError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Change to the rotary frequencies.

    `kind` is default, linear, llama3 or yarn; unused fields keep their defaults. Each frequency is
    then divided by its own of `frequency_factors`, where there are some.
    """

    kind: str
    factor: float
    original_max_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Rope:
    """`max_context` in tokens: what the positions of the file reach once they are scaled."""

    theta: float
    scaling: RopeScaling | None
    max_context: int


def read_rope(raw: Mapping[str, Any], max_positions: int, where: str) -> Rope:
    """`max_positions`: the file's max_position_embeddings. Raises ModelError."""
    parameters = _parameters(raw)
    theta = parameters.get("rope_theta")
    theta = raw.get("rope_theta") if theta is None else theta
    theta = ConfigReader({"rope_theta": theta}, where).number("rope_theta", 10000.0)
    if (parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(
            f"{where}: partial_rotary_factor other than 1.0 is not supported; use another model"
        )
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in KINDS:
        raise ModelError(
            f"{where}: rope scaling {kind!r} is not supported; allowed: {', '.join(KINDS)}; "
            "use another model"
        )
    factors = _factors(parameters, where)
    if kind in ("default", "dynamic"):
        # Dynamic scaling changes nothing up to the length that the model was made for. Beyond it
        # keys would depend on the length of the whole text, and no page could be used again.
        plain = RopeScaling("default", 1.0, frequency_factors=factors) if factors else None
        return Rope(theta, plain, max_positions)
    if kind == "yarn" and theta <= 1:
        raise ModelError(
            f"{where}: rope_theta is {theta!r}; rope scaling yarn needs one above 1; check the file"
        )
    scaling = _scaling(kind, parameters, factors, max_positions, raw, where)
    return Rope(theta, scaling, _reach(scaling, max_positions))


def _parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(raw.get("rope_parameters") or {})
    if isinstance(found.get("full_attention"), dict):  # by kind of layer; others are refused
        found = dict(found["full_attention"])
    return found | dict(raw.get("rope_scaling") or {})


def _factors(parameters: Mapping[str, Any], where: str) -> tuple[float, ...]:
    """What a GGUF file's conversion notes; no Hugging Face file has it."""
    factors = tuple(float(factor) for factor in parameters.get("frequency_factors") or ())
    if not all(0 < factor < float("inf") for factor in factors):
        raise ModelError(f"{where}: a rope frequency factor is not above 0; fetch the model again")
    return factors


def _scaling(
    kind: str,
    parameters: Mapping[str, Any],
    factors: tuple[float, ...],
    max_positions: int,
    raw: Mapping[str, Any],
    where: str,
) -> RopeScaling:
    read = ConfigReader(parameters, f"{where} (rope scaling)")
    original = ConfigReader(
        {
            "original_max_position_embeddings": raw.get("original_max_position_embeddings")
            or parameters.get("original_max_position_embeddings")
        },
        where,
    ).size("original_max_position_embeddings", max_positions)
    for key in _NEEDED.get(kind, ()):
        if parameters.get(key) is None:
            raise ModelError(f"{where}: rope scaling {kind} needs {key}; check the file")
    low, high = read.number("low_freq_factor", 1.0), read.number("high_freq_factor", 4.0)
    if kind == "llama3" and low >= high:
        raise ModelError(
            f"{where}: low_freq_factor is {low} and high_freq_factor is {high}; the low one must "
            "be below the high one; check the file"
        )
    return RopeScaling(
        kind=kind,
        factor=read.number("factor", max_positions / original),
        original_max_context=original,
        low_freq_factor=low,
        high_freq_factor=high,
        attention_factor=None
        if parameters.get("attention_factor") is None
        else read.number("attention_factor", 1.0),
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        mscale=read.weight("mscale"),
        mscale_all_dim=read.weight("mscale_all_dim"),
        truncate=read.flag("truncate", True),
        frequency_factors=factors,
    )


def _reach(scaling: RopeScaling, max_positions: int) -> int:
    """Linear and YaRN stretch the original context by their factor. A file may state the product as
    its max_position_embeddings already, as Llama 3.1's always do.
    """
    if scaling.kind == "llama3":
        return max_positions
    return max(round(scaling.original_max_context * scaling.factor), max_positions)
