"""The `PageStore` of a Mooncake cluster.

    get: batch of names --Mooncake--> registered memory of a thread --copied and checked in one pass--> buffers
    put: buffers --copied and summed in one pass--> registered memory of a thread --Mooncake--> segments

The detour over a thread's memory is what makes a call that stands still harmless: nothing writes into a host page
after its time-out. Of two writers of one name at once both are told OK; keys name their content, so that is true.
"""

import contextlib
import itertools
import re
import time
import urllib.request
from collections.abc import Iterator, Sequence

from forebay.store.backend import Capabilities, GetItem, Health, PutItem, Status, StoreUse
from forebay.store.backends.call_threads import CallThreads, Job, Scratch
from forebay.store.backends.items import target_of, value_of
from forebay.store.backends.mooncake.client import Client, RegisteredScratch, status_of
from forebay.store.backends.mooncake.url import MooncakeUrl
from forebay.store.backends.sealed import TRAILER_BYTES, is_whole, trailer_of
from forebay.store.client.channel import Bytes
from forebay.store.native.library import copy_crc32c

THREADS = 4
OPEN_S = 15.0
HEALTH_S = 1.0
USE_S = 2.0
CLOSE_S = 5.0
CALL_BYTES = 32 << 20  # of one call to Mooncake, hence of a thread's memory
CALL_KEYS = 256
_NAMES = "forebay/"
_ALIGN = 64
_FIGURES = {
    "master_key_count": "objects",
    "master_total_capacity_bytes": "dram_bytes",
    "master_allocated_bytes": "dram_used",
}


class MooncakeStore:
    """Thread-safe; calls release the GIL. Raises ``OSError`` if the cluster cannot be had; the text says why."""

    capabilities = Capabilities(
        hints=False, ranged_reads=False, lent_memory=False, tells_losers=False
    )

    def __init__(self, url: MooncakeUrl) -> None:
        self._url = url
        opener = CallThreads(1, "mooncake-open")
        opened = opener.run([Job(lambda job, scratch: _opened(url), None)], OPEN_S)[0]
        opener.close()
        if opened is None:
            raise TimeoutError(f"{url.master}: no answer within {OPEN_S:.0f} s")
        if isinstance(opened, OSError):
            raise OSError(f"{url.master}: {opened.strerror or opened}") from opened
        self._client = opened
        self._threads = CallThreads(THREADS, "mooncake", lambda: RegisteredScratch(opened))
        # Questions have threads of their own: they must not stand behind bytes.
        self._questions = CallThreads(THREADS, "mooncake-ask")

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes],
        *,
        hint: bool,
        timeout_s: float,
        group: bytes = b"",
    ) -> int:
        """Mooncake renews the lease of what it is asked for, so a prefix that is asked for again and again stays."""
        deadline = time.monotonic() + timeout_s
        wanted = parts or (b"",)

        def match(job: Job[int], scratch: Scratch) -> int:
            matched = 0
            for some in _slices(keys, max(CALL_KEYS // len(wanted), 1)):
                if time.monotonic() > deadline:
                    return 0
                names = [_name(group, key + part) for key in some for part in wanted]
                codes = self._client.exist(names)
                if any(code < 0 for code in codes):
                    return 0
                whole = [all(codes[i : i + len(wanted)]) for i in range(0, len(codes), len(wanted))]
                leading = len([*itertools.takewhile(bool, whole)])
                matched += leading
                if leading < len(some):
                    break
            return matched

        return self._questions.run([Job(match, 0)], timeout_s)[0]

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]:
        statuses = [Status.INVALID] * len(items)
        targets = {
            i: target for i, item in enumerate(items) if (target := target_of(item)) is not None
        }
        groups = [*_batches({i: item_bytes(items[i]) for i in targets})]
        jobs = [self._get([items[i] for i in some], [targets[i] for i in some]) for some in groups]
        for some, answer in zip(groups, self._threads.run(jobs, timeout_s), strict=True):
            for index, status in zip(some, answer, strict=True):
                statuses[index] = status
        return statuses

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        statuses = [Status.INVALID] * len(items)
        values = {i: value for i, item in enumerate(items) if (value := value_of(item)) is not None}
        groups = [*_batches({i: len(value) for i, value in values.items()})]
        jobs = [self._put([items[i] for i in some], [values[i] for i in some]) for some in groups]
        for some, answer in zip(groups, self._threads.run(jobs, timeout_s), strict=True):
            for index, status in zip(some, answer, strict=True):
                statuses[index] = status
        return statuses

    def health(self) -> Health:
        def ask(job: Job[int], scratch: Scratch) -> int:
            return self._client.exist([_NAMES + "health"])[0]

        code = self._questions.run([Job(ask, -1)], HEALTH_S)[0]
        if code < 0:
            return Health(False, f"{self._url.master}: the master does not answer (code {code})")
        return Health(True, f"{self._url.master}: the master answers")

    def use(self) -> StoreUse:
        """Of the whole cluster, as its master's metrics say; empty where these cannot be reached."""

        def look(job: Job[StoreUse], scratch: Scratch) -> StoreUse:
            where = f"http://{self._url.master.host}:{self._url.metrics_port}/metrics"
            with urllib.request.urlopen(where, timeout=USE_S) as answer:
                lines = answer.read(1 << 20).decode(errors="replace").splitlines()
            said = dict(line.rsplit(" ", 1) for line in lines if " " in line and line[0] != "#")
            return StoreUse(
                {ours: int(float(said[it])) for it, ours in _FIGURES.items() if it in said}
            )

        with contextlib.suppress(OSError):
            return self._questions.run([Job(look, StoreUse())], USE_S)[0]
        return StoreUse()

    def clear(self, parts: Sequence[bytes], timeout_s: float) -> int:
        def work(job: Job[int], scratch: Scratch) -> int:
            return sum(
                max(self._client.remove_matching(f"^{re.escape(_NAMES)}.*{part.hex()}$"), 0)
                for part in parts
            )

        return self._questions.run([Job(work, 0)], timeout_s)[0]

    def close(self) -> None:
        """Its own closing may stand for seconds where the master is gone; then it is left to itself."""
        self._threads.close()
        self._questions.run([Job(lambda job, scratch: self._client.close(), None)], CLOSE_S)
        self._questions.close()

    def _get(self, items: Sequence[GetItem], targets: Sequence[Bytes]) -> Job[list[Status]]:
        def work(job: Job[list[Status]], scratch: Scratch) -> list[Status]:
            names = [_name(item.group, item.key) for item in items]
            # A value's whole length is known only where all of it is wanted; else it is asked for.
            sizes = [item_bytes(item) + TRAILER_BYTES for item in items]
            codes = self._read(names, sizes, scratch)
            other = [i for i, code in enumerate(codes) if code[0] in (-600, -800)]
            answers = [_settled(job, *each) for each in zip(items, targets, codes, strict=True)]
            for i in other:
                length = self._client.size(names[i])
                code = (
                    self._read([names[i]], [length], scratch)[0] if length > 0 else (length, None)
                )
                answers[i] = _settled(job, items[i], targets[i], code)
            return answers

        return Job(work, [Status.TIMEOUT] * len(items))

    def _read(
        self, names: Sequence[str], sizes: Sequence[int], scratch: Scratch
    ) -> list[tuple[int, Bytes | None]]:
        """Code and value of each; values lie in ``scratch`` until its next use."""
        regions = _regions(sizes, scratch)
        codes = self._client.get(names, regions)
        return [
            (code, region[:code] if code >= 0 else None)
            for code, region in zip(codes, regions, strict=True)
        ]

    def _put(self, items: Sequence[PutItem], values: Sequence[Bytes]) -> Job[list[Status]]:
        def work(job: Job[list[Status]], scratch: Scratch) -> list[Status]:
            names = [_name(item.group, item.key) for item in items]
            regions = _regions([len(value) + TRAILER_BYTES for value in values], scratch)
            answers: list[Status] = [Status.UNAVAILABLE] * len(items)
            new = []
            for i, code in enumerate(self._client.exist(names)):
                if code > 0 and self._is_there(names[i], regions[i].nbytes):
                    answers[i] = Status.EXISTS
                elif code >= 0:
                    new.append(i)
                else:
                    answers[i] = status_of(code)

            def seal() -> None:
                for i in new:
                    page = regions[i][: len(values[i])]
                    trailer = trailer_of(items[i].key, copy_crc32c(page, values[i]))
                    regions[i][len(page) :].data[:] = trailer

            if not job.touch(seal):
                return [Status.TIMEOUT] * len(items)
            codes = self._client.put([names[i] for i in new], [regions[i] for i in new])
            for i, code in zip(new, codes, strict=True):
                answers[i] = status_of(code) if code else Status.OK
            return answers

        return Job(work, [Status.TIMEOUT] * len(items))

    def _is_there(self, name: str, length: int) -> bool:
        """With equal length; an object of another one is removed, so that it can be put."""
        there = self._client.size(name)
        if there > 0 and there != length:
            self._client.remove(name)
        return there == length


def item_bytes(item: GetItem) -> int:
    """Of the value, if all of it is wanted."""
    return item.offset + item.length


def _opened(url: MooncakeUrl) -> Client | OSError:
    try:
        return Client(url)
    except OSError as error:
        return error


def _name(group: bytes, key: bytes) -> str:
    """Mooncake's keys are text."""
    return f"{_NAMES}{group.hex()}/{key.hex()}"


def _slices(keys: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    for first in range(0, len(keys), size):
        yield keys[first : first + size]


def _batches(sizes: dict[int, int]) -> Iterator[list[int]]:
    """Indices of neighbours of at most `CALL_BYTES` and `CALL_KEYS` together, one at least."""
    batch: list[int] = []
    total = 0
    for index, size in sizes.items():
        if batch and (total + size > CALL_BYTES or len(batch) == CALL_KEYS):
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += size
    if batch:
        yield batch


def _regions(sizes: Sequence[int], scratch: Scratch) -> list[Bytes]:
    """A region for each, in one piece of the thread's memory."""
    starts = [*itertools.accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0)]
    whole = scratch.take(starts[-1])
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _settled(
    job: Job[list[Status]], item: GetItem, target: Bytes, code: tuple[int, Bytes | None]
) -> Status:
    """Check what came and copy what is wanted of it."""
    length, value = code
    if value is None:
        return status_of(length)
    size = length - TRAILER_BYTES
    if size < 0:
        return Status.CHECKSUM
    if item_bytes(item) > size:
        return Status.INVALID
    return _copied(job, item, target, value[:size], bytes(value[size:]))


def _copied(
    job: Job[list[Status]], item: GetItem, target: Bytes, page: Bytes, trailer: bytes
) -> Status:
    status = Status.TIMEOUT

    def copy() -> None:
        nonlocal status
        is_all = len(page) == item.length
        into = target if is_all else page.copy()
        is_good = is_whole(item.key, copy_crc32c(into, page), trailer)
        if is_good and not is_all:
            target[:] = into[item.offset : item_bytes(item)]
        status = Status.OK if is_good else Status.CHECKSUM

    job.touch(copy)
    return status
