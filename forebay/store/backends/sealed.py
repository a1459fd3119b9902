"""A page as a value of a store that is not ours: the page's bytes, then a trailer that says whose it is and that it is whole.

    page | CRC32C of the page, LE | CRC32C of the key, LE | "FBV1"

A value that another program wrote under our name, or that a store gave for another key, is not read as a page. So a
value is always read whole and checked, also where only a part of it is wanted.
"""

import struct

from forebay.store.crc import crc32c

_TRAILER = struct.Struct("<II4s")
_MAGIC = b"FBV1"
TRAILER_BYTES = _TRAILER.size


def trailer_of(key: bytes, page_crc: int) -> bytes:
    """Of a page with the checksum ``page_crc`` under ``key``."""
    return _TRAILER.pack(page_crc, crc32c(key), _MAGIC)


def is_whole(key: bytes, page_crc: int, trailer: bytes | bytearray) -> bool:
    return bytes(trailer) == trailer_of(key, page_crc)
