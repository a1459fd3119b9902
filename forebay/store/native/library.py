"""`bytes.c` from Python, and the same in numpy for where there is no compiler. The interpreter lock is released during a copy."""

import ctypes
import struct
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.compiled import NotCompiled, Sources
from forebay.store.crc import crc32c

Bytes = npt.NDArray[np.uint8]
SOURCES = Sources(
    Path(__file__).parent, ("bytes.c", "copying.h"), "the store's copies", trial="forebay_trial"
)
STREAM_FROM_BYTES = (
    8 << 20
)  # what is larger does not stay in caches anyway, and would push out what does
_SLICE = struct.Struct("<qQqqQ")


class Slice(NamedTuple):
    """Of the object at ``offset`` under ``stamp``: from ``start``, as many bytes as ``target`` has."""

    offset: int
    stamp: int
    start: int
    target: Bytes


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return SOURCES.load()
    except NotCompiled:
        return None


@cache
def exchange() -> Any:
    """`forebay_exchange`, or None."""
    library = _library()
    if library is None:
        return None
    library.forebay_exchange.argtypes = [
        c_int,
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
    ]
    library.forebay_exchange.restype = c_int64
    return library.forebay_exchange


@cache
def is_stale() -> Any:
    """`forebay_is_stale`, or None. Called with the interpreter lock: giving it away and getting it back would take longer."""
    library = _library()
    if library is None:
        return None
    stale = ctypes.PyDLL(library._name, handle=library._handle).forebay_is_stale
    stale.argtypes, stale.restype = [c_int], c_int
    return stale


@cache
def _copy_out() -> Any:
    library = _library()
    if library is None:
        return None
    library.forebay_copy_out.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int, c_void_p]
    library.forebay_copy_out.restype = None
    return library.forebay_copy_out


@cache
def _copy_crc32c() -> Any:
    """None without a compiler, and for processors without the instruction."""
    copy = getattr(_library(), "forebay_copy_crc32c", None)
    if copy is not None:
        copy.argtypes = [c_void_p, c_void_p, c_int64, c_uint32, c_int]
        copy.restype = c_uint32
    return copy


def address_of(target: Bytes) -> int:
    """Of an array that may be written. Several times as fast as ``target.ctypes.data``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(target.data))


def copy_slices(segment: int, capacity: int, slices: Sequence[Slice]) -> list[bool] | None:
    """Copy out of the segment at address ``segment``; of each slice, whether its header told before and after the copy that it is what
    is wanted (rule ST2). None: this cannot be done here, and nothing was copied."""
    copy_out = _copy_out()
    if copy_out is None:
        return None
    try:
        packed = b"".join(
            _SLICE.pack(offset, stamp, start, len(target), address_of(target))
            for offset, stamp, start, target in slices
        )
    except struct.error:  # numbers that no holder gives
        return None
    good = bytearray(len(slices))
    total = sum(len(one.target) for one in slices)
    into = (ctypes.c_char * len(good)).from_buffer(good)
    copy_out(segment, capacity, packed, len(slices), total >= STREAM_FROM_BYTES, into)
    return [*map(bool, good)]


def copy_crc32c(target: Bytes, source: Bytes, *, stream: bool = False) -> int:
    """Copy ``source`` to ``target``, equally long and apart from each other; the CRC32C of what is in ``target`` then, whatever others
    do to ``source`` meanwhile. ``stream``: past the caches."""
    assert len(target) == len(source)
    copy = _copy_crc32c()
    if copy is None:
        target[:] = source
        return crc32c(target.data)
    return int(copy(target.ctypes.data, source.ctypes.data, len(source), 0, stream))
