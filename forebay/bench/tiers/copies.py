"""Rates of the copies of one rank, each beside memcpy of the same pieces in the same order, in turn.

    LOAD      host pages -> device pages, by the copy engine: layer by layer, keys then values, page by page
    BACKUP    device pages -> host pages, by the copy engine
    FETCH     the store's memory -> host pages, whole pages, by a ticket: from its arrival to the final word
    STORE     host pages -> the store's memory; it has no floor, since it is also checksummed and logged

Pages are at random places of their pools. Fetches have a private store's holder on the other end, and are of pages that were put into
its memory once and have to be there still: what a fetch leases keeps its memory for seconds, so pages that were new in every round
would fill the store, and come from its disk. STORE has new pages in every round, which are removed after it.
"""

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.bench.ttft.plan import TtftError
from forebay.core.digest import ZERO
from forebay.core.messages import Backup, Copy, FetchProgress, FromWorker, PageKey, Plan, Ticket
from forebay.models.config import ModelConfig
from forebay.models.kv import KVPool
from forebay.models.kv_format import kv_format
from forebay.models.shard import shards
from forebay.observe.events import SpanRing
from forebay.observe.figures import Meter
from forebay.pages.layouts import Manifest
from forebay.pages.reader import PageReader
from forebay.runtime.compute_dtype import compute_dtype
from forebay.runtime.copy_engine import CopyEngine
from forebay.runtime.host_pool import HostPool
from forebay.runtime.page_io import PageIo
from forebay.runtime.store_access import StoreAddress, layout_of, open_for_rank
from forebay.settings import KvDType, Settings
from forebay.store.backend import PutItem, Status
from forebay.store.backends.embedded import EmbeddedStore
from forebay.store.wire.messages import Tier

PAGES = 64
POOL_PAGES = 2 * PAGES
TIMEOUT_S = 30.0

Spans = list[tuple[int, int, int]]
"""(target address, source address, bytes), in the order in which they are copied."""


@dataclass(frozen=True, slots=True)
class Work:
    """``run``: the copy; ``floor``: the same bytes by memcpy, None where there is none."""

    name: str
    run: Callable[[], None]
    floor: Spans | None


class _Rank:
    """Pools and threads of the first rank, and a store. ``part``: of pages that are there to be fetched, ``new_part``: of those that
    are put into it; ``stored``: what is fetched, in ordinary memory."""

    def __init__(self, config: ModelConfig, settings: Settings, directory: Path) -> None:
        dtype = getattr(torch, compute_dtype(config, settings))
        form = kv_format(
            settings.kv_dtype.value if settings.kv_dtype is not KvDType.AUTO else "auto", dtype
        )
        shard = shards(config, settings.pp, settings.tp)[0][0]
        self.device = KVPool(
            config, shard, POOL_PAGES, settings.page_size, dtype, torch.device("cpu"), form
        )
        self.host = HostPool(self.device, POOL_PAGES)
        self.saved = threading.Event()
        self.engine = CopyEngine(
            self.device,
            self.host,
            SpanRing("bench"),
            Meter(),
            lambda transfer, pages: self.saved.set(),
        )
        block = self.device.block
        self._process = EmbeddedStore(
            directory / "copies", dram=6 * PAGES * block.size, ssd=16 * PAGES * block.size
        )
        self.store = open_for_rank(
            StoreAddress(self._process.url, self._process.secret, self.host.lent), 0, Meter()
        )
        own = layout_of(config, settings.pp, settings.tp)
        manifest = Manifest(self.store, b"bench tiers", own)
        self.part = manifest.name(block.part)
        self.new_part = Manifest(self.store, b"new pages", own).name(block.part)
        reader = PageReader(self.store, self.host, block, own, manifest)
        self.io = PageIo(
            self.store,
            reader,
            self.host,
            self.part,
            1,
            0,
            True,
            SpanRing("bench"),
            Meter(),
            self._heard,
        )
        self.fetched = threading.Event()
        self.came = 0
        self.stored = torch.empty((PAGES, block.size), dtype=torch.uint8).fill_(1)
        self.hashes = [index.to_bytes(32, "little") for index in range(PAGES)]
        self._touch()

    def close(self) -> None:
        self.engine.stop()
        self.io.stop()
        self._process.close()

    def _heard(self, word: FromWorker) -> None:
        if isinstance(word, FetchProgress) and word.final:
            self.came = word.pages
            self.fetched.set()

    def _touch(self) -> None:
        """Every page is there before anything is measured."""
        for layer in range(self.device.layers):
            for piece in self.device.pieces(layer) + self.host.pieces(layer):
                piece.view(torch.uint8).fill_(1)

    def fill(self) -> None:
        """Put what will be fetched. Raises ``TtftError``."""
        blocks = zip(self.hashes, self.stored, strict=True)
        self.put([PutItem(hash + self.part, block.numpy().data) for hash, block in blocks])

    def put(self, items: Sequence[PutItem]) -> None:
        """Raises ``TtftError``."""
        if any(status is not Status.OK for status in self.store.put_from(items, TIMEOUT_S)):
            raise TtftError("the store did not take every page")

    def check_in_memory(self) -> None:
        """Raises ``TtftError`` if the store has moved some of what is fetched to its disk."""
        places = self._process.client.tiers([hash + self.part for hash in self.hashes])
        if any(Tier.MEMORY not in tiers for tiers in places):
            raise TtftError(
                "the store no longer had every page in memory, so it is not known what the fetches measured"
            )

    def pieces(self, copies: Sequence[Copy], to_device: bool) -> Spans:
        found = []
        for layer in range(self.device.layers):
            for above, below in zip(
                self.device.pieces(layer), self.host.pieces(layer), strict=True
            ):
                size = above[0].numel() * above.element_size()
                for copy in copies:
                    ends = above[copy.device].data_ptr(), below[copy.host].data_ptr()
                    target, source = ends if to_device else ends[::-1]
                    found.append((target, source, size))
        return found


def measure(
    config: ModelConfig,
    settings: Settings,
    rounds: int,
    directory: Path,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One row a kind of copy: GB/s of the engine and of memcpy, a value a round. Raises ``TtftError``."""
    rank = _Rank(config, settings, directory)
    try:
        return _measure(rank, rounds, say)
    finally:
        rank.close()


def _measure(rank: _Rank, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    size = PAGES * rank.host.block_bytes
    rates: dict[str, tuple[list[float], list[float]]] = {}
    rank.fill()
    for number in range(rounds):
        say(f"copies: round {number + 1} of {rounds}")
        for work in _works(rank, random.Random(f"copies/{number}"), number):
            own, floor = rates.setdefault(work.name, ([], []))
            own.append(size / _seconds(work.run) / 1e9)
            if work.floor is not None:
                floor.append(size / _memcpy_s(work.floor) / 1e9)
        rank.store.clear([rank.new_part], TIMEOUT_S)  # it holds a few rounds' pages
        rank.check_in_memory()
    return [
        {"copy": name, "gb_s": own, "memcpy_gb_s": floor, "pages": PAGES}
        for name, (own, floor) in rates.items()
    ]


def _works(rank: _Rank, dice: random.Random, number: int) -> list[Work]:
    def pages() -> list[int]:
        return dice.sample(range(POOL_PAGES), PAGES)

    copies = tuple(Copy(device, host) for device, host in zip(pages(), pages(), strict=True))
    keys = [PageKey(host, hash) for host, hash in zip(pages(), rank.hashes, strict=True)]

    def load() -> None:
        gate = rank.engine.load(Plan(1, number, (), (), (), ZERO, loads=copies))
        assert gate is not None
        gate.wait(rank.device.layers - 1)

    def back_up() -> None:
        rank.saved.clear()
        rank.engine.back_up(Backup(number, copies))
        rank.saved.wait(TIMEOUT_S)

    def store() -> None:
        rank.put([PutItem(key.hash + rank.new_part, rank.host.block(key.host)) for key in keys])

    def fetch() -> None:
        rank.fetched.clear()
        rank.io.take(Ticket(1, number, tuple(keys)))
        if not rank.fetched.wait(TIMEOUT_S) or rank.came != len(keys):
            raise TtftError("the store did not give every page back")

    blocks = torch.frombuffer(rank.host.block(0), dtype=torch.uint8).data_ptr()
    size = rank.host.block_bytes
    whole = [
        (blocks + key.host * size, rank.stored[index].data_ptr(), size)
        for index, key in enumerate(keys)
    ]
    return [
        Work("load", load, rank.pieces(copies, to_device=True)),
        Work("backup", back_up, rank.pieces(copies, to_device=False)),
        Work("store", store, None),
        Work("fetch", fetch, whole),
    ]


def _memcpy_s(spans: Spans) -> float:
    """Seconds of the bytes alone: what as many calls for no bytes take is subtracted."""
    move = ctypes.memmove

    def whole() -> None:
        for target, source, size in spans:
            move(target, source, size)

    def empty() -> None:
        for target, source, _ in spans:
            move(target, source, 0)

    return _seconds(whole) - _seconds(empty)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
