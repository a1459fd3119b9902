"""The parts that were asked for, and the document of what came out of them: medians, and every sample."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forebay.bench.scratch import scratch_directory
from forebay.bench.tiers import copies, cost, hits
from forebay.bench.ttft.plan import TtftError
from forebay.models.config import ModelConfig, load_config
from forebay.models.resolve import resolve_model
from forebay.models.shard import check_tp, split_layers
from forebay.runtime.compute_dtype import compute_dtype
from forebay.settings import Settings

PARTS = ("hits", "cost", "copies")
Say = Callable[[str], None]


def run(
    model: str, settings: Settings, parts: Sequence[str], tokens: int, rounds: int, say: Say
) -> dict[str, Any]:
    """Raises ``TtftError`` with one line, and what reading a model raises."""
    resolved = resolve_model(model)
    config = load_config(resolved.path)
    split_layers(config.layers, settings.pp)
    check_tp(config, settings.tp)
    _check(settings, config, parts, tokens)
    dtype = compute_dtype(config, settings)
    about = {
        "model": resolved.name,
        "dtype": dtype,
        "pp": settings.pp,
        "tp": settings.tp,
        "tokens": tokens,
        "rounds": rounds,
    }
    with scratch_directory("tiers") as directory:
        found = {
            part: _part(part, model, settings, config, tokens, rounds, directory, say)
            for part in PARTS
            if part in parts
        }
    return {"config": about, **found}


def _check(settings: Settings, config: ModelConfig, parts: Sequence[str], tokens: int) -> None:
    context = min(settings.max_context or config.max_context, config.max_context)
    longest = max([tokens if "hits" in parts else 0, cost.TOKENS if "cost" in parts else 0])
    if longest + 1 > context:
        raise TtftError(
            f"a prompt of {longest} tokens and one more do not fit the context of {context}; give less --tokens"
        )
    if "hits" in parts and (tokens % settings.page_size or tokens < settings.fetch_threshold):
        raise TtftError(
            f"--tokens is {tokens}; it must be full pages of {settings.page_size} tokens and at least --fetch-threshold "
            f"{settings.fetch_threshold}, so that all of it can be hit"
        )


def _part(
    part: str,
    model: str,
    settings: Settings,
    config: ModelConfig,
    tokens: int,
    rounds: int,
    directory: Path,
    say: Say,
) -> list[dict[str, Any]]:
    if part == "hits":
        return [
            _with_medians(row)
            for row in hits.measure(model, settings, config, tokens, rounds, directory, say)
        ]
    if part == "cost":
        return cost.measure(model, settings, config, directory, say)
    return [_with_medians(row) for row in copies.measure(config, settings, rounds, directory, say)]


def _with_medians(row: dict[str, Any]) -> dict[str, Any]:
    """Each list of samples becomes its median, 10th and 90th percentile, and the samples."""
    return {
        name: _summary(value) if isinstance(value, list) else value for name, value in row.items()
    }


def _summary(samples: list[float]) -> dict[str, Any] | None:
    if not samples:
        return None
    deciles = (
        statistics.quantiles(samples, n=10, method="inclusive")
        if len(samples) > 1
        else [samples[0]] * 9
    )
    return {
        "p50": statistics.median(samples),
        "p10": deciles[0],
        "p90": deciles[-1],
        "samples": samples,
    }
