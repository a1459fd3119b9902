"""The one thread that appends to the log, in the order it is told to: what arrives is on its way to the SSD at once, and nothing waits
for more to come.

    loop thread --Append, BuryJob, ForgetJob--> queue --> [write, sync as --fsync says] --Report--> loop thread

``fsync``: ALWAYS syncs each batch before it is reported (and puts wait for the report), BATCH every 0.2 s or 32 MiB before it is
reported, NEVER leaves it to the disk. Removals are synced before they are reported unless NEVER.

When the disk fails (ENOSPC, EIO) the state says so, appends are declined, removals are kept, and it tries again every second.
"""

import errno
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from forebay.store.holder.log.log import Item, LogFull, SsdLog
from forebay.store.holder.log.record import BLOCK_BYTES, padded
from forebay.store.holder.memory import Entry
from forebay.store.wire.messages import Grave, HeldSsd

BATCH_BYTES = 8 << 20
SYNC_EVERY_S = 0.2
SYNC_EVERY_BYTES = 32 << 20
RETRY_S = 1.0


class Fsync(StrEnum):
    ALWAYS = "always"
    BATCH = "batch"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Append:
    """Log this entry's bytes; ``value`` is the segment's memory."""

    entry: Entry
    value: memoryview


@dataclass(frozen=True, slots=True)
class BuryJob:
    op: int
    graves: list[Grave]


@dataclass(frozen=True, slots=True)
class ForgetJob:
    behalf: str


Job = Append | BuryJob | ForgetJob


@dataclass(slots=True)
class Report:
    """What became of jobs. ``failed``: not logged; the state says why, or the bytes did not match their CRC. ``lost``: left the log,
    after it was logged if both are said of one entry."""

    logged: list[Entry] = field(default_factory=list)
    failed: list[Entry] = field(default_factory=list)
    lost: list[HeldSsd] = field(default_factory=list)
    buried: list[int] = field(default_factory=list)
    state: str = "ok"

    def empty(self) -> bool:
        return not (self.logged or self.failed or self.lost or self.buried)


class LogWriter:
    """``report`` is called in the writer's thread. ``close(drain_s)`` writes what is queued first."""

    def __init__(self, log: SsdLog, fsync: Fsync, report: Callable[[Report], None]) -> None:
        self._log = log
        self._fsync = fsync
        self._report = report
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._owed: list[BuryJob] = []  # removals that the disk refused
        self._unsaid: list[BuryJob] = []  # those that were written and not reported yet
        self._unreported = Report()
        self._unsynced_bytes = 0
        self._unsynced_since = 0.0
        self._broken_since = 0.0
        self._tried_at = 0.0
        self.state = self._last_state = "ok"
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, drain_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(drain_s)

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._take()
            self._work(batch)
            self._flush(force=ended)
        self._log_close_sync()

    def _take(self) -> tuple[list[Job], bool]:
        """The next jobs, as many as are there up to a batch; nothing if it is time to sync or to try again."""
        batch: list[Job] = []
        size = 0
        try:
            job = self._jobs.get(timeout=self._patience())
            while job is not None:
                batch.append(job)
                size += len(job.value) if isinstance(job, Append) else 0
                if size >= BATCH_BYTES or len(batch) >= 1024:
                    return batch, False
                job = self._jobs.get_nowait()
            return batch, True
        except queue.Empty:
            return batch, False

    def _patience(self) -> float | None:
        if self._unsynced_since:
            return max(0.0, self._unsynced_since + SYNC_EVERY_S - time.monotonic())
        return RETRY_S if self._broken_since else None

    def _work(self, batch: list[Job]) -> None:
        """In order; consecutive appends together."""
        if self._broken_since and not self._recovered():
            self._decline(batch)
            return
        appends: list[Append] = []
        for job in batch:
            if isinstance(job, Append):
                appends.append(job)
                continue
            self._append(appends)
            appends = []
            if isinstance(job, BuryJob):
                self._bury(job)
            else:
                self._log.forget_kept(job.behalf)
        self._append(appends)

    def _append(self, appends: list[Append]) -> None:
        wanted = [job for job in appends if not job.entry.gone and not job.entry.buried]
        self._unreported.failed += [
            job.entry for job in appends if job.entry.gone or job.entry.buried
        ]
        if not wanted:
            return
        if self._broken_since:
            self._unreported.failed += [job.entry for job in wanted]
            return
        items = [
            Item(job.entry.tenant, job.entry.key, job.entry.generation, job.entry.crc, job.value)
            for job in wanted
        ]
        size = sum(BLOCK_BYTES + padded(len(item.value)) for item in items)
        good = self._try(lambda: self._make_room_and_append(items, size))
        if good is None:
            self._unreported.failed += [job.entry for job in wanted]
            return
        self._note_unsynced(size)
        for job, fine in zip(wanted, good, strict=True):
            (self._unreported.logged if fine else self._unreported.failed).append(job.entry)

    def _make_room_and_append(self, items: list[Item], size: int) -> list[bool]:
        if size <= self._log.capacity // 2:
            self._log.make_room(size, self._unreported.lost)
            return self._log.append(items)
        good = []
        for item in items:
            try:
                self._log.make_room(BLOCK_BYTES + padded(len(item.value)), self._unreported.lost)
                good += self._log.append([item])
            except LogFull:
                good.append(False)
        return good

    def _bury(self, job: BuryJob) -> None:
        if self._broken_since or self._try(lambda: self._bury_now(job.graves)) is None:
            self._owed.append(job)
            return
        self._note_unsynced(BLOCK_BYTES)
        self._unsaid.append(job)

    def _bury_now(self, graves: list[Grave]) -> list[bool]:
        self._log.bury(graves, self._unreported.lost)
        return []

    def _try(self, action: Callable[[], list[bool]]) -> list[bool] | None:
        """Run a write; on a full disk once more after giving back the oldest file. None: it failed and the state says so."""
        for attempt in range(2):
            try:
                return action()
            except OSError as error:
                self._log.abandon_active()
                if error.errno == errno.ENOSPC and attempt == 0:
                    lost = self._log.drop_oldest()
                    self._unreported.lost += lost
                    if lost:
                        continue
                self._break(error)
                return None
        return None

    def _break(self, error: OSError) -> None:
        """What was written and not reported yet may not be on the disk: it is not believed to be, and done again later."""
        report = self._unreported
        self._log.disown([(entry.tenant, entry.key, entry.generation) for entry in report.logged])
        report.failed += report.logged
        report.logged = []
        self._owed += self._unsaid
        self._unsaid = []
        self._broken_since = self._tried_at = time.monotonic()
        self.state = f"DRAM only: {error.strerror or error}"

    def _recovered(self) -> bool:
        """Try what is owed, or an empty tombstone list, at most once a second."""
        if time.monotonic() < self._tried_at + RETRY_S:
            return False
        self._tried_at = time.monotonic()
        probe = Grave("", b"", 0, True)
        owed = [grave for job in self._owed for grave in job.graves]
        try:
            self._log.bury(owed or [probe], self._unreported.lost, always=not owed)
            self._log.sync()
        except OSError as error:
            self._log.abandon_active()
            self._log.disown([])
            self.state = f"DRAM only: {error.strerror or error}"
            return False
        self._unsaid += self._owed
        self._owed, self._broken_since, self.state = [], 0.0, "ok"
        return True

    def _decline(self, batch: list[Job]) -> None:
        for job in batch:
            if isinstance(job, Append):
                self._unreported.failed.append(job.entry)
            elif isinstance(job, BuryJob):
                self._owed.append(job)
            else:
                self._log.forget_kept(job.behalf)

    def _note_unsynced(self, size: int) -> None:
        self._unsynced_bytes += size
        self._unsynced_since = self._unsynced_since or time.monotonic()

    def _flush(self, *, force: bool) -> None:
        """Sync if it is due, then report; with BATCH what is not synced yet is not reported yet."""
        waited = (
            bool(self._unsynced_since) and time.monotonic() >= self._unsynced_since + SYNC_EVERY_S
        )
        asked = force or self._fsync is Fsync.ALWAYS or any([job.op for job in self._unsaid])
        if self._unsynced_since and self._fsync is not Fsync.NEVER:
            if not (asked or waited or self._unsynced_bytes >= SYNC_EVERY_BYTES):
                self._report_lost()
                return
            try:
                self._log.sync()
            except OSError as error:
                self._log.abandon_active()
                self._break(error)
        report = self._unreported
        report.buried = [job.op for job in self._unsaid if job.op]
        self._unsaid = []
        self._unsynced_bytes, self._unsynced_since = 0, 0.0
        report.state = self.state
        if not report.empty() or report.state != self._last_state:
            self._last_state = report.state
            self._unreported = Report()
            self._report(report)

    def _report_lost(self) -> None:
        """What left the log is told at once, before anyone counts on it; only what was not yet said to be there waits for that."""
        if not self._unreported.lost:
            return
        unsaid = {(one.tenant, one.key, one.generation) for one in self._unreported.logged}
        waits = [
            held
            for held in self._unreported.lost
            if (held.tenant, held.key, held.generation) in unsaid
        ]
        told = [
            held
            for held in self._unreported.lost
            if (held.tenant, held.key, held.generation) not in unsaid
        ]
        self._unreported.lost = waits
        if told:
            self._report(Report(lost=told, state=self._last_state))

    def _log_close_sync(self) -> None:
        try:
            self._log.sync()
        except OSError as error:
            self._break(error)
