"""CRC32C (Castagnoli, RFC 3720), the one checksum of stored bytes."""

import crc32c as _native
from typing_extensions import Buffer

RELEASE_GIL_BYTES = 32 << 10


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC32C of ``data`` going on from ``value``. Releases the GIL for buffers of 32 KiB and more."""
    count = len(data) if type(data) is bytes else memoryview(data).nbytes
    return int(_native.crc32c(data, value, 1 if count >= RELEASE_GIL_BYTES else 0))
