"""A memfd mapped where its 2 MiB blocks can be huge pages, which are read and written a third faster (docs/LOG.md).

    reserved: |....|  2 MiB aligned: the memfd's bytes  |....|      unmapped all at once

The kernel gives a memfd small pages unless its administrator says otherwise, but gathers them into a huge one when asked to
(madvise(2), MADV_COLLAPSE, Linux 6.1); where it does not, small pages do.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from typing import Any

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_CHUNK_BYTES = 64 << 20
_MAP_FAILED = ctypes.c_void_p(-1).value


def sealed_bytes(fd: int) -> int:
    """The size of a memfd that its owner can no longer shrink under us, which would be a SIGBUS. Raises ``OSError``."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError(errno.EPERM, "memory that is handed over must be sealed against shrinking")
    return os.fstat(fd).st_size


class Mapping:
    """``size`` bytes of ``fd``, which may be closed afterwards. ``view`` is read-only unless ``writable``. Raises ``OSError``."""

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._reserved = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags, protection)
        base = np.frombuffer(self._reserved, dtype=np.uint8).ctypes.data
        start = -base % HUGE_PAGE_BYTES
        self.address = base + start
        libc = _libc()
        if (
            libc.mmap(self.address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
            == _MAP_FAILED
        ):
            error = ctypes.get_errno()
            self._reserved.close()
            raise OSError(error, os.strerror(error))
        self.size = size
        self.writable = writable
        self.view = memoryview(self._reserved)[start : start + size]

    def close(self) -> None:
        """Raises ``BufferError`` while a view of it is in use; the mapping then goes with the last of them."""
        self.view.release()
        self._reserved.close()


class Staging:
    """A client's memory, for what is handed over through it. What the disk writes to is gathered into huge pages first, block by block
    as they are used: into small ones it writes at half the speed."""

    def __init__(self, fd: int, size: int) -> None:
        """Raises ``OSError``."""
        self._mapping = Mapping(fd, size, writable=True)
        self._lock = threading.Lock()
        self._huge: dict[int, bool] = {}  # by block: whether it was gathered
        self.view = self._mapping.view

    def is_fast(self, at: int, count: int) -> bool:
        """Whether the disk had better write ``count`` bytes at ``at`` itself: they begin a page and lie in huge ones."""
        if at % mmap.PAGESIZE or not 0 <= at <= at + count <= len(self.view):
            return False
        with self._lock:
            return all(
                self._gathered(block)
                for block in range(at // HUGE_PAGE_BYTES, -(-(at + count) // HUGE_PAGE_BYTES))
            )

    def _gathered(self, block: int) -> bool:
        known = self._huge.get(block)
        if known is None:
            start = block * HUGE_PAGE_BYTES
            _ = self.view[start]  # only what has a page at all can be gathered
            whole = start + HUGE_PAGE_BYTES <= len(self.view)
            advised = whole and not _libc().madvise(
                self._mapping.address + start, HUGE_PAGE_BYTES, _MADV_COLLAPSE
            )
            known = self._huge[block] = bool(advised)
        return known


class Toucher:
    """Maps all pages in the background, so that first copies meet no page faults. ``gather``: into huge pages, for everyone who maps
    the memory. Old kernels do neither; then faults do it, page by page."""

    def __init__(self, mapping: Mapping, *, gather: bool) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(mapping, gather), name="segment-populate", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self, mapping: Mapping, gather: bool) -> None:
        libc = _libc()
        touch = _MADV_POPULATE_WRITE if mapping.writable else _MADV_POPULATE_READ
        for start in range(0, mapping.size, _CHUNK_BYTES):
            count = min(_CHUNK_BYTES, mapping.size - start)
            if self._stopped.is_set() or libc.madvise(mapping.address + start, count, touch):
                return
            if gather:
                self._gather(libc, mapping.address + start, count)

    def _gather(self, libc: Any, address: int, size: int) -> None:
        """Block by block, as other threads wait for the address space meanwhile; one that is in use by the disk stays as it is."""
        for start in range(0, size & -HUGE_PAGE_BYTES, HUGE_PAGE_BYTES):
            if self._stopped.is_set():
                return
            libc.madvise(address + start, HUGE_PAGE_BYTES, _MADV_COLLAPSE)


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
