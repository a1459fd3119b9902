"""Reads pages out of the store into host pages, whatever grid wrote them.

    our own part                        straight into the host page
    parts of another grid, long runs    straight into the host page
    parts of another grid, short runs   one read of all that lies between them, then copied from memory

A page has come when every run of it that this rank needs has come. Pages of one prefix may have been written by different grids.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from forebay.pages.block import Block, Run
from forebay.pages.layouts import Layout, Manifest, match_prefix
from forebay.store.backend import GetItem, PageStore, Status

FEW_RUNS = 4
LONG_RUN_BYTES = 64 << 10
SCRATCH_BYTES = 16 << 20


class WantedPage(Protocol):
    """``host``: the host page that it is read into. ``group``: the hash of its prefix's first page."""

    @property
    def host(self) -> int: ...

    @property
    def hash(self) -> bytes: ...

    @property
    def group(self) -> bytes: ...


class HostBlocks(Protocol):
    """Host pages of a rank, each one block."""

    @property
    def block_bytes(self) -> int: ...

    def block(self, page: int) -> memoryview:
        """The page's bytes, writable."""


@dataclass(frozen=True, slots=True)
class _Source:
    """One stored part that holds some of our own. ``runs`` in the order of both blocks."""

    name: bytes
    runs: tuple[Run, ...]

    @property
    def is_direct(self) -> bool:
        return len(self.runs) <= FEW_RUNS or self.runs[0].length >= LONG_RUN_BYTES

    @property
    def begin(self) -> int:
        return self.runs[0].source

    @property
    def span_bytes(self) -> int:
        return self.runs[-1].source + self.runs[-1].length - self.begin

    @property
    def scratch_bytes(self) -> int:
        return 0 if self.is_direct else self.span_bytes


class _Batch:
    """One call to the store: the reads of some pages, and what is to be copied once they have come."""

    def __init__(self) -> None:
        self.items: list[GetItem] = []
        self._owners: list[int] = []
        self._copies: list[tuple[int, _Source, bytearray, memoryview]] = []

    def add(self, index: int, page: WantedPage, source: _Source, block: memoryview) -> None:
        """Page number ``index`` of the batch wants what ``source`` has of it."""
        key = page.hash + source.name
        if source.is_direct:
            reads = [
                GetItem(key, r.source, r.length, block[r.target : r.target + r.length], page.group)
                for r in source.runs
            ]
        else:
            scratch = bytearray(source.span_bytes)
            reads = [GetItem(key, source.begin, source.span_bytes, scratch, page.group)]
            self._copies.append((index, source, scratch, block))
        self.items += reads
        self._owners += [index] * len(reads)

    def settle(self, pages: int, statuses: Sequence[Status]) -> tuple[int, Status]:
        """How many of ``pages`` came, from the front, and what became of the next one."""
        bad = (
            (owner, status)
            for owner, status in zip(self._owners, statuses, strict=True)
            if status is not Status.OK
        )
        came, status = next(bad, (pages, Status.OK))
        for index, source, scratch, block in self._copies:
            if index < came:
                _scatter(source, scratch, block)
        return came, status


class PageReader:
    """Of one rank. ``block``: how its own part of a page lies in ``host``. Thread-safe."""

    def __init__(
        self, store: PageStore, host: HostBlocks, block: Block, own: Layout, manifest: Manifest
    ) -> None:
        assert block.size == host.block_bytes, (block.size, host.block_bytes)
        self._store = store
        self._host = host
        self._block = block
        self._own = own
        self._manifest = manifest
        self._latest = own  # what a page was read in last: the next one is in it too, most likely

    def read(self, pages: Sequence[WantedPage], timeout_s: float) -> int:
        """How many of ``pages`` came, from the front. Bytes of the others' host pages are undefined."""
        deadline = time.monotonic() + timeout_s
        done = 0
        while done < len(pages) and (came := self._read_some(pages[done:], deadline)):
            done += came
        return done

    def match(self, pages: Sequence[WantedPage], timeout_s: float) -> int:
        """How many leading pages of one prefix the store has, as far as this rank needs them. They will be read at once."""
        hashes, group = [page.hash for page in pages], pages[0].group if pages else b""
        return match_prefix(
            self._store,
            hashes,
            group,
            self._own,
            self._manifest,
            timeout_s,
            needed=self._block.part,
        )

    def _read_some(self, pages: Sequence[WantedPage], deadline: float) -> int:
        """Pages from the front, as many as come in one layout; 0 if the first is there in none, or the store does not give it."""
        for layout in self._layouts(deadline):
            came, status = self._read_as(layout, pages, deadline)
            if came:
                self._latest = layout
            if came or status is not Status.NOT_FOUND:
                return came
        return 0

    def _layouts(self, deadline: float) -> Iterator[Layout]:
        """What to try, the likeliest first."""
        latest = self._latest
        yield latest
        if latest != self._own:
            yield self._own
        for layout in self._manifest.others(deadline - time.monotonic()):
            if layout != latest:
                yield layout

    def _read_as(
        self, layout: Layout, pages: Sequence[WantedPage], deadline: float
    ) -> tuple[int, Status]:
        left = deadline - time.monotonic()
        if left <= 0:
            return 0, Status.TIMEOUT
        sources = self._sources(layout)
        scratch_bytes = sum(source.scratch_bytes for source in sources)
        if scratch_bytes:
            pages = pages[: max(SCRATCH_BYTES // scratch_bytes, 1)]
        batch = _Batch()
        for index, page in enumerate(pages):
            for source in sources:
                batch.add(index, page, source, self._host.block(page.host))
        return batch.settle(len(pages), self._store.get_into(batch.items, left))

    def _sources(self, layout: Layout) -> list[_Source]:
        """Parts of ``layout`` that hold some of our own."""
        found = [
            _Source(self._manifest.name(part), self._block.of(part).runs_into(self._block.part))
            for part in layout.parts
        ]
        return [source for source in found if source.runs]


def _scatter(source: _Source, scratch: bytearray, block: memoryview) -> None:
    view = memoryview(scratch)
    for run in source.runs:
        at = run.source - source.begin
        block[run.target : run.target + run.length] = view[at : at + run.length]
