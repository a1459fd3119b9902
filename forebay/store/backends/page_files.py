"""The files of a directory store: one an object, at most so many bytes of them, the least recently used going first.

    DIR/a/b/<sha256 of key>.page         = head {magic, key length, value length, CRC32C} | key | value
    DIR/tmp/<machine>-<pid>-<n>            being written; then it gets its name, so no reader meets half of one
    DIR/tmp/<name>.page-<pid>-<n>          was in an object's place, is none, and could only be moved out of it

Two levels of 16 directories (field report B13): of 256 nearly every file would have, and make, one of its own. Calls block for as
long as the file system does; see `call_threads`.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISREG

from forebay.store.address import this_machine
from forebay.store.backend import Status
from forebay.store.backends.call_threads import Scratch
from forebay.store.client.channel import Bytes
from forebay.store.crc import crc32c
from forebay.store.wire.messages import MAX_KEY_BYTES

_HEAD = struct.Struct("<4sIQI")
_MAGIC = b"FBP1"
_TRIES_AT_EVICTION = 16
_FREE_CHECK_S = 1.0
_COUNTING_SHARE = 100
_LISTINGS = 64  # the directory is listed anew when a 64th of its size has been put: others put and remove too
_FOREIGN_STALE_S = 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BAD_FILE = (
    errno.EIO,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
)  # says nothing of other files, or of us
_numbers = itertools.count()  # of this process: it may have several stores in one directory


class PageFiles:
    """At most ``size`` bytes of files in ``root``, leaving ``free`` bytes of its file system alone. Thread-safe.

    Several processes may share a directory. Each knows what it found when it listed the directory
    last, and what it did itself. The order of use is in the files' times, for all. A file that
    cannot be removed is left alone and counted for what it takes (field report B14). An entry that
    cannot be read, or is no file, gives its place up: found but never readable, it would cost the
    readers of its key time again and again.
    """

    def __init__(self, root: Path, size: int, free: int) -> None:
        """Raises ``OSError`` if the directory cannot be made or read."""
        self.root = root
        self.size = size
        self._free = free
        self._temporary = root / "tmp"
        self._machine = hashlib.sha256(this_machine().encode()).hexdigest()[:12]
        self._lock = threading.Lock()
        self._files: OrderedDict[str, int] = (
            OrderedDict()
        )  # name -> bytes, least recently used first
        self._stubborn: dict[str, int] = {}  # cannot be removed
        self._used = 0
        self._put_since_listed = 0
        self._counted, self._count_due = (0, 0), float("-inf")
        self._free_seen = (float("-inf"), 0)
        self._temporary.mkdir(parents=True, exist_ok=True)
        self._sweep_temporary()
        self._take_over()
        self._list()

    @property
    def count(self) -> int:
        return len(self._files) + len(self._stubborn)

    @property
    def used(self) -> int:
        """Bytes, as far as this process knows."""
        return self._used

    def path(self, key: bytes) -> Path:
        return self._place(hashlib.sha256(key).hexdigest() + ".page")

    # ------------------------------------------------------------------------------------------ reading and writing

    def read(self, key: bytes, scratch: Scratch) -> Bytes | Status:
        """The whole value, in ``scratch``. A file that is not an intact object of ``key`` is removed (field report P18)."""
        path = self.path(key)
        try:
            data = _read_file(path, scratch)
        except FileNotFoundError:
            return Status.NOT_FOUND
        except OSError as error:
            return (
                Status.CHECKSUM
                if error.errno in _BAD_FILE and self._give_up(path)
                else Status.UNAVAILABLE
            )
        value = _value_of(data, key)
        if value is None:
            self._give_up(path)
            return Status.CHECKSUM
        self._used_now(path, len(data))
        return value

    def has(self, key: bytes, value_bytes: int) -> bool:
        """An object of that length is there; this counts as a use."""
        path, total = self.path(key), file_bytes(key, value_bytes)
        with contextlib.suppress(OSError):
            found = path.stat()
            if S_ISREG(found.st_mode) and found.st_size == total:
                self._used_now(path, total)
                return True
        return False

    def write(self, key: bytes, value: Bytes) -> Status:
        """A new object, or one in place of another of other length. Of writers of one key the first wins; others get EXISTS."""
        path, total = self.path(key), file_bytes(key, len(value))
        beside = self._temporary / f"{self._machine}-{os.getpid()}-{next(_numbers)}"
        try:
            if not self._make_room(total):
                return Status.NO_SPACE
            fd = _create(beside)
            try:
                head = _HEAD.pack(_MAGIC, len(key), len(value), crc32c(value.data))
                _write_all(fd, [memoryview(head + key), value.data])
            finally:
                os.close(fd)
            if path.is_dir():
                self._give_up(path)
            is_new = _publish(beside, path, total)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            self._free_seen = (float("-inf"), 0)
            return Status.NO_SPACE if error.errno in _FULL else Status.UNAVAILABLE
        if not is_new:
            self._used_now(path, total)
            return Status.EXISTS
        self._note(path.name, total)
        with self._lock:
            self._put_since_listed += total
            self._free_seen = (self._free_seen[0], self._free_seen[1] - total)
        return Status.OK

    def remove(self, name: str) -> bool:
        """Forget a file, and remove it if that can be done."""
        with self._lock:
            size = self._files.pop(name, 0)
        try:
            self._place(name).unlink(missing_ok=True)
        except OSError:
            with self._lock:
                self._stubborn[name] = size
            return False
        with self._lock:
            self._used -= size
            self._free_seen = (self._free_seen[0], self._free_seen[1] + size)
        return True

    def _give_up(self, path: Path) -> bool:
        """Remove what is of no use; what cannot be removed, such as a directory, is moved out of the way. Whether its place is free."""
        if self.remove(path.name):
            return True
        try:
            path.rename(self._temporary / f"{path.name}-{os.getpid()}-{next(_numbers)}")
        except OSError:
            return False
        with self._lock:
            self._used -= self._stubborn.pop(path.name, 0)
        return True

    def free_bytes(self) -> int:
        """Of the file system; looked up once a second. A directory that somebody has cleared is made again. Raises ``OSError``."""
        seen_at, free = self._free_seen
        if time.monotonic() - seen_at > _FREE_CHECK_S:
            self._temporary.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.root).free
            self._free_seen = (time.monotonic(), free)
        return free

    def counted(self) -> tuple[int, int]:
        """(objects, bytes) that are there now, whoever put them; counted for at most a hundredth of the time."""
        began = time.monotonic()
        if began >= self._count_due:
            self._counted = _count(self.root)
            self._count_due = time.monotonic() + _COUNTING_SHARE * (time.monotonic() - began)
        return self._counted

    def clear(self, parts: Sequence[bytes], deadline: float) -> int:
        """Remove the objects whose key ends in one of ``parts``, until ``deadline``; how many."""
        removed = 0
        for entry in _pages(self.root):
            if time.monotonic() > deadline:
                break
            key = _key_of(Path(entry.path))
            if key is not None and key.endswith(tuple(parts)):
                removed += self.remove(entry.name)
        return removed

    # ------------------------------------------------------------------------------------------ space

    def _make_room(self, size: int) -> bool:
        """Evict until ``size`` more bytes fit; False if that cannot be had with a bounded number of tries. Raises ``OSError``."""
        if size > self.size:
            return False
        if self._put_since_listed > self.size // _LISTINGS:
            self._list()
        stuck = 0
        while self._used + size > self.size or self.free_bytes() < self._free + size:
            with self._lock:
                name = next(iter(self._files), None)
            if name is None or stuck >= _TRIES_AT_EVICTION:
                return False
            stuck += not self.remove(name)
        return True

    def _used_now(self, path: Path, size: int) -> None:
        if self._note(path.name, size):
            with contextlib.suppress(OSError):
                os.utime(path)  # so that others and a later start know the order

    def _note(self, name: str, size: int) -> bool:
        """It is the most recently used now; False for one that cannot be removed anyway."""
        with self._lock:
            if name in self._stubborn:
                return False
            self._used += size - self._files.get(name, 0)
            self._files[name] = size
            self._files.move_to_end(name)
            return True

    def _list(self) -> None:
        """What is there now, by time of last use."""
        self._put_since_listed = 0
        found = []
        for entry in _pages(self.root):
            with contextlib.suppress(OSError):
                stat = entry.stat()
                found.append((stat.st_mtime_ns, entry.name, stat.st_size))
        with self._lock:
            self._stubborn = {name: size for _, name, size in found if name in self._stubborn}
            self._files = OrderedDict(
                (name, size) for _, name, size in sorted(found) if name not in self._stubborn
            )
            self._used = sum(size for _, _, size in found)

    def _sweep_temporary(self) -> None:
        """Remove what dead processes left behind; other machines' processes cannot be asked, so their files must be old."""
        for path in self._temporary.iterdir():
            with contextlib.suppress(OSError):
                if self._is_left_behind(path):
                    path.unlink()

    def _is_left_behind(self, path: Path) -> bool:
        machine, _, rest = path.name.partition("-")
        pid = rest.partition("-")[0]
        if machine == self._machine and pid.isdecimal():
            return not Path(f"/proc/{pid}").exists()
        return time.time() - path.stat().st_mtime > _FOREIGN_STALE_S

    def _place(self, name: str) -> Path:
        return self.root / name[0] / name[1] / name

    def _take_over(self) -> None:
        """Earlier versions had two levels of 256 directories: their files move, once."""
        for first in _directories(self.root, 2):
            for second in _directories(first, 2):
                with contextlib.suppress(OSError):
                    for entry in list(os.scandir(second)):
                        _move(Path(entry.path), self._place(entry.name))
                    Path(second).rmdir()
            with contextlib.suppress(OSError):
                Path(first).rmdir()


def file_bytes(key: bytes, value_bytes: int) -> int:
    return _HEAD.size + len(key) + value_bytes


def _read_file(path: Path, scratch: Scratch) -> Bytes:
    """All of it. Raises ``OSError``."""
    with path.open("rb", buffering=0) as file:
        data = scratch.take(os.fstat(file.fileno()).st_size)
        got = 0
        while got < len(data) and (more := file.readinto(data[got:].data)):
            got += more
    return data[:got]


def _value_of(data: Bytes, key: bytes) -> Bytes | None:
    """The value of a whole file's bytes, None if they are not an intact object of ``key``."""
    if len(data) < _HEAD.size:
        return None
    magic, key_bytes, value_bytes, crc = _HEAD.unpack_from(data.data)
    begin = _HEAD.size + key_bytes
    if (
        magic != _MAGIC
        or begin + value_bytes != len(data)
        or data[_HEAD.size : begin].tobytes() != key
    ):
        return None
    value = data[begin:]
    return value if crc32c(value.data) == crc else None


def _pages(root: Path) -> Iterator[os.DirEntry[str]]:
    """The objects' files that are there now."""
    for first in _directories(root, 1):
        for second in _directories(first, 1):
            with contextlib.suppress(OSError), os.scandir(second) as found:
                yield from (entry for entry in found if entry.name.endswith(".page"))


def _directories(path: str | Path, letters: int) -> list[str]:
    """Those with names of so many letters; none if it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(path) as found:
        return [entry.path for entry in found if len(entry.name) == letters and entry.is_dir()]
    return []


def _move(path: Path, place: Path) -> None:
    """Raises ``OSError``."""
    place.parent.mkdir(parents=True, exist_ok=True)
    path.replace(place)


def _create(path: Path) -> int:
    """A new file, opened to be written; its directory is made if it is not there. Raises ``OSError``."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)


def _link(beside: Path, path: Path) -> None:
    """Raises ``OSError``."""
    try:
        os.link(beside, path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(beside, path)


def _publish(beside: Path, path: Path, size: int) -> bool:
    """Give a finished file its name. Of writers that come at once the first wins, and the others learn of it (False); an object of
    another length is replaced. Raises ``OSError``."""
    try:
        _link(beside, path)
    except FileExistsError:
        if path.stat().st_size == size:
            beside.unlink()
            return False
        beside.replace(path)
    except OSError:  # a file system without hard links
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.replace(path)
    else:
        beside.unlink()
    return True


def _count(root: Path) -> tuple[int, int]:
    """(objects, bytes) of the files that are there now."""
    objects = used = 0
    for entry in _pages(root):
        with contextlib.suppress(OSError):
            used += entry.stat().st_size
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
