"""Rotary position embeddings: frequencies and tables.

Plain: Su et al., "RoFormer" (arXiv 2104.09864), in the half-split form of the Hugging Face checkpoints. Scaled: linear
(position interpolation, arXiv 2306.15595), Llama 3.1's by-parts rule, YaRN (arXiv 2309.00071), and a
divisor for each frequency, as GGUF files state Llama 3.1's rule.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.models.config import ModelConfig
from forebay.models.errors import ModelError
from forebay.models.rope_scaling import RopeScaling


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Float32 frequencies `(head_dim / 2,)` and the factor by which cos and sin are multiplied."""
    dim = config.head_dim
    frequencies = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    factor = 1.0
    if scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling.kind == "yarn":
        frequencies = _yarn(config.rope_theta, dim, scaling)
        factor = _yarn_attention_factor(scaling)
    else:
        assert scaling.kind == "default", scaling
    if scaling.frequency_factors:
        factors = torch.tensor(scaling.frequency_factors, dtype=torch.float32)
        if factors.shape != frequencies.shape:
            raise ModelError(
                f"the model has {len(factors)} rope frequency factors and heads of {dim} numbers "
                f"need {dim // 2}; fetch it again"
            )
        frequencies = frequencies / factors
    return frequencies, factor


class RopeTable:
    """cos and sin by position, computed in float32, kept in the compute dtype, grown when a longer context comes."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies, self._factor = inverse_frequencies(config)
        self._dtype = dtype
        self._device = device
        self._limit = config.max_context
        self._cos = torch.empty(0, config.head_dim, dtype=dtype, device=device)
        self._sin = self._cos

    def at(self, positions: Tensor, position_max: int) -> tuple[Tensor, Tensor]:
        """cos `(T, 1, head_dim)` and sin `(T, 1, head_dim / 2)` at `positions (T,)`, all at most `position_max`."""
        cos, sin = self.tables(position_max)
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def tables(self, position_max: int) -> tuple[Tensor, Tensor]:
        """cos `(positions, head_dim)` and sin `(positions, head_dim / 2)` of all positions, at least up to `position_max`."""
        if position_max >= self._cos.shape[0]:
            self._grow(position_max + 1)
        return self._cos, self._sin

    def _grow(self, rows: int) -> None:
        rows = max(rows, min(self._limit, 2 * self._cos.shape[0]), 2048)
        angles = torch.arange(rows, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        self._cos = torch.cat((cos, cos), dim=-1).to(self._dtype).to(self._device)
        self._sin = sin.to(self._dtype).to(self._device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x (T, heads, head_dim)`; the answer is a new tensor.

    With halves a, b of each head: (a cos - b sin, b cos + a sin). Each product is rounded, as in transformers: a fused
    multiply-add is more exact, but then bfloat16 text leaves the reference's earlier (docs/LOG.md).
    """
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].sub_(x[..., half:] * sin)
    out[..., half:].add_(x[..., :half] * sin)
    return out


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    waves = 2 * math.pi / frequencies
    long, short = (
        scaling.original_max_context / f
        for f in (scaling.low_freq_factor, scaling.high_freq_factor)
    )
    smooth = (scaling.original_max_context / waves - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return torch.where(
        waves > long, frequencies / scaling.factor, torch.where(waves < short, frequencies, between)
    )


def _yarn(theta: float, dim: int, scaling: RopeScaling) -> Tensor:
    """Interpolate slow dimensions, keep fast ones, with a linear ramp between (YaRN, section 3.2)."""

    def dimension(rotations: float) -> float:
        return (
            dim
            * math.log(scaling.original_max_context / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return (1.0 / (scaling.factor * powers)) * (1 - keep) + (1.0 / powers) * keep


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
