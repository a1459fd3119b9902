"""`forebay store bench --prefetch`: what prefetch on exist saves the read path.

    fill -> overflow (DRAM full, most pages on SSD only) -> settle (everything logged) -> measure

Requests of ``pages`` pages arrive in a closed loop of ``concurrency``: each probes when it arrives, waits behind the
``concurrency - 1`` requests before it, each of which reads its pages and then computes for ``service_s``, and reads when its turn
comes. Off and on differ in the hint alone: same keys, same order, promotion on hit off, O_DIRECT in both. The bound on what can be
saved is what reading from DRAM would save, measured in the same run: ``1 - t_dram / t_ssd``.
"""

import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from forebay.store.backend import Status
from forebay.store.bench import BenchError, store_process, wait_until
from forebay.store.client.prefetcher import PrefetchOptions
from forebay.store.client.store import StoreClient
from forebay.store.wire.messages import Tier


@dataclass(frozen=True)
class PrefetchBench:
    """Sizes in bytes, times in seconds."""

    directory: Path
    page: int = 1 << 20
    pages: int = 8
    dram: int = 256 << 20
    data: int = 1 << 30
    requests: int = 48
    service_s: float = 0.03
    concurrencies: tuple[int, ...] = (1, 2, 4)
    seed: int = 0


@dataclass
class Arm:
    """Read times of one arm, and the share of bytes that came from DRAM."""

    seconds: list[float]
    dram_share: float

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.seconds)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return {"p50": statistics.median(ordered) * 1e3, "mean": statistics.fmean(ordered) * 1e3, "p99": p99 * 1e3}


def run(config: PrefetchBench) -> list[dict[str, Any]]:
    """One row per concurrency, as in the bench's JSON. Raises ``BenchError``."""
    return [_row(config, concurrency) for concurrency in config.concurrencies]


def _row(config: PrefetchBench, concurrency: int) -> dict[str, Any]:
    off = _arm(config, concurrency, hint=False)
    on = _arm(config, concurrency, hint=True)
    dram_s = _dram_seconds(config)
    ssd_s = statistics.fmean(off.seconds)
    return {
        "concurrency": concurrency,
        "off_ms": off.figures(),
        "on_ms": on.figures(),
        "dram_bytes_pct": 100 * on.dram_share,
        "dram_bytes_off_pct": 100 * off.dram_share,
        "saved_pct": 100 * (1 - statistics.fmean(on.seconds) / ssd_s),
        "bound_pct": 100 * (1 - dram_s / ssd_s),
    }


def _arm(config: PrefetchBench, concurrency: int, *, hint: bool) -> Arm:
    """A fresh store, filled the same way, read in the same order."""
    log = config.directory / f"log-{concurrency}-{hint}"
    sizes = ("--dram", str(config.dram), "--ssd", str(log), "--ssd-size", str(4 * config.data), "--fsync", "never")
    flags = ("--high-watermark", "1", "--low-watermark", "0.97", "--lease-s", "0.5", "--ssd-prefetch")
    options = PrefetchOptions(enabled=True, hint_window_s=0.5)
    with store_process(*sizes, *flags) as url, StoreClient.connect(url, timeout_s=60.0, prefetch=options) as client:
        keys = _fill(config, client)
        cold = [key for key, tiers in zip(keys, client.tiers(keys), strict=True) if tiers == {Tier.SSD}]
        groups = [cold[start : start + config.pages] for start in range(0, len(cold) - config.pages + 1, config.pages)]
        Random(config.seed).shuffle(groups)
        if len(groups) < config.requests + concurrency:
            raise BenchError(f"{len(groups)} cold requests; {config.requests + concurrency} are needed: take more data")
        return _measure(config, client, groups[: config.requests + concurrency], concurrency, hint)


def _measure(config: PrefetchBench, client: StoreClient, groups: list[list[bytes]], concurrency: int, hint: bool) -> Arm:
    buffers = [np.zeros(config.page, np.uint8) for _ in range(config.pages)]
    views = [buffer.data for buffer in buffers]
    arriving, queue = deque(groups), deque[list[bytes]]()
    arm, warm = Arm([], 0.0), 0

    def arrive() -> None:
        if arriving:
            queue.append(arriving.popleft())
            if not all(client.exists(queue[-1], prefetch=hint)):
                raise BenchError("a key that was put is not there")

    for _ in range(concurrency):
        arrive()
    for number in range(config.requests):
        group = queue.popleft()
        warm += sum(Tier.MEMORY in tiers for tiers in client.tiers(group)) if number >= concurrency else 0
        begun = time.perf_counter()
        statuses = client.get_into(group, views)
        taken = time.perf_counter() - begun
        if set(statuses) != {Status.OK}:
            raise BenchError(f"a read said {statuses}")
        if number >= concurrency:  # the first ones found no queue before them
            arm.seconds.append(taken)
        time.sleep(config.service_s)
        arrive()
    arm.dram_share = warm / (len(arm.seconds) * config.pages)
    return arm


def _fill(config: PrefetchBench, client: StoreClient) -> list[bytes]:
    keys = [b"page-%d" % index for index in range(config.data // config.page)]
    source = np.random.default_rng(config.seed).integers(0, 255, config.page, dtype=np.uint8)
    for start in range(0, len(keys), 16):
        some = keys[start : start + 16]
        if set(client.put_from(some, [source.data] * len(some))) - {Status.OK}:
            raise BenchError("the store could not be filled")
    wait_until(lambda: all(Tier.SSD in tiers for tiers in client.tiers(keys)), "all pages are logged")
    return keys


def _dram_seconds(config: PrefetchBench) -> float:
    """Mean time of the same read from DRAM."""
    with store_process("--dram", str(config.dram)) as url, StoreClient.connect(url, timeout_s=60.0) as client:
        groups = [[b"g%d-%d" % (group, page) for page in range(config.pages)] for group in range(16)]
        source = np.random.default_rng(config.seed).integers(0, 255, config.page, dtype=np.uint8)
        for group in groups:
            client.put_from(group, [source.data] * len(group))
        views = [np.zeros(config.page, np.uint8).data for _ in range(config.pages)]
        seconds = []
        for _ in range(3):
            for group in groups:
                begun = time.perf_counter()
                client.get_into(group, views)
                seconds.append(time.perf_counter() - begun)
                time.sleep(config.service_s / 10)
        return statistics.fmean(seconds[len(groups) :])
