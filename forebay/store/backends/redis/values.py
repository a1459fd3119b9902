"""A page as a server's string value.

    name    "forebay:{" hex of the group "}:" key           (a cluster keeps what stands in braces in one slot)
    value   the page's bytes | CRC32C of key and page, 4 bytes LE | "FBV1"

The trailer says that a value is whole, and whose it is: a value that another program wrote under our name, or
that a server gave for another key, is not read as a page. A value is always read and checked whole.
"""

import struct

from forebay.store.client.channel import Bytes
from forebay.store.crc import crc32c

_TRAILER = struct.Struct("<I4s")
_MAGIC = b"FBV1"
TRAILER_BYTES = _TRAILER.size
NAMES = b"forebay:{"


def name_of(group: bytes, key: bytes) -> bytes:
    return NAMES + group.hex().encode() + b"}:" + key


def trailer_of(key: bytes, page: Bytes) -> bytes:
    return _TRAILER.pack(crc32c(page.data, crc32c(key)), _MAGIC)


def is_whole(key: bytes, page: Bytes, trailer: bytes | bytearray) -> bool:
    return bytes(trailer) == trailer_of(key, page)
