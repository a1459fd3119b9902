"""Host pages (L2) of one rank: one contiguous block a page, in the order of `pages.block`.

The pool is a memfd: it has no name that could outlive a killed process, and a store on this machine is lent it, to copy straight out
of.
"""

import mmap

import torch
from torch import Tensor

from forebay.models.kv import KVPool
from forebay.models.kv_format import SCALE_DTYPE
from forebay.store.client.lent import Lent, lendable


class HostPool:
    """``pages`` blocks for the layers and heads of ``device_pool``; zero pages are not committed before they are written."""

    def __init__(self, device_pool: KVPool, pages: int) -> None:
        self.pages = pages
        self.block_bytes = device_pool.block.size
        size = pages * self.block_bytes
        self.lent: Lent | None = None
        memory: mmap.mmap | bytearray = bytearray()
        if pages:  # nothing cannot be mapped
            self.lent, memory = lendable("forebay-host", size)
        self._bytes = memoryview(memory)
        flat = (
            torch.frombuffer(memory, dtype=torch.uint8)
            if pages
            else torch.empty(0, dtype=torch.uint8)
        )
        self._codes, self._scales = _views(device_pool, flat.view(pages, self.block_bytes))

    def pieces(self, layer: int) -> list[Tensor]:
        """Keys, values and scales of one layer as `KVPool.pieces` has them: views into all blocks, each ``(pages, ...)``."""
        codes = [self._codes[:, layer, 0], self._codes[:, layer, 1]]
        return (
            codes
            if self._scales is None
            else [*codes, self._scales[:, layer, 0], self._scales[:, layer, 1]]
        )

    def block(self, page: int) -> memoryview:
        """The page's bytes, writable; as they are stored."""
        return self._bytes[page * self.block_bytes : (page + 1) * self.block_bytes]


def _views(pool: KVPool, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes ``(pages, layers, 2, kv_heads, page_size, head_dim)`` and scales (the same without head_dim, or None) of
    ``blocks (pages, block_bytes)``."""
    shape = (len(blocks), pool.layers, 2, pool.kv_heads, pool.page_size)
    codes = (
        blocks[:, : pool.block.numbers_bytes].view(pool.form.storage).view(*shape, pool.head_dim)
    )
    if not pool.form.is_scaled:
        return codes, None
    return codes, blocks[:, pool.block.numbers_bytes :].view(SCALE_DTYPE).view(shape)
