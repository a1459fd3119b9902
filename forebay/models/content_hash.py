"""The hash of a file's whole content, remembered for as long as the file is the same.

    <cache>/hashes/<device>-<inode>      a record: the file's mark when it was read, and the hash

BLAKE3 is a tree hash: threads share one file, and it is as fast as memory. A record counts only
while device, inode, size, mtime and ctime are all the same. Clocks of file systems are coarse: a
file can change twice within one tick and look the same. So nothing is remembered of a file that
had been changed shortly before it was read. Where other machines write, "shortly" is an hour,
since the times are those of another clock.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from blake3 import blake3

from forebay.cache import NoCache, cache_directory
from forebay.models.errors import ModelError

HASH_BYTES = 32
RECORD_VERSION = 1
SETTLED_NS = 2 * 10**9  # FAT, the coarsest local one, counts in steps of two seconds
SETTLED_SHARED_NS = 3600 * 10**9
_PIECE_BYTES = 4 << 20
_THREADS_MAX = 4  # more would take cores from the ranks, which load meanwhile
# fmt: off
_LOCAL = frozenset((
    "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs",
    "msdos", "ntfs", "ntfs3", "overlay", "squashfs", "vfat", "xfs", "zfs",
))
# fmt: on
# Here a write through a shared map moves no time, so a mark says nothing of the content.
_TIMELESS = frozenset(("ramfs", "rootfs", "tmpfs"))
NEVER_NS = 1 << 62


class FileMark(msgspec.Struct, frozen=True, array_like=True):
    """What changes when a file does, without reading it. Times in nanoseconds."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileMark:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


class _Record(msgspec.Struct, frozen=True):
    version: int
    mark: FileMark
    hash: bytes


@dataclass(frozen=True, slots=True)
class Content:
    """``hash`` of all bytes of the file that had ``mark``; ``was_known``: no byte had to be read."""

    mark: FileMark
    hash: bytes
    was_known: bool


def mark_of(path: Path) -> FileMark:
    """Follows symbolic links. Raises ModelError when there is no such file."""
    try:
        return FileMark.of(path.stat())
    except OSError as error:
        raise _unreadable(path, error) from None


def check_unchanged(path: Path, mark: FileMark) -> None:
    """Raises ModelError unless ``path`` is still the file that had ``mark``."""
    if mark_of(path) != mark:
        raise ModelError(
            f"{path}: changed while it was read; start again once nothing writes to it"
        )


def content_hash(path: Path) -> Content:
    """Raises ModelError when the file cannot be read, or changes meanwhile."""
    began_ns = time.time_ns()
    try:
        with path.open("rb", buffering=0) as stream:
            mark = FileMark.of(os.fstat(stream.fileno()))
            known = _recall(mark)
            if known is not None:
                return Content(mark, known, True)
            digest, size = _digest(stream)
            changed = size != mark.size or FileMark.of(os.fstat(stream.fileno())) != mark
    except OSError as error:
        raise _unreadable(path, error) from None
    if changed:
        raise ModelError(
            f"{path}: changed while it was read; start again once nothing writes to it"
        )
    check_unchanged(path, mark)  # another file may have taken its name
    if max(mark.mtime_ns, mark.ctime_ns) + _settled_after_ns(mark.device) <= began_ns:
        _remember(mark, digest)
    return Content(mark, digest, False)


def bytes_hash(*parts: bytes) -> bytes:
    """The hash of ``parts``, each framed by its length."""
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def _digest(stream: BinaryIO) -> tuple[bytes, int]:
    """The hash and the number of bytes read. Not from a map: a file that shrinks would end us."""
    hasher = blake3(max_threads=min(len(os.sched_getaffinity(0)), _THREADS_MAX))
    piece = memoryview(bytearray(_PIECE_BYTES))
    size = 0
    while count := stream.readinto(piece):  # type: ignore[attr-defined]
        hasher.update(piece[:count])
        size += count
    return hasher.digest(), size


def _record_path(mark: FileMark) -> Path:
    return cache_directory() / "hashes" / f"{mark.device:x}-{mark.inode:x}"


def _recall(mark: FileMark) -> bytes | None:
    """What was remembered of a file with exactly this mark. A record that is torn is none."""
    try:
        record = msgspec.json.decode(_record_path(mark).read_bytes(), type=_Record)
    except (OSError, ValueError):
        return None
    is_same = record.version == RECORD_VERSION and record.mark == mark
    return record.hash if is_same and len(record.hash) == HASH_BYTES else None


def _remember(mark: FileMark, digest: bytes) -> None:
    """By one rename, so a reader finds a whole record or none. Without a place for it, nothing."""
    try:
        path = _record_path(mark)
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{path.name}.*"):  # of a process that was killed
            left.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f"{path.name}.", delete=False
        ) as file:
            file.write(msgspec.json.encode(_Record(RECORD_VERSION, mark, digest)))
        try:
            os.replace(file.name, path)
        except FileNotFoundError:
            pass  # another process has swept it away, to write the same
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
    except NoCache as error:
        _say_not_kept(str(error))
    except OSError as error:
        _say_not_kept(f"{path.parent}: {error.strerror}; FOREBAY_CACHE_DIR names another place")


def _say_not_kept(why: str) -> None:
    print(
        f"forebay: content hashes cannot be kept, and are made again at each start ({why})",
        file=sys.stderr,
        flush=True,
    )


def _settled_after_ns(device: int) -> int:
    """How old a change must be before the next one is sure to show in the file's times."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return SETTLED_SHARED_NS
    kinds = [
        line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number
    ]  # of a device that is not listed (a subvolume) the file system is a local one
    if any(kind in _TIMELESS for kind in kinds):
        return NEVER_NS
    return SETTLED_NS if all(kind in _LOCAL for kind in kinds) else SETTLED_SHARED_NS


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path}: cannot be read ({error.strerror}); check the path")
