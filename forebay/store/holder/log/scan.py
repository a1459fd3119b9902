"""A log file from its front, as far as it can be believed: used when a holder starts, and by fsck.

A record whose head is damaged or cannot be read is skipped block by block; one that ends beyond the file is the torn tail of a
write that was cut off. Values are not read here (a start would take as long as reading the whole log): a read checks its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.store.crc import crc32c
from forebay.store.holder.log.files import Files, aligned_buffer
from forebay.store.holder.log.record import (
    BLOCK_BYTES,
    Head,
    Kind,
    RecordError,
    decode_graves,
    padded,
    read_head,
)
from forebay.store.wire.messages import Grave

MAX_UNREADABLE = 256  # blocks of one file, each of which may take the disk seconds: then the rest of it is left alone


class CutOff(RecordError):
    """A good head, and a value that ends beyond the file."""


@dataclass(frozen=True, slots=True)
class Found:
    position: int
    head: Head
    graves: list[Grave]


@dataclass(frozen=True, slots=True)
class Damage:
    """``bytes`` from ``position`` that are no good record; ``tail``: nothing good comes after."""

    position: int
    bytes: int
    why: str
    tail: bool


def scan(files: Files, fd: int, salt: int = 0) -> Iterator[Found | Damage]:
    """Raises ``OSError`` if the file has no size. What cannot be read is never a tail: it may be readable next time."""
    size = files.size(fd)
    block = aligned_buffer(BLOCK_BYTES)
    position, bad_from, why, unreadable = 0, -1, "", 0
    while position < size and unreadable < MAX_UNREADABLE:
        try:
            found = _record_at(files, fd, block, position, size, salt)
        except (RecordError, OSError) as error:
            if (
                isinstance(error, CutOff) and bad_from < 0
            ):  # what follows is of its value, and may look like records
                yield Damage(position, size - position, str(error), tail=True)
                return
            bad_from, why = (position, str(error)) if bad_from < 0 else (bad_from, why)
            unreadable += isinstance(error, OSError)
            position += BLOCK_BYTES
            continue
        if bad_from >= 0:
            yield Damage(bad_from, position - bad_from, why, tail=False)
            bad_from = -1
        yield found
        position += found.head.record_bytes
    if bad_from >= 0:
        yield Damage(bad_from, size - bad_from, why, tail=not unreadable)


def value_is_good(files: Files, fd: int, found: Found) -> bool:
    """Read a whole value and check its CRC32C."""
    buffer = aligned_buffer(padded(found.head.value_bytes))
    try:
        count = files.read(
            fd, buffer[: padded(found.head.value_bytes)], found.position + BLOCK_BYTES
        )
    except OSError:
        return False
    length = found.head.value_bytes
    return count >= length and crc32c(buffer[:length]) == found.head.value_crc


def _record_at(
    files: Files, fd: int, block: memoryview, position: int, size: int, salt: int
) -> Found:
    head = read_head(block[: files.read(fd, block, position)], salt)
    if position + head.record_bytes > size:
        raise CutOff("cut off within its value")
    if head.kind is Kind.VALUE:
        return Found(position, head, [])
    buffer = aligned_buffer(head.value_bytes)
    files.read(fd, buffer[: padded(head.value_bytes)], position + BLOCK_BYTES)
    value = buffer[: head.value_bytes]
    if crc32c(value) != head.value_crc:
        raise RecordError("graves: the checksum does not match")
    return Found(position, head, decode_graves(value))
