"""Where records of the log lie, for clients on the holder's machine, which then read small values from the disk themselves.

    memfd, shared read-only:  | slot | slot | ...       slot: name u32 | file u32 | first block u32 | blocks u32 (0: empty)

A slot is found by the CRC32C of tenant and key, and tells of keys that are on SSD and not in this holder's memory. It is a hint and
nothing more: another key may have taken the slot, the file may be gone, and it may be read while it is written. What settles
everything is the record itself, whose head names tenant, key and generation, and whose checksums cover all of it.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from forebay.store.crc import crc32c
from forebay.store.holder.log.index import Record
from forebay.store.holder.log.record import BLOCK_BYTES, padded
from forebay.store.holder.mapping import sealed_bytes
from forebay.store.wire.messages import Touched

MIN_SLOTS = 1 << 10
MAX_SLOTS = 1 << 20
TELL_AFTER = 64
LARGEST_BYTES = 2 << 20  # of a whole record; the holder reads larger ones quicker, several pieces at a time
_SLOT = struct.Struct("<IIII")
_F_SEAL_FUTURE_WRITE = 0x10  # whoever gets the descriptor later can only read


class Hint(msgspec.Struct, frozen=True, gc=False):
    """A record of ``blocks`` blocks, its head included, from block ``first`` of log file ``file`` on."""

    file: int
    first: int
    blocks: int


class LogHints:
    """The holder's side of a log in ``directory``. Raises ``OSError``."""

    def __init__(self, directory: Path, capacity: int) -> None:
        wanted = capacity // (2 * BLOCK_BYTES)  # as many as there can be records
        self._slots = 1 << max(MIN_SLOTS, min(MAX_SLOTS, wanted)).bit_length() - 1
        self._fd = os.memfd_create("forebay-log-hints", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._directory = -1
        try:
            os.ftruncate(self._fd, self._slots * _SLOT.size)
            self._table = mmap.mmap(self._fd, self._slots * _SLOT.size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, int]:
        """What a client needs: the table, and the directory, whose files it opens with rights of its own."""
        return self._fd, self._directory

    def show(self, tenant: str, key: bytes, record: Record) -> None:
        name = _name(tenant, key)
        blocks = 1 + padded(record.length) // BLOCK_BYTES
        if blocks * BLOCK_BYTES <= LARGEST_BYTES and record.file < 1 << 32 and record.position // BLOCK_BYTES < 1 << 32:
            _SLOT.pack_into(self._table, self._place(name), name, record.file, record.position // BLOCK_BYTES, blocks)

    def hide(self, tenant: str, key: bytes) -> None:
        if self.shows(tenant, key):
            _SLOT.pack_into(self._table, self._place(_name(tenant, key)), 0, 0, 0, 0)

    def shows(self, tenant: str, key: bytes) -> bool:
        return _look_up(self._table, self._slots, _name(tenant, key)) is not None

    def close(self) -> None:
        for fd in (self._fd, self._directory):
            if fd >= 0:
                os.close(fd)
        self._fd = self._directory = -1

    def _place(self, name: int) -> int:
        return (name & self._slots - 1) * _SLOT.size


class OpenFile:
    """A log file that is open for reading; closed when its last user lets go of it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class LogView:
    """A client's side. Takes the ``descriptors`` over; all goes when the last user of this does. For any thread."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        """Raises ``OSError`` or ``ValueError`` for what is no table."""
        table, directory = descriptors
        try:
            size = sealed_bytes(table)
            if size < _SLOT.size:
                raise ValueError(f"a table of {size} bytes")
            self._slots = size // _SLOT.size
            self._table = mmap.mmap(table, size, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            os.close(directory)
            raise
        finally:
            os.close(table)
        self._directory = OpenFile(directory)
        self._files: dict[int, OpenFile] = {}
        self._untold: list[tuple[bytes, int]] = []
        self._untold_bytes = 0
        self._lock = threading.Lock()
        self.reads = 0
        """Values that were read this way."""

    def find(self, tenant: str, key: bytes) -> Hint | None:
        return _look_up(self._table, self._slots, _name(tenant, key))

    def file(self, number: int) -> OpenFile | None:
        """None if it is gone, or may not be read past the page cache by us. As many are kept open as the log has, and one more."""
        known = self._files.get(number)
        if known is not None:
            return known
        with contextlib.suppress(OSError):
            flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
            opened = OpenFile(os.open(f"{number:010d}.log", flags, dir_fd=self._directory.fd))
            with self._lock:
                self._files = {each: file for each, file in self._files.items() if os.fstat(file.fd).st_nlink}  # the log has them still
                self._files[number] = opened
            return opened
        return None

    def note(self, key: bytes, generation: int, count: int) -> None:
        """This record was read, ``count`` bytes of it: the holder, by whose reads files go, is to be told."""
        with self._lock:
            self.reads += 1
            self._untold.append((key, generation))
            self._untold_bytes += count

    def has_to_tell(self) -> bool:
        """Whether ``to_tell`` has something."""
        return len(self._untold) >= TELL_AFTER

    def to_tell(self) -> Touched | None:
        """What the holder has not been told, if that is worth a message."""
        if not self.has_to_tell():
            return None
        with self._lock:
            told = Touched(self._untold, self._untold_bytes)
            self._untold, self._untold_bytes = [], 0
        return told

    def forget(self, number: int) -> None:
        """What was read there was not what it was taken for."""
        with self._lock:
            self._files.pop(number, None)


def _name(tenant: str, key: bytes) -> int:
    return crc32c(tenant.encode() + b"\0" + key)


def _look_up(table: mmap.mmap, slots: int, name: int) -> Hint | None:
    found, file, first, blocks = _SLOT.unpack_from(table, (name & slots - 1) * _SLOT.size)
    return Hint(file, first, blocks) if blocks and found == name else None
