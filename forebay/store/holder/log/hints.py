"""Where records of the log lie, for clients on the holder's machine, which then read small values from the disk themselves.

    memfd, shared read-only:  | word u64 | mark u64 | zero to 32 bytes | slot | slot | ...
    slot:    name u32 | file u32 | first block u32 | blocks u32 (0: empty) | generation u64 | CRC32C of all this u32 | zero u32

A slot is found by the CRC32C of tenant and key, and tells of keys that are on SSD and not in this holder's memory. It is a hint and
nothing more: another key may have taken the slot, the file may be gone, and it may be read while it is written. What settles
everything is the record itself, whose head names tenant, key and generation, and whose checksums cover all of it.

**While ``word`` is not 0, the holder gives it**: what a slot shows is then what the master has of the key, and nobody need be asked.
A holder gives its word only beside its master in one process (`node.Holder`), which says what it may show, and tells it of every
removal before anybody else; and it is worth something only while that process lives, which holds a lock on byte ``mark`` of the file
"lock" (`files.Lock`). The kernel lets go of that lock no later than of the one on the directory, without which no other holder, and
so no other removal, can follow. So a reader that finds in this order: the word given, a slot, the same word again, the lock still
held, knows that when it read the slot the key held that generation. A word that is taken back and given again is another one.
"""

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
LARGEST_BYTES = (
    2 << 20
)  # of a whole record; the holder reads larger ones quicker, several pieces at a time
_HEADER = struct.Struct("<QQ16x")
_WORD = struct.Struct("<Q")
_SHOWN = struct.Struct("<IIIIQ")
_SLOT = struct.Struct("<IIIIQII")
_NOTHING = bytes(_SLOT.size)
_F_SEAL_FUTURE_WRITE = 0x10  # whoever gets the descriptor later can only read


class Hint(msgspec.Struct, frozen=True, gc=False):
    """A record of ``blocks`` blocks, its head included, from block ``first`` of log file ``file`` on. ``word``: the holder's, that this
    is what the key holds; 0: it does not give it."""

    file: int
    first: int
    blocks: int
    generation: int
    word: int


class LogHints:
    """The holder's side of a log in ``directory``, whose lock has ``mark`` (0: it has none, and no word can be given). Not for two
    threads at once, but for ``vouch``. Raises ``OSError``."""

    def __init__(self, directory: Path, capacity: int, mark: int = 0) -> None:
        wanted = capacity // (2 * BLOCK_BYTES)  # as many as there can be records
        self._slots = 1 << max(MIN_SLOTS, min(MAX_SLOTS, wanted)).bit_length() - 1
        self._fd = os.memfd_create("forebay-log-hints", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._directory = -1
        self._mark = mark
        self._words = 0
        try:
            size = _HEADER.size + self._slots * _SLOT.size
            os.ftruncate(self._fd, size)
            self._table = mmap.mmap(self._fd, size)
            _HEADER.pack_into(self._table, 0, 0, mark)
            fcntl.fcntl(
                self._fd,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL,
            )
            self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, int]:
        """What a client needs: the table, and the directory, whose files it opens with rights of its own."""
        return self._fd, self._directory

    def vouch(self, whether: bool) -> None:
        """Give the word, or take it back, from now on."""
        if whether != self.vouches and (self._mark or not whether):
            self._words += 1
            _WORD.pack_into(self._table, 0, self._words if whether else 0)

    @property
    def vouches(self) -> bool:
        return bool(_WORD.unpack_from(self._table)[0])

    def show(self, tenant: str, key: bytes, record: Record) -> None:
        name = _name(tenant, key)
        blocks = 1 + padded(record.length) // BLOCK_BYTES
        if (
            blocks * BLOCK_BYTES <= LARGEST_BYTES
            and record.file < 1 << 32
            and record.position // BLOCK_BYTES < 1 << 32
        ):
            shown = _SHOWN.pack(
                name, record.file, record.position // BLOCK_BYTES, blocks, record.generation
            )
            _SLOT.pack_into(self._table, self._place(name), *_SHOWN.unpack(shown), crc32c(shown), 0)
        else:
            self.hide(tenant, key)

    def hide(self, tenant: str, key: bytes) -> None:
        """Whatever is shown under the name of ``key``."""
        name = _name(tenant, key)
        place = self._place(name)
        if _SLOT.unpack_from(self._table, place)[0] == name:
            self._table[place : place + _SLOT.size] = _NOTHING

    def shows(self, tenant: str, key: bytes, record: Record) -> bool:
        """Whether it is this very record that is shown."""
        found = _look_up(self._table, self._slots, _name(tenant, key))
        at = (record.file, record.position // BLOCK_BYTES, record.generation)
        return found is not None and (found.file, found.first, found.generation) == at

    def close(self) -> None:
        for fd in (self._fd, self._directory):
            if fd >= 0:
                os.close(fd)
        self._fd = self._directory = -1

    def _place(self, name: int) -> int:
        return _HEADER.size + (name & self._slots - 1) * _SLOT.size


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
            self._slots = (size - _HEADER.size) // _SLOT.size
            if self._slots < 1 or self._slots & self._slots - 1:
                raise ValueError(f"a table of {size} bytes")
            self._table = mmap.mmap(table, size, prot=mmap.PROT_READ)
            _, self.mark = _HEADER.unpack_from(self._table)
        except (OSError, ValueError):
            os.close(directory)
            raise
        finally:
            os.close(table)
        self._directory = OpenFile(directory)
        self.lock = self._open("lock", os.O_RDONLY) if self.mark else None
        """The file whose byte ``mark`` is locked while the holder's process lives."""
        self._files: dict[int, OpenFile] = {}
        self._untold: list[tuple[bytes, int]] = []
        self._untold_bytes = self._untold_unasked = self._untold_unasked_bytes = 0
        self._lock = threading.Lock()
        self.reads = 0
        """Values that were read this way."""
        self.unasked = 0
        """Of these, without the master's word."""

    def find(self, tenant: str, key: bytes) -> Hint | None:
        return _look_up(self._table, self._slots, _name(tenant, key))

    def file(self, number: int) -> OpenFile | None:
        """None if it is gone, or may not be read past the page cache by us. As many are kept open as the log has, and one more."""
        known = self._files.get(number)
        if known is not None:
            return known
        opened = self._open(f"{number:010d}.log", os.O_RDONLY | os.O_DIRECT)
        if opened is not None:
            with self._lock:
                linked = {
                    each: file for each, file in self._files.items() if os.fstat(file.fd).st_nlink
                }  # the log has them still
                self._files = linked | {number: opened}
        return opened

    def _open(self, name: str, flags: int) -> OpenFile | None:
        try:
            return OpenFile(os.open(name, flags | os.O_CLOEXEC, dir_fd=self._directory.fd))
        except OSError:
            return None

    def note(self, key: bytes, generation: int, count: int, *, unasked: bool = False) -> None:
        """This record was read, ``count`` bytes of it: the holder, by whose reads files go, is to be told. ``unasked``: and the master
        does not know either."""
        with self._lock:
            self.reads += 1
            if unasked:
                self.unasked += 1
                self._untold_unasked += 1
                self._untold_unasked_bytes += count
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
            told = Touched(
                self._untold, self._untold_bytes, self._untold_unasked, self._untold_unasked_bytes
            )
            self._untold, self._untold_bytes, self._untold_unasked, self._untold_unasked_bytes = (
                [],
                0,
                0,
                0,
            )
        return told

    def forget(self, number: int) -> None:
        """What was read there was not what it was taken for."""
        with self._lock:
            self._files.pop(number, None)


def _name(tenant: str, key: bytes) -> int:
    return crc32c(tenant.encode() + b"\0" + key)


def _look_up(table: mmap.mmap, slots: int, name: int) -> Hint | None:
    """With the word as it was before the slot was read, and after it."""
    (word,) = _WORD.unpack_from(table)
    place = _HEADER.size + (name & slots - 1) * _SLOT.size
    slot = table[place : place + _SLOT.size]
    found, file, first, blocks, generation, check, _ = _SLOT.unpack(slot)
    if not blocks or found != name or crc32c(slot[: _SHOWN.size]) != check:
        return None
    (again,) = _WORD.unpack_from(table)
    return Hint(file, first, blocks, generation, word if word == again else 0)
