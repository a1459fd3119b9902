"""`reads.c` from Python. There is no twin: where it cannot be had, reads go another way (`client/own_reads.py`)."""

import ctypes
import errno
import time
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from forebay.compiled import NotCompiled, Sources

SOURCES = Sources(Path(__file__).parent, ("reads.c",))


@cache
def _library() -> Any:
    """None where there is no compiler, or no such reads."""
    try:
        library = SOURCES.load()
    except NotCompiled:
        return None
    library.forebay_reads_open.argtypes = [c_void_p]
    library.forebay_reads_close.argtypes, library.forebay_reads_close.restype = [c_uint64], None
    library.forebay_read_begin.argtypes = [c_uint64, c_int, c_void_p, c_int64, c_int64]
    library.forebay_read_end.argtypes = [c_uint64, c_int64, c_void_p]
    for function in (library.forebay_reads_open, library.forebay_read_begin, library.forebay_read_end):
        function.restype = c_int64
    return library


class OneRead:
    """One read at a time into ``size`` bytes at ``address``, which stay for as long as this. Not for two threads at once."""

    def __init__(self, address: int, size: int) -> None:
        """Raises ``OSError`` if there are no such reads here."""
        self._address, self._size = address, size
        self._context = 0
        self.under_way = False
        if (library := _library()) is None:
            raise OSError(errno.ENOSYS, "no reads that can be begun and taken later")
        self._call = library
        context = c_uint64()
        failed = library.forebay_reads_open(ctypes.byref(context))
        if failed:
            raise OSError(-failed, "no more of such reads")
        self._context = context.value

    def begin(self, fd: int, at: int, count: int) -> bool:
        """False: the kernel does not take it, or the read before it never ended."""
        assert 0 < count <= self._size
        if self.under_way and self.end(time.monotonic()) is None and self.under_way:
            return False
        self.under_way = not self._call.forebay_read_begin(self._context, fd, self._address, count, at)
        return self.under_way

    def end(self, deadline: float) -> int | None:
        """How many bytes were read. None: it failed, or has not ended by ``deadline`` and is still under way."""
        result = c_int64()
        while True:
            wait_ns = max(0, int((deadline - time.monotonic()) * 1e9))
            ended = self._call.forebay_read_end(self._context, wait_ns, ctypes.byref(result))
            if ended != -errno.EINTR:
                break
        if ended:
            return None
        self.under_way = False
        return result.value if result.value >= 0 else None

    def __del__(self) -> None:
        """One that is under way is left to the kernel, which would make us wait for it."""
        if self._context and not self.under_way:
            self._call.forebay_reads_close(self._context)
