"""A directory as L3: one file an object, for a shared file system or a single machine without a store.

    get, put, match --> jobs --> `call_threads` (a file system may hang) --> `page_files` (what is where, and how much)

Every read is of a whole file and checks its CRC32C, ranged reads too; several ranges of one object in a row cost one read.
"""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from forebay.store.backend import Capabilities, GetItem, Health, PutItem, Status, StoreUse
from forebay.store.backends.call_threads import CallThreads, Job, Scratch
from forebay.store.backends.items import target_of, value_of
from forebay.store.backends.page_files import PageFiles
from forebay.store.client.channel import Bytes

THREADS = 4
OPEN_S = 10.0
HEALTH_S = 1.0
USE_S = 2.0
CLEAR_GRACE_S = 1.0  # for the file that it is at when the time is over


class DirectoryStore:
    """A `PageStore` in ``directory``, of at most ``size`` bytes of files, leaving ``free`` bytes of the file system alone.

    Raises ``OSError`` if the directory cannot be made or read, or the file system does not answer.
    """

    capabilities = Capabilities(hints=False, ranged_reads=False, lent_memory=False)

    def __init__(self, directory: Path, size: int, free: int = 0) -> None:
        self._threads = CallThreads(THREADS)
        opened = self._threads.run(
            [Job(lambda job, scratch: _open(directory, size, free), None)], OPEN_S
        )[0]
        if opened is None:
            raise TimeoutError(
                f"{directory}: the file system does not answer within {OPEN_S:.0f} s"
            )
        if isinstance(opened, OSError):
            raise opened
        self.files = opened

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes],
        *,
        hint: bool,
        timeout_s: float,
        group: bytes = b"",
    ) -> int:
        deadline = time.monotonic() + timeout_s

        def match(job: Job[int], scratch: Scratch) -> int:
            for index, key in enumerate(keys):
                if time.monotonic() > deadline:
                    return 0
                if not all(self.files.path(key + part).exists() for part in parts or (b"",)):
                    return index
            return len(keys)

        return self._threads.run([Job(match, 0)], timeout_s)[0]

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]:
        jobs = [
            _get(self.files, key, list(some))
            for key, some in itertools.groupby(items, key=lambda item: item.key)
        ]
        return [status for statuses in self._threads.run(jobs, timeout_s) for status in statuses]

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        return self._threads.run([_put(self.files, item) for item in items], timeout_s)

    def health(self) -> Health:
        def look(job: Job[Health], scratch: Scratch) -> Health:
            files = self.files
            try:
                free = files.free_bytes()
            except OSError as error:
                return Health(False, f"{files.root}: {error.strerror}")
            return Health(
                True,
                f"{files.count} objects, {files.used} of {files.size} bytes, {free} bytes free",
            )

        late = Health(
            False, f"{self.files.root}: the file system does not answer within {HEALTH_S:.0f} s"
        )
        return self._threads.run([Job(look, late)], HEALTH_S)[0]

    def use(self) -> StoreUse:
        """Counted on disk, since other processes write here too."""

        def look(job: Job[StoreUse], scratch: Scratch) -> StoreUse:
            objects, used = self.files.counted()
            return StoreUse({"objects": objects, "ssd_bytes": self.files.size, "ssd_used": used})

        return self._threads.run([Job(look, StoreUse())], USE_S)[0]

    def clear(self, parts: Sequence[bytes], timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        return self._threads.run(
            [Job(lambda job, scratch: self.files.clear(parts, deadline), 0)],
            timeout_s + CLEAR_GRACE_S,
        )[0]

    def close(self) -> None:
        self._threads.close()


def _open(directory: Path, size: int, free: int) -> PageFiles | OSError:
    try:
        return PageFiles(directory, size, free)
    except OSError as error:
        return error


def _get(files: PageFiles, key: bytes, items: list[GetItem]) -> Job[list[Status]]:
    """Read an object once for all that is wanted of it."""

    def work(job: Job[list[Status]], scratch: Scratch) -> list[Status]:
        targets = [target_of(item) for item in items]
        if all(target is None for target in targets):
            return [Status.INVALID] * len(items)
        value = files.read(key, scratch)
        if isinstance(value, Status):
            return [Status.INVALID if target is None else value for target in targets]
        statuses = []
        for item, target in zip(items, targets, strict=True):
            fits = target is not None and item.offset + item.length <= len(value)
            if target is not None and fits:
                job.touch(
                    lambda target=target, item=item: _copy(  # type: ignore[misc]
                        target, value[item.offset : item.offset + item.length]
                    )
                )
            statuses.append(Status.OK if fits else Status.INVALID)
        return statuses

    return Job(work, [Status.TIMEOUT] * len(items))


def _put(files: PageFiles, item: PutItem) -> Job[Status]:
    def work(job: Job[Status], scratch: Scratch) -> Status:
        value = value_of(item)
        if value is None:
            return Status.INVALID
        if files.has(item.key, len(value)):
            return Status.EXISTS
        own = scratch.take(len(value))
        return (
            files.write(item.key, own) if job.touch(lambda: _copy(own, value)) else Status.TIMEOUT
        )

    return Job(work, Status.TIMEOUT)


def _copy(target: Bytes, source: Bytes) -> None:
    target[:] = source
