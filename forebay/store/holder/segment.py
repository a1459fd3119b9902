"""One memfd of DRAM, written by its holder alone and mapped read-only by clients on the same machine (rule ST2).

    offset: | stamp u64 | length u64 | state u32 | zero to 64 bytes | data ... |

A reader looks at the header, copies, and looks again: only if it was LIVE under the expected stamp both times are its bytes good. So
the holder sets RETIRED before the first byte of a range is reused, and LIVE after the last one is written. Nothing is named in
/dev/shm: with the last process that maps it, the memory is gone.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from forebay import machine
from forebay.store.backend import Status
from forebay.store.holder.mapping import Mapping, Toucher, sealed_bytes
from forebay.store.master.extents import ALIGN_BYTES, footprint
from forebay.store.native.library import Slice, copy_slices

HEADER_BYTES = 64
_HEADER = struct.Struct("<QQI")
_STATE = struct.Struct("<I")
_STATE_AT = 16
_F_SEAL_FUTURE_WRITE = 0x10  # whoever gets the descriptor later can only read


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


class Segment:
    """``capacity`` bytes, really allocated. Close it when no view of it is in use any more."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity & -ALIGN_BYTES
        available = machine.memory().available
        if capacity > available:  # allocating would go on until the kernel kills someone
            raise SegmentError(
                f"{capacity} bytes of DRAM are asked for, {available} are available; give a smaller --dram"
            )
        self.fd = os.memfd_create("forebay-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, self.capacity)
        except OSError as error:
            os.close(self.fd)
            raise SegmentError(
                f"{capacity} bytes of DRAM are not to be had: {error.strerror}; give a smaller --dram"
            ) from error
        self._mapping = Mapping(self.fd, self.capacity, writable=True)
        fcntl.fcntl(
            self.fd,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL,
        )
        self.view = self._mapping.view
        self._toucher = Toucher(self._mapping, gather=True)

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
        return (
            offset >= 0
            and offset % ALIGN_BYTES == 0
            and offset + footprint(length, HEADER_BYTES) <= self.capacity
        )

    def close(self) -> None:
        self._toucher.stop()
        self._mapping.close()
        os.close(self.fd)


class MappedSegment:
    """A client's read-only view of a holder's segment. Takes the descriptor over."""

    def __init__(self, fd: int, capacity: int) -> None:
        """Raises ``OSError``."""
        try:
            if not 0 < capacity <= sealed_bytes(fd):
                raise OSError(
                    errno.EINVAL, f"a segment of {capacity} bytes is larger than its memory"
                )
            self._mapping = Mapping(fd, capacity, writable=False)
        finally:
            os.close(fd)
        self.capacity = capacity
        self._bytes = np.frombuffer(self._mapping.view, dtype=np.uint8)
        self._toucher = Toucher(self._mapping, gather=False)

    def copy_out(self, slices: Sequence[Slice]) -> list[Status]:
        """Copy each slice to its target; the GIL is released meanwhile.

        NOT_FOUND: the memory holds something else now, or did by the end of the copy (the target's bytes are then undefined).
        """
        good = copy_slices(self._mapping.address, self.capacity, slices)
        if good is None:
            good = [self._copy_one(*one) for one in slices]
        return [Status.OK if fine else Status.NOT_FOUND for fine in good]

    def _copy_one(self, offset: int, stamp: int, start: int, target: npt.NDArray[np.uint8]) -> bool:
        begin, count = offset + HEADER_BYTES + start, len(target)
        if (
            offset < 0
            or start < 0
            or begin + count > self.capacity
            or not self._is(offset, stamp, start + count)
        ):
            return False
        np.copyto(target, self._bytes[begin : begin + count])
        return self._is(offset, stamp, start + count)

    def _is(self, offset: int, stamp: int, at_least: int) -> bool:
        found, length, state = _HEADER.unpack_from(self._mapping.view, offset)
        return bool(found == stamp and state == HeaderState.LIVE and length >= at_least)

    def close(self) -> None:
        """The mapping goes when its last user does."""
        self._toucher.stop()
