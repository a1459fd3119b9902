"""Device pages (L1): per layer one tensor of keys and one of values, cut into pages.

    keys[layer]    (pages, kv_heads, page_size, head_dim)     values[layer]  the same

A page of one layer's keys is contiguous, head by head: exactly the piece of a block that L2 and L3 hold (DESIGN 4.2).
Every slot holds finite numbers at all times, zeros at first: attention reads whole pages and masks what is not yet there.
The pool owns memory only; who may use which page is the planner's business.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from forebay.models.config import ModelConfig
from forebay.models.shard import Shard


def kv_page_bytes(config: ModelConfig, shard: Shard, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page on one rank: all its layers, keys and values."""
    return 2 * shard.layer_count * len(shard.kv_heads(config)) * page_size * config.head_dim * dtype.itemsize


class KVPool:
    """`pages` pages for the layers and key/value heads of `shard`, zero-filled, on `device`."""

    def __init__(self, config: ModelConfig, shard: Shard, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        assert pages > 0 and page_size > 0, (pages, page_size)
        self.pages = pages
        self.page_size = page_size
        self.kv_heads = len(shard.kv_heads(config))
        self.head_dim = config.head_dim
        self.dtype = dtype
        self.page_bytes = kv_page_bytes(config, shard, page_size, dtype)
        shape = (pages, self.kv_heads, page_size, config.head_dim)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for _ in range(shard.layer_count):
            self.keys.append(_zeros(shape, dtype, device))
            self.values.append(_zeros(shape, dtype, device))

    @property
    def layers(self) -> int:
        return len(self.keys)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory before they are written: `torch.zeros` would touch every byte of a pool of gigabytes at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype).view(
        shape
    )
