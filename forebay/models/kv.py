"""Device pages (L1): per layer one tensor of keys and one of values, cut into pages, and their scales where the format has any.

    keys[layer]        (pages, kv_heads, page_size, head_dim)     values[layer]        the same
    key_scales[layer]  (pages, kv_heads, page_size)               value_scales[layer]  the same

A page of one layer's keys is contiguous, head by head: exactly the piece of a block that L2 and L3 hold (`pages.block`).
Every slot holds finite numbers at all times, zeros at first: attention reads whole pages and masks what is not yet there.
The pool owns memory only; who may use which page is the planner's business.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.models.batch import StageBatch
from forebay.models.config import ModelConfig
from forebay.models.kv_format import SCALE_DTYPE, KvFormat, kv_format
from forebay.models.shard import Shard, part_of
from forebay.pages.block import Block
from forebay.pages.spec import KvSpec


def page_block(config: ModelConfig, shard: Shard, page_size: int, form: KvFormat) -> Block:
    """The bytes of one page on one rank: all its layers, keys and values."""
    spec = KvSpec.keys_and_values(
        page_size, config.head_dim, form.name, form.storage.itemsize, form.scale_bytes
    )
    return Block(part_of(config, shard), spec)


@dataclass(frozen=True, slots=True)
class KVSide:
    """Keys, or values, of one layer.

    ``pages (pages, kv_heads, page_size, head_dim)`` in the format's storage dtype; ``scales (pages, kv_heads, page_size)`` or None.
    """

    form: KvFormat
    pages: Tensor
    scales: Tensor | None

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Put ``rows (N, head_dim)`` into ``slots (N,)``, counted in vectors of head_dim."""
        codes, scales = self.form.encode(rows)
        self.pages.view(-1, codes.shape[-1]).index_copy_(0, slots, codes)
        if self.scales is not None and scales is not None:
            self.scales.view(-1).index_copy_(0, slots, scales)

    def gather(self, page_heads: Tensor, runs: int, dtype: torch.dtype) -> Tensor:
        """``(runs, keys, head_dim)`` in ``dtype``: page-heads strung together, ``runs`` strings of equal length."""
        page_size, head_dim = self.pages.shape[2:]
        codes = self.pages.view(-1, page_size, head_dim).index_select(0, page_heads)
        scales = (
            None
            if self.scales is None
            else self.scales.view(-1, page_size).index_select(0, page_heads)
        )
        return self.form.decode(codes, scales, dtype).view(runs, -1, head_dim)


class KVPool:
    """`pages` pages for the layers and key/value heads of `shard`, zero-filled, on `device`. ``form``: `dtype`'s own if not given."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        form: KvFormat | None = None,
    ) -> None:
        assert pages > 0 and page_size > 0, (pages, page_size)
        self.pages = pages
        self.page_size = page_size
        self.form = form or kv_format("auto", dtype)
        self.kv_heads = len(shard.kv_heads(config))
        self.head_dim = config.head_dim
        self.layers = shard.layer_count
        self.block = page_block(config, shard, page_size, self.form)
        shape = (pages, self.kv_heads, page_size, config.head_dim)
        layers = range(self.layers)
        self.keys = [_zeros(shape, self.form.storage, device) for _ in layers]
        self.values = [_zeros(shape, self.form.storage, device) for _ in layers]
        scaled = layers if self.form.is_scaled else range(0)
        self.key_scales = [_zeros(shape[:3], SCALE_DTYPE, device) for _ in scaled]
        self.value_scales = [_zeros(shape[:3], SCALE_DTYPE, device) for _ in scaled]

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    def pieces(self, layer: int) -> list[Tensor]:
        """Keys, values and scales of one layer, each ``(pages, ...)``: what a copy of a page moves."""
        scales = [self.key_scales[layer], self.value_scales[layer]] if self.form.is_scaled else []
        return [self.keys[layer], self.values[layer], *scales]

    def sides(self, layer: int) -> tuple[KVSide, KVSide]:
        """Keys and values of one layer, to write and to read."""
        keys, values, *scales = self.pieces(layer)
        key_scales, value_scales = scales or (None, None)
        return KVSide(self.form, keys, key_scales), KVSide(self.form, values, value_scales)

    def erase(self, batch: StageBatch) -> None:
        """Zeros where rows of ``batch`` that are not finite have been written."""
        wrong = ~batch.finite[batch.write_rows]
        pages, offsets = batch.write_pages[wrong], batch.write_offsets[wrong]
        for layer in range(self.layers):
            for piece in self.pieces(layer):
                piece[pages, :, offsets] = 0

    def clear(self, pages: Tensor) -> None:
        """Zeros in ``pages (N,)``, as at first."""
        for layer in range(self.layers):
            for piece in self.pieces(layer):
                piece.index_fill_(0, pages.to(piece.device), 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory before they are written: `torch.zeros` would touch every byte of a pool of gigabytes at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(
        mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
        dtype=dtype,
    ).view(shape)
