"""A stage's layers through the compiled library: one call for all of them, so a decode step costs what its weights cost to read.

    torch tensors --addresses--> stage.c: products, attention over pages, rotation, norms, page formats

Weights are packed as the library's inner loop reads them and kept only so. The library has a pool of threads of its own: torch's
would spin on cores that other processes need (docs/LOG.md). ctypes releases the interpreter lock during a call.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from forebay.models.batch import StageBatch
from forebay.models.config import ModelConfig
from forebay.models.kv import KVPool
from forebay.models.kv_format import KvFormat
from forebay.models.layers import Head, LayerWeights, Matrix
from forebay.models.native.build import AUTO, NoKernels, library
from forebay.models.rank_sum import sum_over_ranks
from forebay.models.rope import RopeTable
from forebay.models.shard import Shard

GROUPS_MAX = 48
_DTYPES = (torch.float32, torch.bfloat16)
_KV_FORMATS = ("float32", "bfloat16", "float16", "int8", "fp8_e4m3")


class _Layer(Structure):
    _fields_ = [
        (name, c_void_p)
        for name in (
            "attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias",
            "mlp_norm", "gate", "gate_bias", "up", "up_bias", "down", "down_bias",
        )
    ]  # fmt: skip


class _LayerPages(Structure):
    _fields_ = [(name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")]


class _Span(Structure):
    _fields_ = [
        ("table_start", c_int64),
        *((name, c_int32) for name in ("row_start", "rows", "context", "items_before")),
    ]


class _Batch(Structure):
    _fields_ = [
        ("positions", c_void_p),
        ("spans", POINTER(_Span)),
        *(
            (name, c_void_p)
            for name in (
                "tables",
                "write_rows",
                "write_pages",
                "write_offsets",
                "cosines",
                "sines",
                "finite",
            )
        ),
        *((name, c_int32) for name in ("rows", "span_count", "writes", "page_size")),
    ]


class _Shape(Structure):
    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "dtype",
                "kv_format",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "intermediate",
                "threads",
            )
        ),
        ("norm_eps", c_float),
    ]


class NativeLayers:
    """`Layers` on a CPU in float32 or bfloat16. `threads`: those of the library, the caller's among them."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        dtype: torch.dtype,
        rope: RopeTable,
        weights: Iterable[LayerWeights],
        head: Head | None,
        threads: int,
        build: str = AUTO,
    ) -> None:
        """``build``: of `native.build`. Raises `NoKernels` when the library cannot be had or does not
        know such a model; then nothing of ``weights`` was read."""
        refuse_unknown(config, shard, dtype)
        self._library = _bind(library(build))
        self._config = config
        self._shard = shard
        self._dtype = dtype
        self._build = build
        self._rope = rope
        self._threads = threads
        self._kept: list[Tensor] = []
        layers = [self._layer(layer) for layer in weights]
        self._layers = (_Layer * len(layers))(*layers)
        self._head = (
            None
            if head is None
            else (self._keep(head.norm), self._pack(head.matrix), head.matrix.weight.shape[0])
        )
        self._kv: weakref.ref[KVPool] | None = None
        self._pages = (_LayerPages * 0)()
        self._engine = c_void_p()

    def run(
        self,
        hidden: Tensor,
        batch: StageBatch,
        kv: KVPool,
        tp_group: dist.ProcessGroup | None,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        self._use(kv)
        hidden = hidden.contiguous()
        given = self._batch(batch)
        if tp_group is None and on_layer is None:
            self._check(
                self._library.forebay_layers(
                    self._engine,
                    self._layers,
                    self._pages,
                    len(self._layers),
                    byref(given),
                    _at(hidden),
                )
            )
            return hidden
        for index in range(len(self._layers)):
            if on_layer is not None:
                on_layer(index)
            hidden = self._one_layer(index, given, hidden, tp_group)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._head is not None and self._engine, "the last stage, after a run"
        norm, matrix, outputs = self._head
        hidden = hidden.contiguous()
        out = torch.empty(hidden.shape[0], outputs)
        self._check(
            self._library.forebay_head(
                self._engine, norm, matrix, _at(hidden), hidden.shape[0], outputs, _at(out)
            )
        )
        return out

    def _one_layer(
        self, index: int, batch: _Batch, hidden: Tensor, tp_group: dist.ProcessGroup | None
    ) -> Tensor:
        layer, pages = byref(self._layers[index]), byref(self._pages[index])
        if tp_group is None:
            self._check(
                self._library.forebay_layers(
                    self._engine, layer, pages, 1, byref(batch), _at(hidden)
                )
            )
            return hidden
        adds = int(self._shard.tp_rank == 0)
        for half in (self._library.forebay_attention, self._library.forebay_mlp):
            partial = torch.empty_like(hidden)
            where = (
                (pages, byref(batch))
                if half is self._library.forebay_attention
                else (byref(batch),)
            )
            self._check(half(self._engine, layer, *where, _at(hidden), _at(partial), adds))
            hidden = sum_over_ranks(partial, tp_group)
        return hidden

    def _use(self, kv: KVPool) -> None:
        """Have an engine for this pool's format, and its addresses."""
        if self._kv is not None and self._kv() is kv:
            return
        refuse_format(kv.form, self._build)
        config, shard = self._config, self._shard
        shape = _Shape(
            _DTYPES.index(self._dtype),
            _KV_FORMATS.index(kv.form.name),
            config.hidden_size,
            len(shard.heads(config)),
            len(shard.kv_heads(config)),
            config.head_dim,
            len(shard.intermediate(config)),
            self._threads,
            config.norm_eps,
        )
        self._engine = c_void_p(self._library.forebay_open(byref(shape)))
        if not self._engine:
            raise MemoryError(f"no memory or threads for {self._threads} compute threads")
        weakref.finalize(kv, self._library.forebay_close, self._engine)
        self._kv = weakref.ref(kv)
        self._pages = (_LayerPages * kv.layers)(
            *(_LayerPages(*map(_at, kv.pieces(layer))) for layer in range(kv.layers))
        )

    def _batch(self, batch: StageBatch) -> _Batch:
        """Addresses of the batch's tensors, which live longer than the call."""
        start, spans = 0, []
        for span, table in zip(batch.spans, batch.page_tables, strict=True):
            spans.append(_Span(start, span.row_start, span.rows, span.context, 0))
            start += len(table)
        cos, sin = self._rope.tables(batch.total_max - 1)
        tensors = (
            batch.flat_tables,
            batch.write_rows,
            batch.write_pages,
            batch.write_offsets,
            cos,
            sin,
            batch.finite,
        )
        counts = (batch.rows, len(spans), len(batch.write_rows), batch.page_size)
        return _Batch(
            _at(batch.positions), (_Span * len(spans))(*spans), *map(_at, tensors), *counts
        )

    def _layer(self, layer: LayerWeights) -> _Layer:
        matrices = {name: getattr(layer, name) for name in ("qkv", "o", "gate", "up", "down")}
        vectors = {
            name: getattr(layer, name)
            for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")
        }
        biases = {f"{name}_bias": matrix.bias for name, matrix in matrices.items()}
        return _Layer(
            **{name: self._pack(matrix) for name, matrix in matrices.items()},
            **{
                name: None if vector is None else self._keep(vector)
                for name, vector in (vectors | biases).items()
            },
        )

    def _pack(self, matrix: Matrix) -> int:
        return self._keep(pack(matrix.weight, self._library.forebay_panel()))

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor that now lives as long as these layers."""
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _check(self, status: int) -> None:
        if status:
            raise MemoryError(
                "no memory for the activations of a plan; give less with --chunk-size"
            )


def refuse_unknown(config: ModelConfig, shard: Shard, dtype: torch.dtype) -> None:
    """Raise `NoKernels` for a model that the library has no code for."""
    if dtype not in _DTYPES:
        raise NoKernels(
            f"they compute in float32 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
        )
    if config.heads // config.kv_heads > GROUPS_MAX:
        raise NoKernels(
            f"they know up to {GROUPS_MAX} query heads for a key/value head; this model has {config.heads // config.kv_heads}"
        )
    inner = (
        config.hidden_size,
        len(shard.heads(config)) * config.head_dim,
        len(shard.intermediate(config)),
    )
    if dtype == torch.bfloat16 and any(size % 2 for size in inner):
        raise NoKernels(
            f"they need even sizes in bfloat16; this model has {', '.join(map(str, inner))}"
        )


def refuse_format(form: KvFormat, build: str = AUTO) -> None:
    """Raise `NoKernels` for pages that this build of the library has no code for."""
    if not library(build).forebay_knows(_KV_FORMATS.index(form.name)):
        raise NoKernels(
            f"the C compiler does not know {form.name}, which KV pages are kept in (--kv-dtype)"
        )


def pack(weight: Tensor, panel: int) -> Tensor:
    """`weight (out, in)` as `stage.h` says: `(ceil(out / panel), in / per, panel, per)`, per = 2 for
    bfloat16, missing outputs 0."""
    per = 4 // weight.element_size()
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, 0, 0, -outputs % panel))
    return padded.view(-1, panel, inputs // per, per).transpose(1, 2).contiguous()


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _bind(loaded: ctypes.CDLL) -> Any:
    """Types of the functions, once."""
    loaded.forebay_open.argtypes = [c_void_p]
    loaded.forebay_open.restype = c_void_p
    loaded.forebay_close.argtypes = [c_void_p]
    loaded.forebay_close.restype = None
    loaded.forebay_layers.argtypes = [c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p]
    loaded.forebay_attention.argtypes = [
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int32,
    ]
    loaded.forebay_mlp.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int32]
    loaded.forebay_head.argtypes = [
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int32,
        c_int32,
        c_void_p,
    ]
    return loaded
