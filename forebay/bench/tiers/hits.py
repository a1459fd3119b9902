"""Time to first token of one prompt, all of whose pages are in one tier; tiers take turns, one request at a time.

    prime -> drain -> for each round:  device | flush device -> host | flush both -> store | flush both, drop the store's pages -> disk

A store's memory tier is the page cache for `file:` and the holder's segment for `embedded`; its disk tier is the same files with the
page cache dropped, and a second `embedded` whose memory holds a fifth of a prompt, and first of another one that nobody asks for again.
What the kernel counted as read from disks meanwhile by the server's processes is told beside each time (``disk_share``, of the prompt's
pages). Beside them the machine's own rate: `O_DIRECT` reads of a file as large as the prompt's pages, one round after another.
"""

import mmap
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from forebay.bench.token_ids import first_token_id
from forebay.bench.ttft.load import Answer, Client
from forebay.bench.ttft.plan import Ask, TtftError
from forebay.bench.ttft.server import MODEL_NAME, drain, flush, running
from forebay.models.config import ModelConfig
from forebay.settings import Settings

RAW_READ_BYTES = 4 << 20
SALT = "bench tiers"
TRIES = 3
SMALL_SHARE = 0.2  # of one prompt's pages: the memory of a store that is to read two prompts in turn from its disk


@dataclass(frozen=True, slots=True)
class Tier:
    """``prepare``: brings the prompt there and nowhere above; ``wanted``: what the response must say its tokens came from."""

    name: str
    wanted: str
    prepare: Callable[[], None]


@dataclass(slots=True)
class Samples:
    """Milliseconds by tier, how often it was no hit, and how much of its bytes came from a disk; raw reads in GB/s."""

    ttft_ms: dict[str, list[float]] = field(default_factory=dict)
    missed: Counter[str] = field(default_factory=Counter)
    disk_share: dict[str, list[float]] = field(default_factory=dict)
    raw_gb_s: list[float] = field(default_factory=list)


def measure(
    model: str,
    settings: Settings,
    config: ModelConfig,
    tokens: int,
    rounds: int,
    directory: Path,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One row a tier and store. Raises ``TtftError``."""
    size = tokens * _token_bytes(config, settings)
    small = int(SMALL_SHARE * size)
    urls = {
        "file": f"file:{directory / 'pages'}",
        "embedded": f"embedded:{directory / 'embedded'}?dram={8 * size}",
        "embedded, small": f"embedded:{directory / 'small'}?dram={small}",
    }
    rows: list[dict[str, Any]] = []
    for store, url in urls.items():
        samples = Samples()
        with running(model, _settings(settings, url, 6 * size)) as server:
            client = Client(server.url, MODEL_NAME, 1)
            asks = _prime(client, config, tokens, store)
            tiers = _tiers(client, store, directory / "pages")
            for number in range(rounds):
                say(f"hits, {store}: round {number + 1} of {rounds}")
                _round(client, asks[number % len(asks)], tiers, samples, tokens, server.pid, size)
                samples.raw_gb_s.append(_raw_read(directory / "raw", size))
        rows += [
            {
                "store": store,
                "tier": name,
                "ttft_ms": times,
                "missed": samples.missed[name],
                "disk_share": samples.disk_share[name],
            }
            for name, times in samples.ttft_ms.items()
        ]
        rows.append({"store": store, "tier": "raw reads", "gb_s": samples.raw_gb_s, "bytes": size})
    return rows


def _settings(common: Settings, url: str, memory: int) -> Settings:
    return msgspec.structs.replace(
        common,
        host="127.0.0.1",
        port=0,
        served_model_name=MODEL_NAME,
        store=url,
        device_memory=common.device_memory or memory,
        host_memory=common.host_memory or memory,
    )


def _token_bytes(config: ModelConfig, settings: Settings) -> int:
    """Of one token's keys and values in all layers; quantised KV takes less."""
    itemsize = 4 if "float32" in (settings.dtype, settings.kv_dtype) else 2
    return 2 * config.layers * config.kv_heads * config.head_dim * itemsize


def _prime(client: Client, config: ModelConfig, tokens: int, store: str) -> list[Ask]:
    """Computed and stored: two prompts, and a third that comes last and is what a small store's memory has room for."""
    dice = random.Random(f"tiers/{store}")
    prompts = [
        [
            dice.randrange(first_token_id(config.vocab_size), config.vocab_size)
            for _ in range(tokens)
        ]
        for _ in range(3)
    ]
    asks = [Ask(index, prompt, True) for index, prompt in enumerate(prompts)]
    for ask in asks:
        client.closed_load([ask], 1, SALT)
        drain(client, store)
    return asks[:2]


def _tiers(client: Client, store: str, files: Path) -> list[Tier]:
    def from_store() -> None:
        flush(client, ("device", "host"))
        if store == "file":
            _fill_page_cache(files)

    def from_disk() -> None:
        flush(client, ("device", "host"))
        if store == "file":
            _drop_page_cache(files)

    device = Tier("device", "cached_device", lambda: None)
    host = Tier("host", "cached_host", lambda: flush(client, ("device",)))
    if store == "embedded, small":
        return [Tier("disk", "cached_store", from_disk), device, host]
    found = [Tier("store's memory", "cached_store", from_store), device, host]
    return [*found, Tier("disk", "cached_store", from_disk)] if store == "file" else found


def _round(
    client: Client,
    ask: Ask,
    tiers: Sequence[Tier],
    samples: Samples,
    tokens: int,
    server: int,
    size: int,
) -> None:
    for tier in tiers:
        answer, read = _hit(client, ask, tier, samples, tokens, server)
        samples.ttft_ms.setdefault(tier.name, []).append(1000 * answer.ttft_s)
        samples.disk_share.setdefault(tier.name, []).append(read / size)


def _hit(
    client: Client, ask: Ask, tier: Tier, samples: Samples, tokens: int, server: int
) -> tuple[Answer, int]:
    """With the bytes that were read from disks for it. Asked again, and counted, if it was no whole hit: on a busy machine the store's
    answer may come too late to be waited for.

    Raises ``TtftError`` unless all tokens but the last, which is always computed, come from the tier at last.
    """
    found = 0
    for _ in range(TRIES):
        tier.prepare()
        before = _disk_bytes(server)
        (answer,) = client.closed_load([ask], 1, SALT)
        found = getattr(answer, tier.wanted)
        if found >= tokens - 1:
            return answer, _disk_bytes(server) - before
        samples.missed[tier.name] += 1
        drain(client, tier.name)
    raise TtftError(
        f"a hit of {tokens} tokens should have come from {tier.name}; {found} did ({tier.wanted}), asked {TRIES} times"
    )


def _disk_bytes(server: int) -> int:
    """What a server and its children have had read from disks so far (proc(5), ``read_bytes``)."""
    first = psutil.Process(server)
    return sum(
        process.io_counters().read_bytes for process in (first, *first.children(recursive=True))
    )


def _fill_page_cache(directory: Path) -> None:
    """The round before has dropped it."""
    for path in directory.rglob("*.page"):
        path.read_bytes()


def _drop_page_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)  # dirty pages stay
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _raw_read(path: Path, size: int) -> float:
    """GB/s of reading ``size`` bytes past the page cache, one thread."""
    size = -(-size // RAW_READ_BYTES) * RAW_READ_BYTES
    if not path.exists():
        path.write_bytes(np.random.default_rng(1).bytes(size))
    buffer = mmap.mmap(-1, RAW_READ_BYTES)  # on a page border, as O_DIRECT wants it
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        began = time.perf_counter()
        for at in range(0, size, RAW_READ_BYTES):
            if os.preadv(fd, [buffer], at) != RAW_READ_BYTES:
                raise TtftError(f"{path}: a short read")
        return size / (time.perf_counter() - began) / 1e9
    finally:
        os.close(fd)
