"""`forebay bench store --tls-cert FILE --tls-key FILE`: what TLS costs puts and gets over TCP.

Two stores, one of them inside TLS, hold the same; calls take turns. A row's floor is the same call without TLS.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forebay.store.backend import Status
from forebay.store.bench import (
    BenchConfig,
    BenchError,
    Row,
    chunks,
    interleaved,
    keys_for,
    store_process,
)
from forebay.store.client.store import StoreClient

PUT_BATCH = 32


def run(config: BenchConfig, certificate: Path, key: Path) -> dict[str, Any]:
    """As `bench.run`. The certificate, its own authority, must name 127.0.0.1. Raises ``BenchError``, ``ConnectionError``."""
    rows: list[Row] = []
    for size in config.sizes:
        footprint = max(config.footprint, 40 * size)
        sizes = ("--dram", str(2 * footprint), "--high-watermark", "1", "--low-watermark", "1")
        with (
            store_process(*sizes) as plain_url,
            store_process(
                *sizes,
                "--tls-cert",
                str(certificate),
                "--tls-key",
                str(key),
                query=f"?ca={certificate}",
            ) as tls_url,
            StoreClient.connect(plain_url, timeout_s=30.0, allow_local=False) as plain,
            StoreClient.connect(tls_url, timeout_s=30.0, allow_local=False) as tls,
        ):
            keys = keys_for(size, footprint)
            rows.append(_put_row(plain, tls, keys, size))
            rows += [_get_row(config, plain, tls, keys, size, batch) for batch in config.batches]
    return {
        "config": {
            "footprint": config.footprint,
            "rounds": config.rounds,
            "sizes": config.sizes,
            "batches": config.batches,
        },
        "floors": {
            f"{row.where}/{row.tier}/{row.op}/{row.size}x{row.batch}": row.floor for row in rows
        },
        "rows": [vars(row) for row in rows],
        "prefetch": [],
    }


def _put_row(plain: StoreClient, tls: StoreClient, keys: list[bytes], size: int) -> Row:
    """All keys into both stores, in batches that take turns."""
    source = np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)
    seconds = [0.0, 0.0]
    for some in chunks(keys, PUT_BATCH):
        for index, client in enumerate((plain, tls)):
            begun = time.perf_counter()
            _check(client.put_from(some, [source.data] * len(some)))
            seconds[index] += time.perf_counter() - begun
    without, inside = (len(keys) * size / taken / 1e9 for taken in seconds)
    return Row("put_from", size, PUT_BATCH, "tcp+tls", "dram", inside, without, "GB/s")


def _get_row(
    config: BenchConfig,
    plain: StoreClient,
    tls: StoreClient,
    keys: list[bytes],
    size: int,
    batch: int,
) -> Row:
    buffers = [np.zeros(size, np.uint8).data for _ in range(batch)]

    def get(client: StoreClient, places: Iterator[int]) -> None:
        at = next(places)
        _check(client.get_into(keys[at : at + batch], buffers))

    def contender(client: StoreClient) -> Callable[[], object]:
        return partial(get, client, itertools.cycle(range(0, len(keys) - batch + 1, batch)))

    seconds = interleaved({"plain": contender(plain), "tls": contender(tls)}, config, size * batch)
    rate = {name: size * batch / taken / 1e9 for name, taken in seconds.items()}
    return Row("get_into", size, batch, "tcp+tls", "dram", rate["tls"], rate["plain"], "GB/s")


def _check(statuses: list[Status]) -> None:
    if set(statuses) - {Status.OK, Status.EXISTS}:
        raise BenchError(f"a call said {sorted({status.name for status in statuses})}")
