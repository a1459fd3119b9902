"""Checking a log directory offline: every head, every value's CRC32C, and what a start would cut or leave out."""

import errno
from dataclasses import dataclass, field
from pathlib import Path

from forebay.store.holder.log.files import Directory, Lock, salt_of
from forebay.store.holder.log.index import covers
from forebay.store.holder.log.record import Kind
from forebay.store.holder.log.scan import Damage, Found, scan, value_is_good
from forebay.store.wire.messages import Grave


@dataclass
class FileReport:
    """One file. ``cut_bytes``: a torn tail that the next start cuts off; ``damaged``: what else is wrong, one line each."""

    name: str
    bytes: int
    records: int = 0
    bad_values: int = 0
    cut_bytes: int = 0
    damaged: list[str] = field(default_factory=list)


@dataclass
class Report:
    """``live``: keys a holder would list; ``dead``: records that a newer generation or a tombstone overrules."""

    files: list[FileReport] = field(default_factory=list)
    live: int = 0
    live_bytes: int = 0
    dead: int = 0
    tombstones: int = 0

    @property
    def clean(self) -> bool:
        return not any(file.cut_bytes or file.damaged for file in self.files)


def check(path: Path) -> Report:
    """Read the log in ``path`` and change nothing. Raises ``OSError``; ``BlockingIOError`` if a holder is using it."""
    if not path.is_dir():
        raise FileNotFoundError(2, "no such directory", str(path))
    if not _is_log(path):
        raise FileNotFoundError(2, f"no holder's directory{_nearby(path)}", str(path))
    lock = Lock(path)
    try:
        return _check(Directory(path), _salt(path / "name"))
    finally:
        lock.release()


def _salt(name: Path) -> int:
    try:
        return salt_of(name.read_text().splitlines() if name.exists() else [])
    except ValueError:
        raise OSError(errno.EINVAL, "its second line is no salt; restore it", str(name)) from None


def _is_log(path: Path) -> bool:
    return (path / "name").exists() or any(path.glob("*.log"))


def _nearby(path: Path) -> str:
    """Where somebody may have meant: with several masters each has a log in a sub-directory."""
    inside = sorted(child.name for child in path.iterdir() if child.is_dir() and _is_log(child))
    return f", but there are some inside, {', '.join(inside)}: check each" if inside else ""


def _check(files: Directory, salt: int) -> Report:
    report = Report()
    newest: dict[tuple[str, bytes], list[tuple[int, int]]] = {}  # place -> (generation, bytes)
    graves: list[Grave] = []
    for number in files.numbers():
        fd = files.open(number)
        try:
            one = FileReport(files.file(number).name, files.size(fd))
            report.files.append(one)
            for found in scan(files, fd, salt):
                if isinstance(found, Damage):
                    _note_damage(one, found)
                    continue
                one.records += 1
                graves += found.graves
                if found.head.kind is Kind.VALUE and _value_counts(files, fd, found, one):
                    entry = (found.head.generation, found.head.value_bytes)
                    newest.setdefault((found.head.tenant, found.head.key), []).append(entry)
        finally:
            files.close(fd)
    _count(report, newest, graves)
    return report


def _value_counts(files: Directory, fd: int, found: Found, one: FileReport) -> bool:
    if value_is_good(files, fd, found):
        return True
    one.bad_values += 1
    one.damaged.append(
        f"at {found.position}: the value of {found.head.key!r} does not match its CRC32C (a read is a miss)"
    )
    return False


def _note_damage(one: FileReport, damage: Damage) -> None:
    if damage.tail:
        one.cut_bytes = damage.bytes
    else:
        one.damaged.append(
            f"at {damage.position}: {damage.bytes} bytes are no record: {damage.why} (skipped)"
        )


def _count(
    report: Report, newest: dict[tuple[str, bytes], list[tuple[int, int]]], graves: list[Grave]
) -> None:
    by_place: dict[tuple[str, bytes], list[Grave]] = {}
    for grave in graves:
        if not grave.behalf:
            by_place.setdefault((grave.tenant, grave.key), []).append(grave)
    report.tombstones = len(set(graves))
    for place, records in newest.items():
        alive = {
            generation: size
            for generation, size in records
            if not any(covers(grave, generation) for grave in by_place.get(place, ()))
        }
        report.dead += len(records) - (1 if alive else 0)
        if alive:
            report.live += 1
            report.live_bytes += alive[max(alive)]
