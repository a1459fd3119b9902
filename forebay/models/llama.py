"""The Llama family as pipeline stages: Llama, Mistral, Qwen2 and Qwen3 differ by flags of the configuration only.

    first stage   token ids (T,) -> embeddings          middle   (T, hidden) -> layers -> (T, hidden)
    last stage    layers -> norm -> output head, for the sampled rows only -> float32 logits (S, vocab)

What a layer computes, and by which kernels: `models.layers`, `models.native`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from forebay.models.batch import StageBatch
from forebay.models.config import ModelConfig
from forebay.models.errors import ModelError
from forebay.models.kv import KVPool
from forebay.models.kv_format import KvFormat
from forebay.models.layers import Head, Layers, LayerWeights, Matrix, TorchLayers
from forebay.models.native.build import AUTO, NoKernels
from forebay.models.native.engine import NativeLayers, refuse_format
from forebay.models.rope import RopeTable
from forebay.models.shard import Shard, check_tp
from forebay.models.tensors import EMBEDDING, HEAD
from forebay.models.weights import Checkpoint

# Finite, so that it harms nothing, and too large for its square: its norms are zeros.
NO_NORM = 1e30


class Kernels(StrEnum):
    """What computes: `AUTO` = compiled for this machine where that is possible, else PyTorch's;
    `NATIVE` = compiled or not at all; `NATIVE_...` = that build of `models.native.build`."""

    AUTO = "auto"
    NATIVE = "native"
    NATIVE_AVX512BF16 = "native:avx512bf16"
    NATIVE_AVX512 = "native:avx512"
    NATIVE_AVX2 = "native:avx2"
    NATIVE_PLAIN = "native:plain"
    TORCH = "torch"

    @property
    def build(self) -> str:
        """Of the compiled library."""
        return self.value.partition(":")[2] or AUTO


class Stage:
    """One rank's layers, ready to run. Made by `load_stage`; call `forward` under `torch.inference_mode`."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        layers: Layers,
        embedding: Tensor | None,
        dtype: torch.dtype,
        tp_group: dist.ProcessGroup | None,
        without: str = "",
    ) -> None:
        """``without``: what this machine does not give, and why; in words, or empty."""
        self.without = without
        self.config = config
        self.shard = shard
        self.dtype = dtype
        self._layers = layers
        self._embedding = embedding
        self._tp_group = tp_group

    def join(self, tp_group: dist.ProcessGroup | None) -> None:
        """The group that shares this stage's layers by heads; it may come into being only after the weights are loaded."""
        self._tp_group = tp_group

    def forward(
        self,
        inputs: Tensor,
        batch: StageBatch,
        kv: KVPool,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run all layers over the rows of `batch`, writing their keys and values into `kv`.

        `inputs` are token ids `(T,)` int64 on the first stage, else the previous stage's answer `(T, hidden)`; they may be overwritten.
        Returns `(T, hidden)`, or on the last stage float32 logits `(S, vocab)` of `batch.sample_rows`.
        `on_layer(i)` is called before the pages of stage-local layer `i` are first touched.
        """
        assert inputs.shape[0] == batch.rows, (inputs.shape, batch.rows)
        hidden = inputs if self._embedding is None else F.embedding(inputs, self._embedding)
        hidden = self._layers.run(hidden, batch, kv, self._tp_group, on_layer)
        batch.finite.logical_and_(have_norms(hidden))
        if not self.shard.is_last:
            return _marked(hidden, batch, kv)
        logits = self._logits(hidden, batch)
        return _cleared(logits, batch, kv)

    def _logits(self, hidden: Tensor, batch: StageBatch) -> Tensor:
        rows = batch.sample_rows
        if not len(rows):
            return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=hidden.device)
        logits = self._layers.logits(hidden.index_select(0, rows))
        batch.finite[rows] &= logits.sum(dim=-1).isfinite()
        return logits


def have_norms(hidden: Tensor) -> Tensor:
    """Whether rows of ``hidden (T, hidden)`` are numbers whose squares can be summed, ``(T,)``.

    What is NaN or infinite stays so in a residual stream; what a norm cannot be computed of would
    come out of it as zeros, and nobody would notice.
    """
    norms: Tensor = torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32)
    return norms.square().isfinite()


def _marked(hidden: Tensor, batch: StageBatch, kv: KVPool) -> Tensor:
    """For the next stage: rows that are not finite here have no norm there, whatever it was here."""
    if not bool(batch.finite.all()):
        kv.erase(batch)
        hidden[~batch.finite] = NO_NORM
    return hidden


def _cleared(logits: Tensor, batch: StageBatch, kv: KVPool) -> Tensor:
    """For the sampler: rows that are not finite are zeros, which harm no other row."""
    if not bool(batch.finite.all()):
        kv.erase(batch)
        logits[~batch.finite[batch.sample_rows]] = 0.0
    return logits


def load_stage(
    path: Path,
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tp_group: dist.ProcessGroup | None = None,
    kernels: Kernels = Kernels.AUTO,
    kv_formats: Iterable[KvFormat] = (),
) -> Stage:
    """Read the part of the model in directory `path` that `shard` names, and nothing else.

    `tp_group` is needed when `shard.tp_size > 1`. `kv_formats`: of the pools to come; the one of `dtype` itself need not be named.
    Raises ModelError when the files are missing, damaged or do not fit `config`, when `shard.tp_size` does not divide the heads, or
    when `kernels` are asked for that cannot be had.
    """
    check_tp(config, shard.tp_size)
    device = torch.device(device)
    with Checkpoint(path) as files:
        loader = _Loader(files, config, shard, dtype, device)
        embedding = loader.embedding() if shard.is_first else None
        head = loader.head(embedding) if shard.is_last else None
        layers, without = _layers(loader, head, kernels, kv_formats)
        group = tp_group if shard.tp_size > 1 else None
        return Stage(config, shard, layers, embedding, dtype, group, without)


def _layers(
    loader: _Loader, head: Head | None, kernels: Kernels, kv_formats: Iterable[KvFormat]
) -> tuple[Layers, str]:
    """By the kernels that are asked for, or that can be had; what cannot be had, in words."""
    without = ""
    config, shard, dtype = loader.config, loader.shard, loader.dtype
    rope = RopeTable(config, dtype, loader.device)
    try:
        if kernels is not Kernels.TORCH and loader.device.type == "cpu":
            for form in kv_formats:
                refuse_format(form, kernels.build)
            threads = torch.get_num_threads()
            return NativeLayers(
                config, shard, dtype, rope, loader.layers(), head, threads, kernels.build
            ), ""
    except NoKernels as error:
        if kernels is not Kernels.AUTO:
            raise ModelError(f"--kernels {kernels}: {error}; use --kernels auto") from error
        without = f"compiled kernels: {error}"
        print(
            f"forebay: no compiled kernels: {error}; PyTorch's are used, which is slower",
            file=sys.stderr,
            flush=True,
        )
    if kernels not in (Kernels.AUTO, Kernels.TORCH):
        raise ModelError(
            f"--kernels {kernels}: they are for a CPU, not for {loader.device.type}; use --kernels auto"
        )
    return TorchLayers(config, shard, dtype, rope, loader.layers(), head), without


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
        return self.files.read(EMBEDDING, shape, self.dtype).to(self.device)

    def head(self, embedding: Tensor | None) -> Head:
        """The final norm and the output head; the embedding's weights when they are tied."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        if self.config.tied_embeddings:
            weight = embedding if embedding is not None else self.embedding()
            self._check_tied(weight, shape)
        else:
            weight = self.files.read(HEAD, shape, self.dtype).to(self.device)
        return Head(self.vector("model.norm.weight", self.config.hidden_size), Matrix(weight))

    def _check_tied(self, embedding: Tensor, shape: tuple[int, int]) -> None:
        """A head that is saved beside the embedding it is tied to must be the same numbers."""
        if not self.files.has(HEAD):
            return
        if not torch.equal(self.files.read(HEAD, shape, self.dtype).to(self.device), embedding):
            raise ModelError(
                f"{self.files.path}: {HEAD} differs from {EMBEDDING}, and config.json says "
                "tie_word_embeddings; say false there if the model has a head of its own"
            )

    def layers(self) -> Iterator[LayerWeights]:
        """One after the other, so that no two are held unpacked."""
        return (self.layer(index) for index in range(self.shard.layer_start, self.shard.layer_stop))

    def layer(self, index: int) -> LayerWeights:
        config, shard = self.config, self.shard
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, head_dim = config.hidden_size, config.head_dim
        q_part, kv_part = (
            _scaled(shard.heads(config), head_dim),
            _scaled(shard.kv_heads(config), head_dim),
        )
        q_size, kv_size = config.heads * head_dim, config.kv_heads * head_dim
        inner, inner_part = config.intermediate_size, shard.intermediate(config)
        outputs = (
            ("q_proj", q_size, q_part),
            ("k_proj", kv_size, kv_part),
            ("v_proj", kv_size, kv_part),
        )
        return LayerWeights(
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

    def _by_rows(
        self, prefix: str, outputs: tuple[tuple[str, int, range], ...], inputs: int, bias: bool
    ) -> Matrix:
        """Projections of one input, stacked; each rank holds some outputs."""
        weights = [
            self.files.read(f"{prefix}{name}.weight", (size, inputs), self.dtype, rows=part)
            for name, size, part in outputs
        ]
        biases = (
            [self.vector(f"{prefix}{name}.bias", size, part) for name, size, part in outputs]
            if bias
            else None
        )
        return Matrix(
            torch.cat(weights).to(self.device), None if biases is None else torch.cat(biases)
        )

    def _by_columns(self, name: str, outputs: int, inputs: int, part: range, bias: bool) -> Matrix:
        """A projection whose inputs are spread over the ranks; rank 0 alone adds the bias."""
        weight = self.files.read(f"{name}.weight", (outputs, inputs), self.dtype, columns=part).to(
            self.device
        )
        use_bias = bias and self.shard.tp_rank == 0
        return Matrix(weight, self.vector(f"{name}.bias", outputs) if use_bias else None)


def _scaled(part: range, by: int) -> range:
    return range(part.start * by, part.stop * by)
