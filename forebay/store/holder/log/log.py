"""The log itself: append, read, bury, evict whole files.

    files:   0000000007.log  (sealed)   0000000008.log  (sealed)   0000000009.log  (active: the only one written)
    index:   (tenant, key) -> Record(file, position, generation, length, crc)

Space is given back by whole files, the one least recently read first; records in it that were read since it was sealed are moved
to the active file, newest reads first, up to a quarter of it. A tombstone is written twice, so that no damage to one place takes
it back, and carried along while any older file remains, for only there can a record be that it speaks against. Appending, burying
and evicting is one thread's business (`holder.writer`); reading any thread's: ``_lock`` guards the index and the counts of
readers, never I/O.
"""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.store.crc import crc32c
from forebay.store.holder.log.files import Files, aligned_buffer
from forebay.store.holder.log.hints import LogHints
from forebay.store.holder.log.index import Index, Record
from forebay.store.holder.log.record import (
    BLOCK_BYTES,
    Head,
    Kind,
    encode_graves,
    padded,
    write_head,
)
from forebay.store.holder.log.scan import Damage, scan
from forebay.store.holder.segment import as_bytes
from forebay.store.native.library import copy_crc32c
from forebay.store.wire.messages import Grave, HeldSsd

MAX_FILE_BYTES = 256 << 20
MIN_FILE_BYTES = 4 << 20
FILES_AT_CAPACITY = 8
MOVED_SHARE = 4
GRAVE_COPIES = 2


class LogFull(Exception):
    """The record is larger than the log may ever be."""


@dataclass(slots=True)
class LogFile:
    """``used``: tick of its last read, or of its sealing. ``graves``: the tombstones in it."""

    number: int
    fd: int
    size: int
    used: int = 0
    sealed_tick: int = 0
    readers: int = 0
    doomed: bool = False
    graves: list[Grave] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Item:
    """One object to append. ``value`` stays as it is until ``append`` returns."""

    tenant: str
    key: bytes
    generation: int
    crc: int
    value: memoryview


class SsdLog:
    """At most ``capacity`` bytes in files of ``files``. ``salt``: of its records' heads (`log.record`), always the same. Raises
    ``OSError`` as its file layer does."""

    def __init__(self, files: Files, capacity: int, salt: int = 0) -> None:
        self.capacity = capacity
        self._salt = salt
        self.file_bytes = max(MIN_FILE_BYTES, min(MAX_FILE_BYTES, capacity // FILES_AT_CAPACITY))
        self.index = Index()
        self.cut_bytes = 0  # what the start found torn or damaged
        self.kept_graves: dict[
            Grave, None
        ] = {}  # on behalf of absent holders, in the order they came
        self._files = files
        self._by_number: dict[int, LogFile] = {}
        self._active: LogFile | None = None
        self._lock = threading.Lock()
        self._tick = 1
        self._hints: LogHints | None = None
        self._highest = 0
        self._seal_error: OSError | None = None
        self._has_ghosts = False  # files may have good records that the index does not know: a removal needs a tombstone in any case
        self._buffer = aligned_buffer(8 << 20)
        self._rebuild()

    # ------------------------------------------------------------------------------------------ facts

    @property
    def used_bytes(self) -> int:
        return sum(file.size for file in list(self._by_number.values()))

    @property
    def highest_generation(self) -> int:
        """Of everything ever seen here, tombstones included."""
        return self._highest

    def entries(self) -> list[HeldSsd]:
        """Everything that counts; of one key the oldest generation first."""
        with self._lock:
            return [
                HeldSsd(tenant, key, record.generation, record.length)
                for (tenant, key), record in self.index.items()
            ]

    def has(self, tenant: str, key: bytes, generation: int) -> bool:
        with self._lock:
            return self.index.get((tenant, key), generation) is not None

    def length_of(self, tenant: str, key: bytes, generation: int) -> int | None:
        with self._lock:
            record = self.index.get((tenant, key), generation)
            return None if record is None else record.length

    def newest_length(self, tenant: str, key: bytes) -> int | None:
        with self._lock:
            record = self.index.newest((tenant, key))
            return None if record is None else record.length

    def tell(self, hints: LogHints) -> None:
        """From now on ``hints`` shows where records lie; of all that are here now first. Before anybody else uses the log."""
        self._hints = hints
        for (tenant, key), record in self.index.items():
            hints.show(tenant, key, record)

    def show(self, tenant: str, key: bytes, generation: int | None = None) -> None:
        """Nothing nearer than the log has ``key`` now: let readers know where that ``generation`` (None: the newest) is, if so."""
        if self._hints is not None:
            with self._lock:
                place = (tenant, key)
                record = (
                    self.index.newest(place)
                    if generation is None
                    else self.index.get(place, generation)
                )
                if record is not None:
                    self._hints.show(tenant, key, record)

    def hide(self, tenant: str, key: bytes) -> None:
        """Whoever looks for ``key`` had better ask."""
        with self._lock:
            self._hide(tenant, key)

    def _hide(self, tenant: str, key: bytes) -> None:
        """With the lock: nothing may be shown again that has left the index meanwhile."""
        if self._hints is not None:
            self._hints.hide(tenant, key)

    def touch(self, tenant: str, names: Sequence[tuple[bytes, int]]) -> None:
        """Others have read these (key, generation) themselves: that counts as use like any read."""
        with self._lock:
            for key, generation in names:
                record = self.index.get((tenant, key), generation)
                file = self._by_number.get(record.file) if record is not None else None
                if record is not None and file is not None:
                    self._tick += 1
                    record.tick = file.used = self._tick

    # ------------------------------------------------------------------------------------------ the writing thread

    def make_room(self, record_bytes: int, lost: list[HeldSsd]) -> None:
        """Evict files until ``record_bytes`` more fit. What is lost thereby is added to ``lost`` as it goes, whatever is raised then.
        Raises ``LogFull`` if they never will."""
        if record_bytes > self.capacity:
            raise LogFull(f"a record of {record_bytes} bytes; the log may hold {self.capacity}")
        for _ in range(2 * len(self._by_number) + 2):
            if self.used_bytes + record_bytes <= self.capacity:
                break
            self._seal()
            lost += self._evict_one()

    def drop_oldest(self) -> list[HeldSsd]:
        """The disk is full though the log is not: give back the oldest file without writing anything; what is lost.

        Only the oldest may go like this, for its tombstones speak against nothing any more.
        """
        self._seal()
        if not self._by_number:
            return []
        victim = self._by_number[min(self._by_number)]
        if any(grave in self.kept_graves for grave in victim.graves):
            return []
        return self._drop(victim, keep=set())

    def append(self, items: Sequence[Item]) -> list[bool]:
        """Write records one after another, few writes for many of them, and commit each to the index once it is written.

        False: the value did not match its CRC (its memory was reused meanwhile) and was not logged.
        """
        done = []
        for run in _runs(items, len(self._buffer)):
            done += self._append_run(run)
        return done

    def bury(self, graves: Sequence[Grave], lost: list[HeldSsd], *, always: bool = False) -> None:
        """Log tombstones for what is in the log (or for all of them) and take it out of the index once that is done, so that whoever
        failed to may try again. One that is kept for another holder says nothing about our own records. ``lost``: see `make_room`."""
        always = always or self._has_ghosts
        with self._lock:
            needed = [
                grave for grave in graves if grave.behalf or always or self.index.has_under(grave)
            ]
            for grave in needed:
                self._hide(grave.tenant, grave.key)
        if not needed:
            return
        self.make_room(min(_graves_bytes(needed), self.capacity // 2), lost)
        self._append_graves(needed)
        with self._lock:
            for grave in needed:
                if not grave.behalf:
                    self.index.bury(grave)
                    self._hide(grave.tenant, grave.key)

    def forget_kept(self, behalf: str) -> None:
        """Graves kept for ``behalf`` are delivered. They fade with their files."""
        self.kept_graves = {
            grave: None for grave in list(self.kept_graves) if grave.behalf != behalf
        }

    def sync(self) -> None:
        """Everything that was appended is on the disk. Raises ``OSError`` if that is not known, also of a file that was sealed since,
        and until `disown` was told what may not be there."""
        if self._seal_error is not None:
            raise self._seal_error
        if self._active is not None:
            self._files.sync(self._active.fd)

    def disown(self, names: Sequence[tuple[str, bytes, int]]) -> None:
        """These (tenant, key, generation) may or may not be on the disk: they do not count, and a removal must speak against them."""
        self._seal_error = None
        with self._lock:
            self._has_ghosts = True
            for tenant, key, generation in names:
                record = self.index.get((tenant, key), generation)
                if record is not None:
                    self.index.remove((tenant, key), record)
        for tenant, key, _ in names:
            self.hide(tenant, key)

    def abandon_active(self) -> None:
        """A write failed: what is behind the last good record is torn, so go on in a new file."""
        self._seal()

    def close(self) -> None:
        for file in self._by_number.values():
            with contextlib.suppress(OSError):
                self._files.close(file.fd)
        self._by_number.clear()
        self._active = None

    # ------------------------------------------------------------------------------------------ any thread

    def read(self, tenant: str, key: bytes, generation: int, into: memoryview) -> int | None:
        """Read a whole value to the front of ``into`` (page-aligned, at least its padded length); its length.

        None: it is not there, or no longer good, in which case it is taken out of the index. It may be good again when it is read next
        time (EIO may pass), so a tombstone must be logged for it (`bury`).
        """
        place = (tenant, key)
        with self._lock:
            record = self.index.get(place, generation)
            file = self._by_number.get(record.file) if record is not None else None
            if record is None or file is None or padded(record.length) > len(into):
                return None
            file.readers += 1
            self._tick += 1
            record.tick = file.used = self._tick
        try:
            count = self._files.read(
                file.fd, into[: padded(record.length)], record.position + BLOCK_BYTES
            )
            good = count >= record.length and crc32c(into[: record.length]) == record.crc
        except OSError:
            good = False
        finally:
            self._reader_done(file)
        if not good:
            with self._lock:
                self._has_ghosts = True
                self.index.remove(place, record)
                self._hide(tenant, key)
            return None
        return record.length

    def _reader_done(self, file: LogFile) -> None:
        with self._lock:
            file.readers -= 1
            close = file.doomed and file.readers == 0
        if close:
            self._let_go(file)

    # ------------------------------------------------------------------------------------------ inside

    def _rebuild(self) -> None:
        """Read every head once; later files overrule nothing by themselves, generations and tombstones do."""
        graves: list[Grave] = []
        for number in self._files.numbers():
            fd = self._files.open(number)
            file = LogFile(
                number, fd, self._files.size(fd), used=self._tick, sealed_tick=self._tick
            )
            self._tick += 1
            for found in scan(self._files, fd, self._salt):
                if isinstance(found, Damage):
                    self.cut_bytes += found.bytes
                    if found.tail:
                        self._files.truncate(fd, found.position)
                        file.size = found.position
                    else:
                        self._has_ghosts = True
                    continue
                head = found.head
                self._highest = max(
                    [self._highest, head.generation, *(grave.generation for grave in found.graves)]
                )
                file.graves += found.graves
                graves += found.graves
                if head.kind is Kind.VALUE:
                    record = Record(
                        number, found.position, head.generation, head.value_bytes, head.value_crc
                    )
                    self.index.add((head.tenant, head.key), record)
            file.graves = list(dict.fromkeys(file.graves))
            if file.size:
                self._by_number[number] = file
            else:
                self._files.close(fd)
                self._files.unlink(number)
        for grave in graves:
            if grave.behalf:
                self.kept_graves[grave] = None
            else:
                self.index.bury(grave)

    def _append_run(self, run: Sequence[Item]) -> list[bool]:
        total = sum(BLOCK_BYTES + padded(len(item.value)) for item in run)
        file = self._file_for(total)
        buffer = memoryview(self._buffer if total <= len(self._buffer) else aligned_buffer(total))
        good, at = [], 0
        for item in run:
            length = len(item.value)
            value = buffer[at + BLOCK_BYTES : at + BLOCK_BYTES + length]
            good.append(copy_crc32c(as_bytes(value), as_bytes(item.value)) == item.crc)
            if good[-1]:
                head = Head(Kind.VALUE, item.generation, length, item.crc, item.tenant, item.key)
                write_head(head, buffer[at : at + BLOCK_BYTES], self._salt)
                buffer[at + BLOCK_BYTES + length : at + BLOCK_BYTES + padded(length)] = bytes(
                    padded(length) - length
                )
                at += head.record_bytes
        start = file.size
        self._files.write(file.fd, buffer[:at], start)
        with self._lock:
            for item, fine in zip(run, good, strict=True):
                if fine:
                    record = Record(file.number, start, item.generation, len(item.value), item.crc)
                    self.index.add((item.tenant, item.key), record)
                    self._highest = max(self._highest, item.generation)
                    start += BLOCK_BYTES + padded(len(item.value))
            file.size = start
        return good

    def _append_graves(self, graves: list[Grave]) -> None:
        """Two equal records, one behind the other."""
        value = encode_graves(graves)
        head = Head(
            Kind.GRAVES, max(grave.generation for grave in graves), len(value), crc32c(value)
        )
        size = head.record_bytes
        file = self._file_for(GRAVE_COPIES * size)
        buffer = aligned_buffer(GRAVE_COPIES * size)
        for start in range(0, GRAVE_COPIES * size, size):
            write_head(head, buffer[start : start + BLOCK_BYTES], self._salt)
            buffer[start + BLOCK_BYTES : start + BLOCK_BYTES + len(value)] = value
        self._files.write(file.fd, buffer[: GRAVE_COPIES * size], file.size)
        with self._lock:
            file.size += GRAVE_COPIES * size
            file.graves += graves
            self._highest = max(self._highest, head.generation)
            self.kept_graves |= {grave: None for grave in graves if grave.behalf}

    def _file_for(self, record_bytes: int) -> LogFile:
        if (
            self._active is not None
            and self._active.size + record_bytes > self.file_bytes
            and self._active.size
        ):
            self._seal()
        if self._active is None:
            number = max([*self._by_number, *self._files.numbers()], default=0) + 1
            fd = self._files.create(number)
            self._files.sync_directory()
            self._active = self._by_number[number] = LogFile(number, fd, 0)
        return self._active

    def _seal(self) -> None:
        file, self._active = self._active, None
        if file is None:
            return
        try:
            self._files.sync(file.fd)
        except OSError as error:
            self._seal_error = error
        try:
            self._files.truncate(file.fd, file.size)
        except OSError:
            self._has_ghosts = True  # of a write that failed: some of its records may be whole
        self._tick += 1
        file.used = max(file.used, self._tick)
        file.sealed_tick = self._tick
        if not file.size:
            self._unlink(file)

    def _evict_one(self) -> list[HeldSsd]:
        """Drop the sealed file that was least recently of use; what is lost. All that is to be kept is written elsewhere first."""
        sealed = [file for file in self._by_number.values() if file is not self._active]
        if not sealed:
            return []
        victim = min(sealed, key=lambda file: file.used)
        with self._lock:
            inside = [
                (place, record)
                for place, record in self.index.items()
                if record.file == victim.number
            ]
        hot = [(place, record) for place, record in inside if record.tick > victim.sealed_tick]
        moved = self._move(victim, sorted(hot, key=lambda one: -one[1].tick))
        older = any(number < victim.number for number in self._by_number)
        carried = [
            grave
            for grave in victim.graves
            if (grave in self.kept_graves if grave.behalf else older)
        ]
        if carried:
            self._append_graves(carried)
        if moved or carried:
            self.sync()
        return self._drop(victim, keep=moved)

    def _drop(self, victim: LogFile, keep: set[tuple[str, bytes, int]]) -> list[HeldSsd]:
        lost = []
        with self._lock:
            for (tenant, key), record in self.index.items():
                if record.file == victim.number and (tenant, key, record.generation) not in keep:
                    lost.append(HeldSsd(tenant, key, record.generation, record.length))
                    self.index.remove((tenant, key), record)
                    self._hide(tenant, key)
        self._unlink(victim)
        return lost

    def _move(
        self, victim: LogFile, hot: list[tuple[tuple[str, bytes], Record]]
    ) -> set[tuple[str, bytes, int]]:
        """Copy records of ``victim`` to the active file, as many as a quarter of it holds, without growing beyond the capacity."""
        budget = min(victim.size // MOVED_SHARE, self.capacity - (self.used_bytes - victim.size))
        moved: set[tuple[str, bytes, int]] = set()
        for (tenant, key), record in hot:
            size = BLOCK_BYTES + padded(record.length)
            if size > budget:
                break
            value = aligned_buffer(padded(record.length))
            if (
                self._files.read(
                    victim.fd, value[: padded(record.length)], record.position + BLOCK_BYTES
                )
                < record.length
            ):
                continue
            if self._append_run(
                [Item(tenant, key, record.generation, record.crc, value[: record.length])]
            )[0]:
                budget -= size
                moved.add((tenant, key, record.generation))
                self._show_moved(tenant, key, record)
        return moved

    def _show_moved(self, tenant: str, key: bytes, old: Record) -> None:
        with self._lock:
            new = self.index.get((tenant, key), old.generation)
            if new is not None and self._hints is not None and self._hints.shows(tenant, key, old):
                self._hints.show(tenant, key, new)

    def _unlink(self, file: LogFile) -> None:
        """The name goes at once, for good: nobody writes tombstones for what was in it. The descriptor when its last reader is done."""
        with self._lock:
            self._by_number.pop(file.number, None)
            file.doomed = True
            close = file.readers == 0
        with contextlib.suppress(OSError):
            self._files.unlink(file.number)
            self._files.sync_directory()
        if close:
            self._let_go(file)

    def _let_go(self, file: LogFile) -> None:
        """Of an unlinked file. Its space is free at once, also if a client still has it open."""
        with contextlib.suppress(OSError):
            self._files.truncate(file.fd, 0)
        self._files.close(file.fd)


def _graves_bytes(graves: Sequence[Grave]) -> int:
    return GRAVE_COPIES * (BLOCK_BYTES + padded(len(encode_graves([*graves]))))


def _runs(items: Sequence[Item], limit: int) -> list[list[Item]]:
    """Consecutive items whose records fit ``limit`` bytes together (at least one each)."""
    runs: list[list[Item]] = []
    size = limit
    for item in items:
        record_bytes = BLOCK_BYTES + padded(len(item.value))
        if size + record_bytes > limit:
            runs.append([])
            size = 0
        runs[-1].append(item)
        size += record_bytes
    return runs
