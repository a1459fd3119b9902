"""One record of the log: a 4 KiB head block, then the value, padded to the next block so that O_DIRECT may be used.

    magic 4s | version u16 | kind u16 | generation u64 | value length u64 | tenant length u16 | key length u16 |
    value CRC32C u32 | head CRC32C u32 | tenant | key | zero to 4096 || value | zero to a multiple of 4096

The head CRC covers everything before it and tenant and key, and goes on from the log's *salt*, a number that only its holder knows:
so a value that holds what looks like records is never read as such, whatever happens to its own head. VALUE holds an object; GRAVES
holds a msgpack list of removals.
"""

import struct
from enum import IntEnum

import msgspec

from forebay.store.crc import crc32c
from forebay.store.wire.messages import Grave

BLOCK_BYTES = 4096
VERSION = 1
MAGIC = b"FBLG"
_HEAD = struct.Struct("<4sHHQQHHI")
_CRC = struct.Struct("<I")
_NAMES_AT = _HEAD.size + _CRC.size


class Kind(IntEnum):
    VALUE = 1
    GRAVES = 2


_VALUE = int(Kind.VALUE)


class RecordError(ValueError):
    """These bytes are no record."""


class Head(msgspec.Struct, frozen=True, gc=False):
    kind: Kind
    generation: int
    value_bytes: int
    value_crc: int
    tenant: str = ""
    key: bytes = b""

    @property
    def record_bytes(self) -> int:
        """Head block and padded value."""
        return BLOCK_BYTES + padded(self.value_bytes)


def padded(count: int) -> int:
    return (count + BLOCK_BYTES - 1) & -BLOCK_BYTES


def pack_head(head: Head, salt: int = 0) -> bytes:
    """The head block without the zeros at its end. Raises ``RecordError`` if it is too large."""
    tenant = head.tenant.encode()
    fixed = _HEAD.pack(
        MAGIC,
        VERSION,
        head.kind,
        head.generation,
        head.value_bytes,
        len(tenant),
        len(head.key),
        head.value_crc,
    )
    names = tenant + head.key
    packed = fixed + _CRC.pack(crc32c(names, crc32c(fixed, salt))) + names
    if len(packed) > BLOCK_BYTES:
        raise RecordError(
            f"tenant and key of {len(names)} bytes; {BLOCK_BYTES - _NAMES_AT} are allowed"
        )
    return packed


def is_head(
    block: memoryview, generation: int, value_bytes: int, value_crc: int, tenant: str, key: bytes
) -> bool:
    """Whether ``block`` begins with the head of this very value. All that the head's own checksum covers is compared, so that adds
    nothing."""
    names = tenant.encode() + key
    fixed = _HEAD.pack(
        MAGIC, VERSION, _VALUE, generation, value_bytes, len(names) - len(key), len(key), value_crc
    )
    return block[: _HEAD.size] == fixed and block[_NAMES_AT : _NAMES_AT + len(names)] == names


def write_head(head: Head, block: memoryview, salt: int = 0) -> None:
    """Fill ``block`` (``BLOCK_BYTES``, writable)."""
    packed = pack_head(head, salt)
    block[: len(packed)] = packed
    block[len(packed) : BLOCK_BYTES] = bytes(BLOCK_BYTES - len(packed))


def read_head(block: memoryview, salt: int = 0) -> Head:
    """Raises ``RecordError`` unless ``block`` is the whole head block of a record of the log with this ``salt``."""
    if len(block) < BLOCK_BYTES:
        raise RecordError("cut off within its head")
    magic, version, kind, generation, value_bytes, tenant_bytes, key_bytes, value_crc = (
        _HEAD.unpack_from(block)
    )
    if magic != MAGIC or version != VERSION:
        raise RecordError(f"magic {magic!r}, version {version}")
    end = _NAMES_AT + tenant_bytes + key_bytes
    (crc,) = _CRC.unpack_from(block, _HEAD.size)
    if end > BLOCK_BYTES or crc32c(block[_NAMES_AT:end], crc32c(block[: _HEAD.size], salt)) != crc:
        raise RecordError("the head's checksum does not match")
    names = bytes(block[_NAMES_AT:end])
    try:
        return Head(
            Kind(kind),
            generation,
            value_bytes,
            value_crc,
            names[:tenant_bytes].decode(),
            names[tenant_bytes:],
        )
    except ValueError as error:
        raise RecordError(str(error)) from error


_graves_encoder = msgspec.msgpack.Encoder()
_graves_decoder = msgspec.msgpack.Decoder(list[Grave])


def encode_graves(graves: list[Grave]) -> bytes:
    return _graves_encoder.encode(graves)


def decode_graves(value: bytes | memoryview) -> list[Grave]:
    """Raises ``RecordError``."""
    try:
        return _graves_decoder.decode(value)
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordError(f"graves: {error}") from error
