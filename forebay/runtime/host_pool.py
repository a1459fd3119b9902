"""Host pages (L2) of one rank: one contiguous block a page (DESIGN 4.2).

    block:  for each layer, keys then values, for each head: page_size x head_dim

The pool is a memfd: it has no name that could outlive a killed process, and a store on this machine could be handed it.
"""

import math
import mmap
import os

import torch

from forebay.models.kv import KVPool


class HostPool:
    """``pages`` blocks for the layers and heads of ``device_pool``; zero pages are not committed before they are written.

    ``blocks``: (pages, layers, 2, kv_heads, page_size, head_dim), of the device pool's dtype.
    """

    def __init__(self, device_pool: KVPool, pages: int) -> None:
        shape = (pages, device_pool.layers, 2, device_pool.kv_heads, device_pool.page_size, device_pool.head_dim)
        size = math.prod(shape) * device_pool.dtype.itemsize
        self.pages = pages
        self.fd = os.memfd_create("forebay-host", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.block_bytes = device_pool.page_bytes
        if pages:
            memory = mmap.mmap(self.fd, size)
            self._bytes = memoryview(memory)
            self.blocks = torch.frombuffer(memory, dtype=device_pool.dtype).view(shape)
        else:  # nothing can be mapped
            self._bytes = memoryview(b"")
            self.blocks = torch.empty(shape, dtype=device_pool.dtype)

    def block(self, page: int) -> memoryview:
        """The page's bytes, writable; as they are stored."""
        return self._bytes[page * self.block_bytes : (page + 1) * self.block_bytes]
