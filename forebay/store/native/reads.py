"""`reads.c` from Python. There is no twin: where it cannot be had, reads go another way (`client/own_reads.py`)."""

import ctypes
import errno
import time
from ctypes import c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from forebay.compiled import NotCompiled, Sources

SOURCES = Sources(
    Path(__file__).parent, ("reads.c", "copying.h"), "the store's reads", trial="forebay_trial"
)
POLL_NS = 100_000  # some time more than a small read of an SSD takes
_IDLE, _PREPARED, _UNDER_WAY, _ENDED = range(4)


class _Read(ctypes.Structure):
    _fields_ = (
        ("context", c_uint64),
        ("into", c_void_p),
        ("at", c_int64),
        ("count", c_int64),
        ("target", c_void_p),
        ("skip", c_int64),
        ("target_bytes", c_int64),
        ("result", c_int64),
        ("fd", c_int32),
        ("state", c_int32),
        ("copied", c_int32),
        ("crc", c_uint32),
    )


@cache
def _library() -> Any:
    """None where there is no compiler, or no such reads."""
    try:
        library = SOURCES.load()
    except NotCompiled:
        return None
    library.forebay_reads_open.argtypes, library.forebay_reads_open.restype = [c_void_p], c_int64
    library.forebay_reads_close.argtypes, library.forebay_reads_close.restype = [c_uint64], None
    library.forebay_read_begin.argtypes, library.forebay_read_begin.restype = [c_void_p], None
    library.forebay_read_end.argtypes, library.forebay_read_end.restype = (
        [c_void_p, c_int64],
        c_int64,
    )
    asking = library.forebay_read_asking
    asking.argtypes, asking.restype = (
        [c_void_p, c_int, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64],
        c_int64,
    )
    locked = library.forebay_read_locked
    locked.argtypes, locked.restype = [c_void_p, c_int, c_int64, c_int64, c_int64], c_int64
    return library


class OneRead:
    """One read at a time into ``size`` bytes at ``address``, which stay for as long as this. Not for two threads at once.

    prepare -> begin, or ask or while_locked (which begin it) -> end; a read that nobody has begun is begun by ``end``.
    """

    def __init__(self, address: int, size: int) -> None:
        """Raises ``OSError`` if there are no such reads here."""
        self._size = size
        self._read = _Read(into=address)
        self._address = ctypes.addressof(self._read)
        if (library := _library()) is None:
            raise OSError(errno.ENOSYS, "no reads that can be begun and taken later")
        self._call = library
        context = c_uint64()
        failed = library.forebay_reads_open(ctypes.byref(context))
        if failed:
            raise OSError(-failed, "no more of such reads")
        self._read.context = context.value

    @property
    def under_way(self) -> bool:
        return bool(self._read.state == _UNDER_WAY)

    def prepare(
        self, fd: int, at: int, count: int, copy_to: int = 0, skip: int = 0, copied: int = 0
    ) -> bool:
        """Of file ``fd``, ``count`` bytes from ``at`` on. ``copied`` of them, from ``skip`` on, also go to address ``copy_to`` if they
        come while ``ask`` or ``while_locked`` waits. False: the read before it never ended."""
        assert 0 < count <= self._size and skip + copied <= count
        if self.under_way and self.end(time.monotonic()) is None and self.under_way:
            return False
        read = self._read
        read.fd, read.at, read.count, read.state = fd, at, count, _PREPARED
        read.target, read.skip, read.target_bytes, read.copied = copy_to, skip, copied, 0
        return True

    def begin(self) -> None:
        """Unless that was done."""
        if self._read.state == _PREPARED:
            self._call.forebay_read_begin(self._address)

    def ask(self, socket: int, frame: bytes, into: int, room: int, sent: Any) -> int | None:
        """Begin, and what `library.exchange` does. None: it was begun already, and nothing was done."""
        if self._read.state != _PREPARED:
            return None
        return int(
            self._call.forebay_read_asking(
                self._address, socket, frame, len(frame), into, room, sent, POLL_NS
            )
        )

    def while_locked(self, lock: int, mark: int, deadline: float) -> int | None:
        """Begin, and what ``end`` does; None also, and at once, if byte ``mark`` of file ``lock`` is not locked by somebody else."""
        if self._read.state != _PREPARED:
            return None
        wait_ns = max(0, int((deadline - time.monotonic()) * 1e9))
        if self._call.forebay_read_locked(self._address, lock, mark, POLL_NS, wait_ns):
            return None
        return self._read.result if self._read.result >= 0 else None

    def end(self, deadline: float) -> int | None:
        """How many bytes were read. None: it failed, or has not ended by ``deadline`` and is still under way."""
        self.begin()
        read = self._read
        while read.state == _UNDER_WAY:
            wait_ns = max(0, int((deadline - time.monotonic()) * 1e9))
            if self._call.forebay_read_end(self._address, wait_ns) not in (0, -errno.EINTR):
                return None
        return read.result if read.state == _ENDED and read.result >= 0 else None

    def copied_crc(self) -> int | None:
        """CRC32C of what has been copied to ``copy_to``; None: nothing was."""
        return self._read.crc if self._read.copied else None

    def __del__(self) -> None:
        """One that is under way is left to the kernel, which would make us wait for it."""
        if self._read.context and not self.under_way:
            self._call.forebay_reads_close(self._read.context)
