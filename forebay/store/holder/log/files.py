"""The file system as the log sees it: a few calls, so that tests can make each of them fail (ENOSPC, EIO, a flipped bit).

O_DIRECT where the file system has it: what the log writes is read back seldom and by its own cache (DRAM), so the page cache would
only hold it twice.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets as random_bits
import struct
from pathlib import Path
from typing import Protocol

import numpy as np

BUFFER_ALIGN = 4096
HUGE_PAGE_BYTES = 2 << 20
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, owner
_NAME = re.compile(r"(\d{10})\.log")


class Files(Protocol):
    """One directory. All raise ``OSError``."""

    def numbers(self) -> list[int]:
        """Of the log files there, ascending."""
        ...

    def create(self, number: int) -> int: ...
    def open(self, number: int) -> int: ...
    def size(self, fd: int) -> int: ...
    def write(self, fd: int, data: memoryview, at: int) -> None:
        """All of ``data`` (aligned in memory, length and position), or an error."""
        ...

    def read(self, fd: int, into: memoryview, at: int) -> int:
        """Fill ``into`` as far as the file goes; the count."""
        ...

    def truncate(self, fd: int, size: int) -> None: ...
    def sync(self, fd: int) -> None: ...
    def sync_directory(self) -> None: ...
    def unlink(self, number: int) -> None: ...
    def close(self, fd: int) -> None: ...


class Directory:
    """A real directory, made if need be. ``direct``: whether O_DIRECT is in use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.direct = self._can_be_direct()

    def numbers(self) -> list[int]:
        return sorted(
            int(match[1]) for entry in os.listdir(self.path) if (match := _NAME.fullmatch(entry))
        )

    def file(self, number: int) -> Path:
        return self.path / f"{number:010d}.log"

    def create(self, number: int) -> int:
        return os.open(
            self.file(number),
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._flag(),
            0o600,
        )

    def open(self, number: int) -> int:
        return os.open(self.file(number), os.O_RDWR | os.O_CLOEXEC | self._flag())

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def write(self, fd: int, data: memoryview, at: int) -> None:
        done = 0
        while done < len(data):
            count = os.pwrite(fd, data[done:], at + done)
            if count == 0:
                raise OSError(errno.EIO, "a write of 0 bytes")
            done += count

    def read(self, fd: int, into: memoryview, at: int) -> int:
        done = 0
        while done < len(into):
            count = os.preadv(fd, [into[done:]], at + done)
            if count == 0:
                break
            done += count
        return done

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, number: int) -> None:
        self.file(number).unlink(missing_ok=True)

    def close(self, fd: int) -> None:
        os.close(fd)

    def _flag(self) -> int:
        return os.O_DIRECT if self.direct else 0

    def _can_be_direct(self) -> bool:
        probe = self.path / f".direct-{os.getpid()}"
        try:
            fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
        os.close(fd)
        return True


def salt_of(lines: list[str]) -> int:
    """Of a log, from the lines of the file "name" beside it: the second; logs of an early day have none. Raises ``ValueError``."""
    return int(lines[1], 16) if len(lines) > 1 else 0


def write_whole(file: Path, text: str) -> None:
    """``file`` has ``text``, or what it had before, also after a power cut. Raises ``OSError``."""
    beside = file.with_name(file.name + ".new")
    with beside.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    beside.replace(file)
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class Lock:
    """The directory is this process's alone until ``release``. Raises ``BlockingIOError`` if it is another's.

    ``mark``: a byte of the file, of this lock's choice, that is locked too, by the same open file: so whoever finds it locked knows
    that this very lock has not been released, whatever became of us. 0: the file system has no such locks."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise
        self.mark = random_bits.randbits(62) + 1
        try:
            fcntl.fcntl(
                self._fd,
                fcntl.F_OFD_SETLK,
                _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self.mark, 1, 0),
            )
        except OSError:
            self.mark = 0

    def release(self) -> None:
        os.close(self._fd)


def aligned_buffer(size: int) -> memoryview:
    """Page-aligned memory for O_DIRECT, ``size`` rounded up to pages; from 2 MiB on in huge pages where the kernel has them, since a
    transfer that is not cut up at every 4 KiB page is two to three times as fast (docs/LOG.md)."""
    rounded = max(BUFFER_ALIGN, (size + BUFFER_ALIGN - 1) & -BUFFER_ALIGN)
    if size < HUGE_PAGE_BYTES:
        return memoryview(mmap.mmap(-1, rounded, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    whole = (
        (size + HUGE_PAGE_BYTES - 1) & -HUGE_PAGE_BYTES
    ) + HUGE_PAGE_BYTES  # what is not touched costs nothing
    mapped = mmap.mmap(-1, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    start = -int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data) % HUGE_PAGE_BYTES
    return memoryview(mapped)[start : start + rounded]
