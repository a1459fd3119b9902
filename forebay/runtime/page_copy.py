"""Pages of one piece (keys, values or scales of one layer) from one pool to another, without the interpreter's lock.

On a CPU that is one call of a compiled loop of memcpy for all pages (`native/pages.c`): a tensor copy
for each page of each layer costs more than its bytes. Elsewhere, and where nothing is compiled,
PyTorch copies.
"""

from collections.abc import Sequence
from ctypes import CDLL, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from forebay.compiled import NotCompiled, Sources
from forebay.core.messages import Copy

Pages = npt.NDArray[np.int64]
# Nothing in it but calls of memcpy: no instruction that a processor might lack.
SOURCES = Sources(Path(__file__).parent / "native", ("pages.c",), "page copies", flags=("-O2",))


class PagePairs:
    """Which pages of the device and of the host belong together, for all pieces."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        pairs = np.array([(copy.device, copy.host) for copy in copies], dtype=np.int64).reshape(
            -1, 2
        )
        self.device: Pages = np.ascontiguousarray(pairs[:, 0])
        self.host: Pages = np.ascontiguousarray(pairs[:, 1])


class Piece:
    """``device`` and ``host`` hold the same piece, each ``(pages, ...)`` of equal shape but for the number of pages."""

    def __init__(self, device: Tensor, host: Tensor) -> None:
        assert device.shape[1:] == host.shape[1:] and device.dtype == host.dtype
        self._device = device
        self._host = host
        self._bytes = device[:1].numel() * device.element_size()
        on_cpu = (
            device.device.type == "cpu" and device[:1].is_contiguous() and host[:1].is_contiguous()
        )
        self._native = _copy_pages() if on_cpu else None

    def load(self, pairs: PagePairs) -> None:
        """Device pages become equal to their host pages."""
        self._copy(self._device, pairs.device, self._host, pairs.host)

    def save(self, pairs: PagePairs) -> None:
        """Host pages become equal to their device pages."""
        self._copy(self._host, pairs.host, self._device, pairs.device)

    def _copy(self, to: Tensor, to_pages: Pages, source: Tensor, from_pages: Pages) -> None:
        if self._native is None:
            for target, origin in zip(to_pages.tolist(), from_pages.tolist(), strict=True):
                to[target].copy_(source[origin])
            return
        assert len(to_pages) == len(from_pages)
        # Nothing below looks at the numbers again.
        for pages, pool in ((to_pages, to), (from_pages, source)):
            if len(pages) and not 0 <= pages.min() <= pages.max() < len(pool):
                raise IndexError(f"pages {pages.min()} to {pages.max()} of a pool of {len(pool)}")
        self._native(
            to.data_ptr(), _stride(to), to_pages.ctypes.data, source.data_ptr(), _stride(source), from_pages.ctypes.data,
            len(to_pages), self._bytes,
        )  # fmt: skip


def _stride(pages: Tensor) -> int:
    """Bytes from one page to the next."""
    return pages.stride(0) * pages.element_size()


@cache
def library() -> CDLL | None:
    """The compiled loop's library, or None where it cannot be had."""
    try:
        return SOURCES.load()
    except NotCompiled:
        return None


def _copy_pages() -> Any:
    """The compiled loop, or None where it cannot be had."""
    compiled = library()
    if compiled is None:
        return None
    copy_pages = compiled.forebay_copy_pages
    copy_pages.argtypes = [
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
    ]
    copy_pages.restype = None
    return copy_pages
