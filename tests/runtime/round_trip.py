"""One rank's pages through all tiers, as its process does it, without the process: `python -m tests.runtime.round_trip MODEL KV_DTYPE
DIRECTORY` reads what `write` has stored and prints the digest of every layer's keys, values and scales."""

import hashlib
import sys
import threading
from pathlib import Path

import torch

from forebay.core.messages import (
    Backup,
    Copy,
    FetchProgress,
    FromWorker,
    PageKey,
    Plan,
    Store,
    StoreDone,
    Ticket,
)
from forebay.models.config import load_config
from forebay.models.kv import KVPool, page_block
from forebay.models.kv_format import kv_format
from forebay.models.shard import shards
from forebay.observe.events import SpanRing
from forebay.observe.figures import Meter
from forebay.pages.layouts import Manifest
from forebay.pages.reader import PageReader
from forebay.runtime.copy_engine import CopyEngine
from forebay.runtime.host_pool import HostPool
from forebay.runtime.page_io import PageIo
from forebay.runtime.store_access import layout_of
from forebay.store.backends.directory import DirectoryStore
from forebay.store.backends.guarded import GuardedStore

PAGES = 5
PAGE_SIZE = 16
NAMESPACE = b"round trip"
DEVICE = torch.device("cpu")


class Tiers:
    """Device pages, host pages and a directory, joined by the shipped threads; every order is waited for."""

    def __init__(self, model: Path, kv_dtype: str, directory: Path) -> None:
        config = load_config(model)
        shard = shards(config, 1, 1)[0][0]
        form = kv_format(kv_dtype, torch.bfloat16)
        ring = SpanRing("round trip")
        self._said: list[FromWorker] = []
        self._heard = threading.Event()
        self.device = KVPool(config, shard, PAGES, PAGE_SIZE, torch.bfloat16, DEVICE, form)
        self.host = HostPool(self.device, PAGES)
        meter = Meter()
        self.copier = CopyEngine(
            self.device, self.host, ring, meter, lambda transfer, pages: self._heard.set()
        )
        store = GuardedStore(DirectoryStore(directory, 1 << 30), print)
        own = layout_of(config, 1, 1)
        block = page_block(config, shard, PAGE_SIZE, form)
        manifest = Manifest(store, NAMESPACE, own)
        reader = PageReader(store, self.host, block, own, manifest)
        self.io = PageIo(
            store, reader, self.host, manifest.name(block.part), 1, 0, True, ring, meter, self._say
        )

    def _say(self, message: FromWorker) -> None:
        self._said.append(message)
        self._heard.set()

    def wait(self) -> FromWorker | None:
        assert self._heard.wait(60)
        self._heard.clear()
        return self._said.pop() if self._said else None

    def close(self) -> None:
        self.copier.stop()
        self.io.stop()

    def digest(self, pages: list[int]) -> str:
        """Over every layer's keys, values and scales of ``pages``, in their order."""
        digest = hashlib.sha256()
        for layer in range(self.device.layers):
            for piece in self.device.pieces(layer):
                for page in pages:
                    digest.update(piece[page].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def keys(host_pages: list[int]) -> tuple[PageKey, ...]:
    return tuple(
        PageKey(host, hashlib.sha256(bytes([index])).digest())
        for index, host in enumerate(host_pages)
    )


def write(model: Path, kv_dtype: str, directory: Path) -> str:
    """Random bytes in all pages, down to the store; the digest of what the device holds."""
    tiers = Tiers(model, kv_dtype, directory)
    generator = torch.Generator().manual_seed(3)
    for layer in range(tiers.device.layers):
        for piece in tiers.device.pieces(layer):
            flat = piece.view(-1).view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))
    order = [3, 1, 4, 0, 2]
    tiers.copier.back_up(Backup(1, tuple(Copy(device, host) for device, host in enumerate(order))))
    tiers.wait()
    tiers.io.take(Store(1, 1, keys(order)))
    assert tiers.wait() == StoreDone(1, 0, 1, b"\1" * PAGES)
    tiers.close()
    return tiers.digest(list(range(PAGES)))


def read(model: Path, kv_dtype: str, directory: Path) -> str:
    """Back to the device, over other host and device pages than it came from."""
    tiers = Tiers(model, kv_dtype, directory)
    host, device = [2, 0, 3, 4, 1], [4, 2, 0, 1, 3]
    tiers.io.take(Ticket(1, 1, keys(host)))
    assert tiers.wait() == FetchProgress(1, 0, 1, PAGES, True)
    gate = tiers.copier.load(
        Plan(1, 1, (), (), (), b"", tuple(Copy(*pair) for pair in zip(device, host, strict=True)))
    )
    assert gate is not None
    gate.wait(tiers.device.layers - 1)
    tiers.close()
    return tiers.digest(device)


if __name__ == "__main__":
    print(read(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
