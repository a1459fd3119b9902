"""One memfd of DRAM, written by its holder alone and mapped read-only by clients on the same machine (rule S2).

    offset: | stamp u64 | length u64 | state u32 | zero to 64 bytes | data ... |

A reader looks at the header, copies, and looks again: only if it was LIVE under the expected stamp both times are its bytes good. So
the holder sets RETIRED before the first byte of a range is reused, and LIVE after the last one is written. Nothing is named in
/dev/shm: with the last process that maps it, the memory is gone.
"""

import ctypes
import fcntl
import mmap
import os
import struct
import threading
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from forebay.store.backend import Status
from forebay.store.master.extents import ALIGN_BYTES, footprint

HEADER_BYTES = 64
_HEADER = struct.Struct("<QQI")
_STATE = struct.Struct("<I")
_STATE_AT = 16
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_F_SEAL_FUTURE_WRITE = 0x10  # whoever gets the descriptor later can only read
_POPULATE_BYTES = 64 << 20


class HeaderState(IntEnum):
    EMPTY = 0
    WRITING = 1
    LIVE = 2
    RETIRED = 3


class SegmentError(Exception):
    """The segment could not be made; one line that says why."""


def as_bytes(buffer: Buffer) -> npt.NDArray[np.uint8]:
    """A flat uint8 view of any contiguous buffer. Raises ``TypeError`` or ``ValueError`` for what is not one."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    return np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, np.uint8)


class Toucher:
    """Maps all pages in the background, so that first copies meet no page faults. Old kernels cannot; then faults do it."""

    def __init__(self, mapped: mmap.mmap, size: int, advice: int) -> None:
        self._stopped = threading.Event()
        base = np.frombuffer(mapped, dtype=np.uint8)
        self._thread = threading.Thread(target=self._run, args=(base, size, advice), name="segment-populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self, base: npt.NDArray[np.uint8], size: int, advice: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address = base.ctypes.data
        for start in range(0, size, _POPULATE_BYTES):
            count = min(_POPULATE_BYTES, size - start)
            if self._stopped.is_set() or libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(count), advice):
                return


class Segment:
    """``capacity`` bytes, really allocated. Close it when no view of it is in use any more."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity & -ALIGN_BYTES
        self.fd = os.memfd_create("forebay-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, self.capacity)
        except OSError as error:
            os.close(self.fd)
            raise SegmentError(f"{capacity} bytes of DRAM are not to be had: {error.strerror}; give a smaller --dram") from error
        self._map = mmap.mmap(self.fd, self.capacity)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self.view = memoryview(self._map)
        self._toucher = Toucher(self._map, self.capacity, _MADV_POPULATE_WRITE)

    def begin(self, offset: int, stamp: int, length: int) -> None:
        """A write starts: no reader may take what is here for anything."""
        _STATE.pack_into(self.view, offset + _STATE_AT, HeaderState.WRITING)
        _HEADER.pack_into(self.view, offset, stamp, length, HeaderState.WRITING)

    def publish(self, offset: int) -> None:
        """All bytes are written."""
        _STATE.pack_into(self.view, offset + _STATE_AT, HeaderState.LIVE)

    def retire(self, offset: int) -> None:
        """The range is about to be reused."""
        _STATE.pack_into(self.view, offset + _STATE_AT, HeaderState.RETIRED)

    def data(self, offset: int, length: int, start: int = 0) -> memoryview:
        """The bytes of the object at ``offset``, from ``start``."""
        begin = offset + HEADER_BYTES + start
        return self.view[begin : begin + length]

    def fits(self, offset: int, length: int) -> bool:
        return offset >= 0 and offset % ALIGN_BYTES == 0 and offset + footprint(length, HEADER_BYTES) <= self.capacity

    def close(self) -> None:
        self._toucher.stop()
        self.view.release()
        self._map.close()
        os.close(self.fd)


class MappedSegment:
    """A client's read-only view of a holder's segment. Takes the descriptor over."""

    def __init__(self, fd: int, capacity: int) -> None:
        try:
            self._map = mmap.mmap(fd, capacity, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.capacity = capacity
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._toucher = Toucher(self._map, capacity, _MADV_POPULATE_READ)

    def copy_out(self, offset: int, stamp: int, start: int, target: npt.NDArray[np.uint8]) -> Status:
        """Copy from ``start`` of the object at ``offset`` until ``target`` is full; the GIL is released meanwhile.

        NOT_FOUND: the memory holds something else now, or did by the end of the copy (the target's bytes are then undefined).
        """
        begin, count = offset + HEADER_BYTES + start, len(target)
        if offset < 0 or begin + count > self.capacity or not self._is(offset, stamp, start + count):
            return Status.NOT_FOUND
        np.copyto(target, self._bytes[begin : begin + count])
        return Status.OK if self._is(offset, stamp, start + count) else Status.NOT_FOUND

    def _is(self, offset: int, stamp: int, at_least: int) -> bool:
        found, length, state = _HEADER.unpack_from(self._map, offset)
        return bool(found == stamp and state == HeaderState.LIVE and length >= at_least)

    def close(self) -> None:
        """The mapping goes when its last user does."""
        self._toucher.stop()
