"""`forebay store bench --prefetch`: what prefetch on exist saves the read path.

    fill -> overflow (DRAM full, most pages on SSD only) -> settle (everything logged) -> measure

Requests of ``pages`` pages arrive in a closed loop of ``concurrency``: each probes when it arrives, waits behind the
``concurrency - 1`` requests before it, each of which reads its pages and then computes for ``service_s``, and reads when its turn
comes. Off and on differ in the hint alone: same keys, same order, promotion on hit off, O_DIRECT in both; both stores are up all the
time, and their arms take turns. The bound on what can be saved is what reading from DRAM would save, measured in the same run:
``1 - t_dram / t_ssd``. *Roomy* is the same with DRAM for everything.
"""

import contextlib
import shutil
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from forebay.store.backend import Status
from forebay.store.bench import BenchError, store_process, wait_until
from forebay.store.client.prefetcher import PrefetchOptions
from forebay.store.client.store import StoreClient
from forebay.store.wire.messages import Tier

TURNS = (False, True, True, False)  # the hint off and on: what drifts, drifts for both


@dataclass(frozen=True)
class PrefetchBench:
    """Sizes in bytes, times in seconds. ``requests``: of a turn, of which each arm has two; a p99 wants more than a hundred of them."""

    directory: Path
    page: int = 1 << 20
    pages: int = 8
    dram: int = 256 << 20
    data: int = 1536 << 20
    requests: int = 75
    service_s: float = 0.03
    concurrencies: tuple[int, ...] = (1, 2, 4)
    seed: int = 0


@dataclass
class Arm:
    """Read times of one arm, and how many of its pages came from DRAM."""

    seconds: list[float] = field(default_factory=list)
    warm_pages: int = 0

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.seconds)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return {
            "p50": statistics.median(ordered) * 1e3,
            "mean": statistics.fmean(ordered) * 1e3,
            "p99": p99 * 1e3,
        }


def run(config: PrefetchBench) -> list[dict[str, Any]]:
    """One row per concurrency, as in the bench's JSON. Raises ``BenchError``."""
    return [_row(config, concurrency) for concurrency in config.concurrencies]


def _row(config: PrefetchBench, concurrency: int) -> dict[str, Any]:
    off, on = _cold(config, concurrency)
    roomy_off, roomy_on = _roomy(config, concurrency)
    dram_s = _dram_seconds(config)
    ssd_s, roomy_s = statistics.fmean(off.seconds), statistics.fmean(roomy_off.seconds)
    return {
        "concurrency": concurrency,
        "requests": len(off.seconds),
        "off_ms": off.figures(),
        "on_ms": on.figures(),
        "dram_bytes_pct": _warm_pct(config, on),
        "dram_bytes_off_pct": _warm_pct(config, off),
        "saved_pct": 100 * (1 - statistics.fmean(on.seconds) / ssd_s),
        "bound_pct": 100 * (1 - dram_s / ssd_s),
        "roomy_off_ms": roomy_off.figures(),
        "roomy_on_ms": roomy_on.figures(),
        "roomy_change_pct": 100 * (statistics.fmean(roomy_on.seconds) / roomy_s - 1),
    }


def _warm_pct(config: PrefetchBench, arm: Arm) -> float:
    return 100 * arm.warm_pages / (len(arm.seconds) * config.pages)


def _cold(config: PrefetchBench, concurrency: int) -> tuple[Arm, Arm]:
    """Off and on: every page from SSD, and read once."""
    a_turn = config.requests + concurrency
    arms = (Arm(), Arm())
    with (
        _store(config, f"off-{concurrency}", config.dram) as without,
        _store(config, f"on-{concurrency}", config.dram) as having,
    ):
        groups = [
            _cold_groups(config, client, len(TURNS) // 2 * a_turn) for client in (without, having)
        ]
        for hint in TURNS:
            turn, groups[hint] = groups[hint][:a_turn], groups[hint][a_turn:]
            _measure(config, having if hint else without, turn, concurrency, hint, arms[hint])
    return arms


def _roomy(config: PrefetchBench, concurrency: int) -> tuple[Arm, Arm]:
    """Off and on with DRAM for everything, so that pages may be read again."""
    arms = (Arm(), Arm())
    small = replace(config, data=config.dram // 2)
    with _store(small, f"roomy-{concurrency}", config.dram) as client:
        groups = _groups(config, _fill(small, client))
        for hint in TURNS:
            turn = [groups[number % len(groups)] for number in range(config.requests + concurrency)]
            _measure(config, client, turn, concurrency, hint, arms[hint])
    return arms


@contextlib.contextmanager
def _store(config: PrefetchBench, name: str, dram: int) -> Iterator[StoreClient]:
    """A client of a fresh store with a log of its own."""
    log = config.directory / name
    sizes = (
        "--dram",
        str(dram),
        "--ssd",
        str(log),
        "--ssd-size",
        str(4 * config.data),
        "--fsync",
        "never",
    )
    flags = (
        "--high-watermark",
        "1",
        "--low-watermark",
        "0.97",
        "--lease-s",
        "0.5",
        "--ssd-prefetch",
    )
    options = PrefetchOptions(enabled=True, hint_window_s=0.5)
    with (
        store_process(*sizes, *flags) as url,
        StoreClient.connect(url, timeout_s=60.0, prefetch=options) as client,
    ):
        yield client
    shutil.rmtree(log)


def _groups(config: PrefetchBench, keys: list[bytes]) -> list[list[bytes]]:
    groups = [
        keys[start : start + config.pages]
        for start in range(0, len(keys) - config.pages + 1, config.pages)
    ]
    Random(config.seed).shuffle(groups)
    return groups


def _cold_groups(config: PrefetchBench, client: StoreClient, count: int) -> list[list[bytes]]:
    """Filled the same way and read in the same order by both arms."""
    keys = _fill(config, client)
    cold = [key for key, tiers in zip(keys, client.tiers(keys), strict=True) if tiers == {Tier.SSD}]
    groups = _groups(config, cold)
    if len(groups) < count:
        raise BenchError(f"{len(groups)} cold requests; {count} are needed: take more data")
    return groups[:count]


def _measure(
    config: PrefetchBench,
    client: StoreClient,
    groups: list[list[bytes]],
    concurrency: int,
    hint: bool,
    arm: Arm,
) -> None:
    buffers = [np.zeros(config.page, np.uint8) for _ in range(config.pages)]
    views = [buffer.data for buffer in buffers]
    arriving, queue = deque(groups), deque[list[bytes]]()

    def arrive() -> None:
        if arriving:
            queue.append(arriving.popleft())
            if not all(client.exists(queue[-1], prefetch=hint)):
                raise BenchError("a key that was put is not there")

    for _ in range(concurrency):
        arrive()
    for number in range(len(groups)):
        group = queue.popleft()
        warm = sum(Tier.MEMORY in tiers for tiers in client.tiers(group))
        begun = time.perf_counter()
        statuses = client.get_into(group, views)
        taken = time.perf_counter() - begun
        if set(statuses) != {Status.OK}:
            raise BenchError(f"a read said {statuses}")
        if number >= concurrency:  # the first ones found no queue before them
            arm.seconds.append(taken)
            arm.warm_pages += warm
        time.sleep(config.service_s)
        arrive()


def _fill(config: PrefetchBench, client: StoreClient) -> list[bytes]:
    keys = [b"page-%d" % index for index in range(config.data // config.page)]
    source = np.random.default_rng(config.seed).integers(0, 255, config.page, dtype=np.uint8)
    for start in range(0, len(keys), 16):
        some = keys[start : start + 16]
        if set(client.put_from(some, [source.data] * len(some))) - {Status.OK}:
            raise BenchError("the store could not be filled")
    wait_until(
        lambda: all(Tier.SSD in tiers for tiers in client.tiers(keys)), "all pages are logged"
    )
    return keys


def _dram_seconds(config: PrefetchBench) -> float:
    """Mean time of the same read from DRAM."""
    with (
        store_process("--dram", str(config.dram)) as url,
        StoreClient.connect(url, timeout_s=60.0) as client,
    ):
        groups = [
            [b"g%d-%d" % (group, page) for page in range(config.pages)] for group in range(16)
        ]
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
