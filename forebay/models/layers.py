"""A stage's decoder layers: what both ways of running them share, and the one over PyTorch's own kernels.

    layer:  x + o(attend(rope(qkv(norm(x)))))  ->  x + down(silu(gate(norm(x))) * up(norm(x)))

Under tensor parallelism a rank holds some heads and some intermediate rows; rank 0 alone adds the residual, so one sum over the
ranks after `o` and one after `down` give every rank the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from forebay.models.attention import attend, plan_attention
from forebay.models.batch import StageBatch
from forebay.models.config import ModelConfig
from forebay.models.kv import KVPool
from forebay.models.linear import Linear
from forebay.models.rank_sum import sum_over_ranks
from forebay.models.rope import RopeTable, rotate
from forebay.models.shard import Shard


@dataclass(frozen=True, slots=True)
class Matrix:
    """Of a linear layer: `weight (out, in)`, `bias (out,)` or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, cut to the heads and intermediate rows of one tensor parallel rank. `qkv` are three, stacked."""

    attention_norm: Tensor
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Matrix
    mlp_norm: Tensor
    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Head:
    """The last stage's end: `norm (hidden,)`, `matrix (vocab, hidden)`."""

    norm: Tensor
    matrix: Matrix


class Layers(Protocol):
    """Runs a stage's layers over a batch. Two implementations: `TorchLayers`, and `native.engine.NativeLayers`."""

    def run(
        self,
        hidden: Tensor,
        batch: StageBatch,
        kv: KVPool,
        tp_group: dist.ProcessGroup | None,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """`hidden (T, hidden)`, which may be overwritten, through all layers; keys and values are written into `kv`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 `(S, vocab)` of `hidden (S, hidden)`; on the last stage only."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """`LayerWeights` with its matrices as `Linear` keeps them."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear

    @classmethod
    def of(cls, weights: LayerWeights) -> _Layer:
        def linear(matrix: Matrix) -> Linear:
            return Linear(matrix.weight, matrix.bias)

        return cls(
            attention_norm=weights.attention_norm,
            qkv=linear(weights.qkv),
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            o=linear(weights.o),
            mlp_norm=weights.mlp_norm,
            gate=linear(weights.gate),
            up=linear(weights.up),
            down=linear(weights.down),
        )


class TorchLayers:
    """On any device, in any dtype."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        dtype: torch.dtype,
        rope: RopeTable,
        weights: Iterable[LayerWeights],
        head: Head | None,
    ) -> None:
        self._config = config
        self._shard = shard
        self._dtype = dtype
        self._rope = rope
        self._heads = len(shard.heads(config))
        self._kv_heads = len(shard.kv_heads(config))
        self._layers = [_Layer.of(layer) for layer in weights]
        self._final_norm = None if head is None else head.norm
        self._head = None if head is None else Linear(head.matrix.weight, head.matrix.bias)

    def run(
        self,
        hidden: Tensor,
        batch: StageBatch,
        kv: KVPool,
        tp_group: dist.ProcessGroup | None,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        rope = self._rope.at(batch.positions, batch.total_max - 1)
        plan = plan_attention(batch, self._kv_heads, self._dtype)
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, hidden, rope)
            if on_layer is not None:
                on_layer(index)
            fits = torch.stack((k, v)).abs().amax(dim=(0, 2, 3)) <= kv.form.bound
            batch.finite.logical_and_(fits)
            attended = attend(plan, q, k, v, *kv.sides(index))
            hidden = self._join(layer.o, attended, hidden, tp_group)
            normed = rms_norm(hidden, layer.mlp_norm, self._config.norm_eps)
            hidden = self._join(
                layer.down, layer.up.times(normed, layer.gate.silu(normed)), hidden, tp_group
            )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._head is not None and self._final_norm is not None
        return self._head(rms_norm(hidden, self._final_norm, self._config.norm_eps)).float()

    def _project(
        self, layer: _Layer, hidden: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `(T, heads, D)` and keys, and values `(T, kv_heads, D)`."""
        config = self._config
        both = self._heads + self._kv_heads
        qkv = layer.qkv(rms_norm(hidden, layer.attention_norm, config.norm_eps))
        qkv = qkv.view(-1, both + self._kv_heads, config.head_dim)
        qk = qkv[:, :both]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(qk[:, : self._heads], layer.q_norm, config.norm_eps)
            k = rms_norm(qk[:, self._heads :], layer.k_norm, config.norm_eps)
            qk = torch.cat((q, k), dim=1)
        qk = rotate(qk, *rope)
        return qk[:, : self._heads], qk[:, self._heads :], qkv[:, both:]

    def _join(
        self, linear: Linear, x: Tensor, residual: Tensor, tp_group: dist.ProcessGroup | None
    ) -> Tensor:
        """`residual + linear(x)`, summed over the tensor parallel ranks."""
        if tp_group is None:
            return linear.plus(x, residual)
        partial = linear.plus(x, residual) if self._shard.tp_rank == 0 else linear(x)
        return sum_over_ranks(partial, tp_group)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, the mean in float32 (Zhang and Sennrich, arXiv 1910.07467)."""
    wide = x.float()
    squares: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)
