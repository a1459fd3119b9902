"""The Llama family as pipeline stages: Llama, Mistral, Qwen2 and Qwen3 differ by flags of the configuration only.

    first stage   token ids (T,) -> embeddings          middle   (T, hidden) -> layers -> (T, hidden)
    last stage    layers -> norm -> output head, for the sampled rows only -> float32 logits (S, vocab)

    layer:  x + o(attend(rope(qkv(norm(x)))))  ->  x + down(silu(gate(norm(x))) * up(norm(x)))

Under tensor parallelism a rank holds some heads and some intermediate rows; rank 0 alone adds the residual, so one
all-reduce after `o` and one after `down` give every rank the whole sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from forebay.models.attention import attend, plan_attention
from forebay.models.batch import StageBatch
from forebay.models.config import ModelConfig
from forebay.models.kv import KVPool
from forebay.models.linear import Linear
from forebay.models.rope import RopeTable, rotate
from forebay.models.shard import Shard, check_tp
from forebay.models.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer, cut to the heads and intermediate rows of one tensor parallel rank."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


class Stage:
    """One rank's layers, ready to run. Made by `load_stage`; call `forward` under `torch.inference_mode`."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        layers: list[Layer],
        embedding: Tensor | None,
        final_norm: Tensor | None,
        head: Linear | None,
        rope: RopeTable,
        dtype: torch.dtype,
        tp_group: dist.ProcessGroup | None,
    ) -> None:
        assert len(layers) == shard.layer_count
        self.config = config
        self.shard = shard
        self.dtype = dtype
        self._layers = layers
        self._embedding = embedding
        self._final_norm = final_norm
        self._head = head
        self._rope = rope
        self._tp_group = tp_group
        self._heads = len(shard.heads(config))
        self._kv_heads = len(shard.kv_heads(config))

    def join(self, tp_group: dist.ProcessGroup | None) -> None:
        """The group that shares this stage's layers by heads; it may come into being only after the weights are loaded."""
        self._tp_group = tp_group

    def forward(self, inputs: Tensor, batch: StageBatch, kv: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Run all layers over the rows of `batch`, writing their keys and values into `kv`.

        `inputs` are token ids `(T,)` int64 on the first stage, else the previous stage's answer `(T, hidden)`.
        Returns `(T, hidden)`, or on the last stage float32 logits `(S, vocab)` of `batch.sample_rows`.
        `on_layer(i)` is called before the pages of stage-local layer `i` are first touched.
        """
        assert inputs.shape[0] == batch.rows, (inputs.shape, batch.rows)
        hidden = inputs if self._embedding is None else F.embedding(inputs, self._embedding)
        rope = self._rope.at(batch.positions, batch.total_max - 1)
        plan = plan_attention(batch, self._kv_heads, self.dtype)
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, hidden, rope)
            if on_layer is not None:
                on_layer(index)
            attended = attend(plan, q, k, v, *kv.sides(index))
            hidden = self._join(layer.o, attended, hidden)
            hidden = self._mlp(layer, hidden)
        return hidden if self._head is None else self._logits(hidden, batch.sample_rows)

    def _project(self, layer: Layer, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `(T, heads, D)` and keys, and values `(T, kv_heads, D)`."""
        config = self.config
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

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden, layer.mlp_norm, self.config.norm_eps)
        return self._join(layer.down, layer.up.times(normed, layer.gate.silu(normed)), hidden)

    def _join(self, linear: Linear, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + linear(x)`, summed over the tensor parallel ranks."""
        if self._tp_group is None:
            return linear.plus(x, residual)
        partial = linear.plus(x, residual) if self.shard.tp_rank == 0 else linear(x)
        dist.all_reduce(partial, group=self._tp_group)
        return partial

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        assert self._head is not None and self._final_norm is not None
        if len(rows) == 0:
            return torch.empty(0, self._head.out_features, dtype=torch.float32, device=hidden.device)
        normed = rms_norm(hidden.index_select(0, rows), self._final_norm, self.config.norm_eps)
        return self._head(normed).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, the mean in float32 (Zhang and Sennrich, arXiv 1910.07467)."""
    wide = x.float()
    squares: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def load_stage(
    path: Path,
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tp_group: dist.ProcessGroup | None = None,
) -> Stage:
    """Read the part of the model in directory `path` that `shard` names, and nothing else.

    `tp_group` is needed when `shard.tp_size > 1`. Raises ModelError when the files are missing, damaged or do not fit
    `config`, or when `shard.tp_size` does not divide the heads.
    """
    check_tp(config, shard.tp_size)
    device = torch.device(device)
    with Checkpoint(path) as files:
        loader = _Loader(files, config, shard, dtype, device)
        embedding = loader.embedding() if shard.is_first else None
        return Stage(
            config,
            shard,
            layers=[loader.layer(index) for index in range(shard.layer_start, shard.layer_stop)],
            embedding=embedding,
            final_norm=loader.vector("model.norm.weight", config.hidden_size) if shard.is_last else None,
            head=loader.head(embedding) if shard.is_last else None,
            rope=RopeTable(config, dtype, device),
            dtype=dtype,
            tp_group=tp_group if shard.tp_size > 1 else None,
        )


@dataclass(frozen=True, slots=True)
class _Loader:
    """Finds each weight's name, shape and slice in the checkpoint."""

    files: Checkpoint
    config: ModelConfig
    shard: Shard
    dtype: torch.dtype
    device: torch.device

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        return self.files.read(name, (size,), self.dtype, rows=part).to(self.device)

    def embedding(self) -> Tensor:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self.files.read("model.embed_tokens.weight", shape, self.dtype).to(self.device)

    def head(self, embedding: Tensor | None) -> Linear:
        """The output head; the embedding's weights when they are tied."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        if self.config.tied_embeddings:
            return Linear(embedding if embedding is not None else self.embedding())
        return Linear(self.files.read("lm_head.weight", shape, self.dtype).to(self.device))

    def layer(self, index: int) -> Layer:
        config, shard = self.config, self.shard
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, head_dim = config.hidden_size, config.head_dim
        q_part, kv_part = _scaled(shard.heads(config), head_dim), _scaled(shard.kv_heads(config), head_dim)
        q_size, kv_size = config.heads * head_dim, config.kv_heads * head_dim
        inner, inner_part = config.intermediate_size, shard.intermediate(config)
        outputs = (("q_proj", q_size, q_part), ("k_proj", kv_size, kv_part), ("v_proj", kv_size, kv_part))
        return Layer(
            attention_norm=self.vector(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._by_rows(attention, outputs, hidden, config.qkv_bias),
            q_norm=self.vector(f"{attention}q_norm.weight", head_dim) if config.qk_norm else None,
            k_norm=self.vector(f"{attention}k_norm.weight", head_dim) if config.qk_norm else None,
            o=self._by_columns(f"{attention}o_proj", hidden, q_size, q_part, config.o_bias),
            mlp_norm=self.vector(f"{prefix}post_attention_layernorm.weight", hidden),
            gate=self._by_rows(mlp, (("gate_proj", inner, inner_part),), hidden, config.mlp_bias),
            up=self._by_rows(mlp, (("up_proj", inner, inner_part),), hidden, config.mlp_bias),
            down=self._by_columns(f"{mlp}down_proj", hidden, inner, inner_part, config.mlp_bias),
        )

    def _by_rows(self, prefix: str, outputs: tuple[tuple[str, int, range], ...], inputs: int, bias: bool) -> Linear:
        """Projections of one input, stacked; each rank holds some outputs."""
        weights = [self.files.read(f"{prefix}{name}.weight", (size, inputs), self.dtype, rows=part) for name, size, part in outputs]
        biases = [self.vector(f"{prefix}{name}.bias", size, part) for name, size, part in outputs] if bias else None
        return Linear(torch.cat(weights).to(self.device), None if biases is None else torch.cat(biases))

    def _by_columns(self, name: str, outputs: int, inputs: int, part: range, bias: bool) -> Linear:
        """A projection whose inputs are spread over the ranks; rank 0 alone adds the bias."""
        weight = self.files.read(f"{name}.weight", (outputs, inputs), self.dtype, columns=part).to(self.device)
        use_bias = bias and self.shard.tp_rank == 0
        return Linear(weight, self.vector(f"{name}.bias", outputs) if use_bias else None)


def _scaled(part: range, by: int) -> range:
    return range(part.start * by, part.stop * by)
