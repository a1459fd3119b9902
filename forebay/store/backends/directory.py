"""A directory as L3: one file an object, for a shared file system or a single machine without a store.

    DIR/ab/cd/<sha256 of key>.page   = head {magic, key length, value length, CRC32C} | key | value
    DIR/tmp/<pid>-<n>                  being written; renamed into place, so no reader meets half of one

Two levels of 256 directories (FIELD_REPORTS B13). The size is kept by least recent use, and the file system's free space above a
floor; a file that cannot be removed is left alone and forgotten (B14), a bad one is a miss and goes (P18).
"""

import contextlib
import hashlib
import itertools
import os
import shutil
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forebay.store.backend import GetItem, Health, PutItem, Status, StoreUse
from forebay.store.crc import crc32c
from forebay.store.holder.segment import as_bytes
from forebay.store.wire.messages import MAX_KEY_BYTES

_HEAD = struct.Struct("<4sIQI")
_MAGIC = b"FBP1"
_TRIES_AT_EVICTION = 16
_FREE_CHECK_S = 1.0
_COUNTING_SHARE = 100
_numbers = itertools.count()  # of this process: it may have several stores in one directory


class DirectoryStore:
    """A `PageStore` in ``directory``, of at most ``size`` bytes of files, leaving ``free`` bytes of the file system alone.

    Several processes may share a directory: each evicts by what it knows, and a file that another removed is a miss.
    Raises ``OSError`` if the directory cannot be made or read.
    """

    def __init__(self, directory: Path, size: int, free: int = 0) -> None:
        self._root = directory
        self._temporary = directory / "tmp"
        self._size, self._free = size, free
        self._temporary.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()  # name -> bytes, least recently used first
        self._used = 0
        self._free_seen = (0.0, 0)
        self._counted, self._counted_due = (0, 0), 0.0
        self._sweep_temporary()
        self._load()

    def match_prefix(self, keys: Sequence[bytes], parts: Sequence[bytes], *, hint: bool, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        for index, key in enumerate(keys):
            if time.monotonic() > deadline:
                return 0
            if not all(self._path(key + part).exists() for part in parts or (b"",)):
                return index
        return len(keys)

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]:
        deadline = time.monotonic() + timeout_s
        return [self._get(item) if time.monotonic() <= deadline else Status.TIMEOUT for item in items]

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        deadline = time.monotonic() + timeout_s
        return [self._put(item) if time.monotonic() <= deadline else Status.TIMEOUT for item in items]

    def health(self) -> Health:
        try:
            free = shutil.disk_usage(self._root).free
        except OSError as error:
            return Health(False, f"{self._root}: {error.strerror}")
        return Health(True, f"{len(self._files)} objects, {self._used} of {self._size} bytes, {free} bytes free")

    def use(self) -> StoreUse:
        """Counted on disk, since other processes write here too, but for at most a hundredth of the time."""
        began = time.monotonic()
        if began >= self._counted_due:
            self._counted = _count(self._root)
            self._counted_due = time.monotonic() + _COUNTING_SHARE * (time.monotonic() - began)
        objects, used = self._counted
        return StoreUse({"objects": objects, "ssd_bytes": self._size, "ssd_used": used})

    def clear(self, parts: Sequence[bytes], timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        removed = 0
        for path in self._root.glob("??/??/*.page"):
            if time.monotonic() > deadline:
                break
            key = _key_of(path)
            if key is not None and key.endswith(tuple(parts)):
                removed += self._remove(path.name)
        return removed

    def close(self) -> None:
        """Nothing is kept open."""

    def _get(self, item: GetItem) -> Status:
        try:
            target = as_bytes(item.buffer)[: item.length]
        except (TypeError, ValueError):
            return Status.INVALID
        if len(target) != item.length or item.length < 1 or item.offset < 0 or not target.flags.writeable:
            return Status.INVALID
        path = self._path(item.key)
        try:
            data = np.fromfile(path, dtype=np.uint8)
        except FileNotFoundError:
            return Status.NOT_FOUND
        except OSError:
            return Status.UNAVAILABLE
        value = _value_of(data, item.key)
        if value is None:
            self._remove(path.name)
            return Status.CHECKSUM
        if item.offset + item.length > len(value):
            return Status.INVALID
        target[:] = value[item.offset : item.offset + item.length]
        self._used_now(path, len(data))
        return Status.OK

    def _put(self, item: PutItem) -> Status:
        try:
            value = as_bytes(item.buffer)
        except (TypeError, ValueError):
            return Status.INVALID
        if not 0 < len(item.key) <= MAX_KEY_BYTES or not len(value):
            return Status.INVALID
        path = self._path(item.key)
        total = _HEAD.size + len(item.key) + len(value)
        with contextlib.suppress(OSError):
            if path.stat().st_size == total:
                self._used_now(path, total)
                return Status.EXISTS
        if not self._make_room(total):
            return Status.NO_SPACE
        beside = self._temporary / f"{os.getpid()}-{next(_numbers)}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("xb", buffering=0) as file:
                head = _HEAD.pack(_MAGIC, len(item.key), len(value), crc32c(value.data))
                _write_all(file.fileno(), [memoryview(head + item.key), value.data])
            is_new = _publish(beside, path, total)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            return Status.NO_SPACE
        self._used_now(path, total)
        return Status.OK if is_new else Status.EXISTS

    def _path(self, key: bytes) -> Path:
        return self._place(hashlib.sha256(key).hexdigest() + ".page")

    def _place(self, name: str) -> Path:
        return self._root / name[:2] / name[2:4] / name

    def _used_now(self, path: Path, size: int) -> None:
        with self._lock:
            self._used += size - self._files.get(path.name, 0)
            self._files[path.name] = size
            self._files.move_to_end(path.name)
        with contextlib.suppress(OSError):
            os.utime(path)  # so that a later start knows the order

    def _make_room(self, size: int) -> bool:
        """Evict until ``size`` more bytes fit; False if that cannot be had with a bounded number of tries."""
        if size > self._size:
            return False
        stuck = 0
        while self._used + size > self._size or self._free_bytes() < self._free + size:
            with self._lock:
                name = next(iter(self._files), None)
            if name is None or stuck >= _TRIES_AT_EVICTION:
                return False
            stuck += not self._remove(name)
        return True

    def _remove(self, name: str) -> bool:
        """Forget a file, and remove it if that can be done."""
        with self._lock:
            self._used -= self._files.pop(name, 0)
        try:
            self._place(name).unlink(missing_ok=True)
        except OSError:
            return False
        self._free_seen = (0.0, 0)
        return True

    def _free_bytes(self) -> int:
        seen_at, free = self._free_seen
        if time.monotonic() - seen_at > _FREE_CHECK_S:
            try:
                free = shutil.disk_usage(self._root).free
            except OSError:
                free = 0
            self._free_seen = (time.monotonic(), free)
        return free

    def _sweep_temporary(self) -> None:
        """Remove what dead processes left behind."""
        for path in self._temporary.iterdir():
            pid = path.name.partition("-")[0]
            if not pid.isdecimal() or not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):
                    path.unlink()

    def _load(self) -> None:
        found = []
        for path in self._root.glob("??/??/*.page"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, path.name, stat.st_size))
        for _, name, size in sorted(found):
            self._files[name] = size
            self._used += size


def _value_of(data: "np.ndarray[tuple[int], np.dtype[np.uint8]]", key: bytes) -> "np.ndarray[tuple[int], np.dtype[np.uint8]] | None":
    """The value of a whole file's bytes, None if they are not an intact object of ``key``."""
    if len(data) < _HEAD.size:
        return None
    magic, key_bytes, value_bytes, crc = _HEAD.unpack_from(data.data)
    begin = _HEAD.size + key_bytes
    if magic != _MAGIC or begin + value_bytes != len(data) or data[_HEAD.size : begin].tobytes() != key:
        return None
    value = data[begin:]
    return value if crc32c(value.data) == crc else None


def _publish(beside: Path, path: Path, size: int) -> bool:
    """Give a finished file its name. Of writers that come at once the first wins, and the others learn of it (False); an object of
    another length is replaced. Raises ``OSError``."""
    try:
        os.link(beside, path)
    except FileExistsError:
        if path.stat().st_size == size:
            beside.unlink()
            return False
        beside.replace(path)
    except OSError:  # a file system without hard links
        beside.replace(path)
    else:
        beside.unlink()
    return True


def _count(root: Path) -> tuple[int, int]:
    """(objects, bytes) of the files that are there now."""
    objects = used = 0
    for path in root.glob("??/??/*.page"):
        with contextlib.suppress(OSError):
            used += path.stat().st_size
            objects += 1
    return objects, used


def _key_of(path: Path) -> bytes | None:
    """The key that a file says it holds, None if it cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size + MAX_KEY_BYTES)
    except OSError:
        return None
    if len(head) < _HEAD.size:
        return None
    return head[_HEAD.size : _HEAD.size + _HEAD.unpack_from(head)[1]]


def _write_all(fd: int, parts: list[memoryview]) -> None:
    for part in parts:
        while len(part):
            part = part[os.write(fd, part) :]
