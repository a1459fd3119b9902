"""`forebay bench store --prefetch --serve MODEL`: what prefetch on exist saves a request, through whole servers.

    fill (a server computes prompts) -> overflow (DRAM full, most prompts on SSD only) -> settle (everything logged) -> measure

Two arms, a store and a server each, alike but for the store's ``--ssd-prefetch``; both stores hold the same bytes. A request is a
stored prefix and a tail of new tokens: computing the tail is the service time of the queue that others wait in. ``concurrency``
requests are in flight; arms take turns, each asked the same prompts in the same order, each prompt once. Promotion on hit is off, log
files are read and written with O_DIRECT. *Roomy* is the same with DRAM for everything: the bound on what can be saved. The routes
follow one another on the same two stores, with servers and prompts of their own.

What is to be expected: a fetch by ticket begins when its request arrives, and reads the SSD while the request waits, so a hint has next
to nothing to bring up before it. The staged route begins a fetch when its turn has come: a hint has the time that the request waits.
"""

import contextlib
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forebay.bench.token_ids import first_token_id
from forebay.bench.ttft.load import Answer, Client
from forebay.bench.ttft.plan import Arm, Ask, TtftError
from forebay.bench.ttft.server import ArmServer, running
from forebay.models.config import ModelConfig, load_config
from forebay.models.kv import page_block
from forebay.models.kv_format import kv_format
from forebay.models.resolve import resolve_model
from forebay.models.shard import shards
from forebay.settings import DType, FetchRoute, Settings, resolve
from forebay.store.backend import Status
from forebay.store.bench import store_process, wait_until
from forebay.store.client.store import StoreClient
from forebay.store.wire.messages import Tier

MODEL_NAME = "bench"
TURNS = (False, True, True, False)  # prefetch off and on: what drifts, drifts for both
COPY_BATCH = 16
NOT_PAGES = b"forebay-"  # what servers keep for themselves
SALT = "prefetch"  # the same everywhere, so that keys are

_Cell = tuple[FetchRoute, int]  # and concurrency


@dataclass(frozen=True)
class PrefetchTtftBench:
    """Lengths in tokens, ``dram`` in bytes. ``requests``: of each route, concurrency and arm, over two turns."""

    model: str
    directory: Path
    routes: tuple[FetchRoute, ...] = (FetchRoute.STAGED, FetchRoute.TICKET)
    prefix: int = 1024
    tail: int = 192
    page: int = 64
    dram: int = 512 << 20
    requests: int = 12
    concurrencies: tuple[int, ...] = (1, 2, 4)
    seed: int = 0


@dataclass
class _Figures:
    """Of one arm at one concurrency. Bytes by the tier that the master sent gets to. ``missed``: requests that the store did not
    answer in time, left out."""

    ttft_s: list[float] = field(default_factory=list)
    missed: int = 0
    memory_bytes: int = 0
    ssd_bytes: int = 0

    def milliseconds(self) -> dict[str, float]:
        ordered = sorted(self.ttft_s)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return {
            "p50": statistics.median(ordered) * 1e3,
            "mean": statistics.fmean(ordered) * 1e3,
            "p99": p99 * 1e3,
        }

    @property
    def dram_pct(self) -> float:
        return 100 * self.memory_bytes / max(self.memory_bytes + self.ssd_bytes, 1)


@dataclass(frozen=True)
class _Store:
    url: str
    client: StoreClient
    log: Path


@dataclass(frozen=True)
class _Arm:
    """A store and the server on it."""

    server: ArmServer
    store: StoreClient

    def got(self) -> tuple[int, int]:
        counters = self.store.stats().counters
        return counters.get("got_memory_bytes", 0), counters.get("got_ssd_bytes", 0)


def run(
    config: PrefetchTtftBench, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """One row per route and concurrency. Raises ``TtftError``, ``BenchError``, and what reading a model raises."""
    model = load_config(resolve_model(config.model).path)
    prompts = _Prompts(config, model)
    tight, roomy = _tight(config, prompts, model, say), _roomy(config, prompts, model, say)
    return [
        _row(cell, tight[cell], roomy[cell])
        for cell in itertools.product(config.routes, config.concurrencies)
    ]


def _row(cell: _Cell, tight: list[_Figures], roomy: list[_Figures]) -> dict[str, Any]:
    route, concurrency = cell
    off, on = tight
    mean_off, mean_on = (statistics.fmean(figures.ttft_s) for figures in tight)
    roomy_off, roomy_on = (statistics.fmean(figures.ttft_s) for figures in roomy)
    return {
        "concurrency": concurrency,
        "route": route.value,
        "requests": len(off.ttft_s) + off.missed,
        "missed": [figures.missed for figures in (off, on, *roomy)],
        "off_ms": off.milliseconds(),
        "on_ms": on.milliseconds(),
        "dram_bytes_pct": on.dram_pct,
        "dram_bytes_off_pct": off.dram_pct,
        "saved_pct": 100 * (1 - mean_on / mean_off),
        "bound_pct": 100 * (1 - roomy_off / mean_off),
        "roomy_off_ms": roomy[0].milliseconds(),
        "roomy_on_ms": roomy[1].milliseconds(),
        "roomy_change_pct": 100 * (roomy_on / roomy_off - 1),
    }


class _Prompts:
    """Random token ids, the same for whoever draws the same."""

    def __init__(self, config: PrefetchTtftBench, model: ModelConfig) -> None:
        self._config = config
        self._first, self._vocab = first_token_id(model.vocab_size), model.vocab_size

    def prefix(self, number: int) -> list[int]:
        return self._draw(f"prefix/{number}", self._config.prefix)

    def ask(self, index: int, number: int, use: str) -> Ask:
        """Prefix ``number`` with a tail that nobody has seen."""
        return Ask(
            index, self.prefix(number) + self._draw(f"tail/{number}/{use}", self._config.tail), True
        )

    def _draw(self, what: str, tokens: int) -> list[int]:
        dice = random.Random(f"{self._config.seed}/{what}")
        return [dice.randrange(self._first, self._vocab) for _ in range(tokens)]


def _tight(
    config: PrefetchTtftBench, prompts: _Prompts, model: ModelConfig, say: Callable[[str], None]
) -> dict[_Cell, list[_Figures]]:
    """[off, on] by route and concurrency, every prefix from SSD and used once."""
    half = config.requests // 2
    of_a_route = sum(len(TURNS) // 2 * (half + concurrency) for concurrency in config.concurrencies)
    cold = len(config.routes) * of_a_route
    prefix_bytes = config.prefix // config.page * _page_bytes(config, model)
    count = cold + math.ceil(config.dram / prefix_bytes) + 1
    unused, keys = iter(range(cold)), list[list[bytes]]()
    found: dict[_Cell, list[_Figures]] = {}
    with _stores(config, config.dram, count * prefix_bytes, "tight") as stores:
        for number, route in enumerate(config.routes):
            with _arms(config, model, route, stores) as arms:
                keys = keys or _fill(prompts, arms, count, say)
                _check_cold(
                    arms, [key for some in keys[number * of_a_route : cold] for key in some]
                )
                for concurrency in config.concurrencies:
                    say(f"measuring {route.value} at concurrency {concurrency}")
                    turns = [[next(unused) for _ in range(half + concurrency)] for _ in range(2)]
                    found[route, concurrency] = _cell(
                        config, prompts, arms, (number, concurrency), turns
                    )
    return found


def _roomy(
    config: PrefetchTtftBench, prompts: _Prompts, model: ModelConfig, say: Callable[[str], None]
) -> dict[_Cell, list[_Figures]]:
    """The same with DRAM for everything, so that prefixes may be used again."""
    half = config.requests // 2
    count = half + max(config.concurrencies)
    data = count * (config.prefix // config.page) * _page_bytes(config, model)
    found: dict[_Cell, list[_Figures]] = {}
    with _stores(config, 3 * data, data, "roomy") as stores:
        for number, route in enumerate(config.routes):
            with _arms(config, model, route, stores) as arms:
                if number == 0:
                    _fill(prompts, arms, count, say)
                for concurrency in config.concurrencies:
                    say(
                        f"measuring {route.value} with DRAM for everything at concurrency {concurrency}"
                    )
                    found[route, concurrency] = _cell(
                        config,
                        prompts,
                        arms,
                        (number, concurrency),
                        [range(half + concurrency)] * 2,
                    )
    return found


def _cell(
    config: PrefetchTtftBench,
    prompts: _Prompts,
    arms: Sequence[_Arm],
    cell: tuple[int, int],
    turns: Sequence[Sequence[int]],
) -> list[_Figures]:
    """[off, on]. ``cell``: number of the route, and concurrency. ``turns``: the prefixes of each arm's first and second turn."""
    route, concurrency = cell
    figures = [_Figures(), _Figures()]
    taken = [0, 0]
    for hint in TURNS:
        turn = taken[hint]
        taken[hint] += 1
        asks = [
            prompts.ask(index, number, f"{route}/{concurrency}/{turn}")
            for index, number in enumerate(turns[turn])
        ]
        _ask(config, arms[hint], asks, concurrency, figures[hint])
    return figures


def _ask(
    config: PrefetchTtftBench, arm: _Arm, asks: Sequence[Ask], concurrency: int, figures: _Figures
) -> None:
    before = arm.got()
    answers: list[Answer] = arm.server.client.closed_load(asks, concurrency, SALT)
    memory, ssd = (now - then for now, then in zip(arm.got(), before, strict=True))
    figures.memory_bytes += memory
    figures.ssd_bytes += ssd
    behind = answers[concurrency:]  # the first ones found no queue before them
    hits = [answer for answer in behind if answer.cached_store == config.prefix]
    if not hits:
        raise TtftError(f"no request took its {config.prefix} stored tokens from the store")
    figures.ttft_s += [answer.ttft_s for answer in hits]
    figures.missed += len(behind) - len(hits)
    _forget(arm)


def _forget(arm: _Arm) -> None:
    arm.server.drain()
    arm.server.flush(("device", "host"))


def _fill(
    prompts: _Prompts, arms: Sequence[_Arm], count: int, say: Callable[[str], None]
) -> list[list[bytes]]:
    """One server computes, both stores get the bytes in the same order, and log them. The keys of each prompt."""
    first, second = arms
    known: set[bytes] = set()
    keys: list[list[bytes]] = []
    for number in range(count):
        if number % 10 == 0:
            say(f"filling: {number} of {count} prompts")
        first.server.client.closed_load([Ask(0, prompts.prefix(number), False)], 1, SALT)
        _forget(first)
        new = [
            (key, size)
            for key, size in first.store.list()
            if key not in known and not key.startswith(NOT_PAGES)
        ]
        keys.append([key for key, _ in new])
        known.update(keys[-1])
        for start in range(0, len(new), COPY_BATCH):
            _copy(first.store, second.store, new[start : start + COPY_BATCH])
    for arm in arms:
        wait_until(
            lambda store=arm.store: all(Tier.SSD in tiers for tiers in store.tiers([*known])),  # type: ignore[misc]
            "all pages are logged",
        )
    return keys


def _check_cold(arms: Sequence[_Arm], keys: Sequence[bytes]) -> None:
    """Raises ``TtftError`` if any of them is in DRAM."""
    for arm in arms:
        if any(Tier.MEMORY in tiers for tiers in arm.store.tiers(keys)):
            raise TtftError("DRAM has prompts that should be on SSD alone; more must overflow")


def _copy(source: StoreClient, target: StoreClient, objects: Sequence[tuple[bytes, int]]) -> None:
    keys, buffers = [key for key, _ in objects], [bytearray(size) for _, size in objects]
    statuses = source.get_into(keys, buffers) + target.put_from(keys, buffers)
    if set(statuses) - {Status.OK, Status.EXISTS}:
        raise TtftError(
            f"the stores could not be filled alike: {sorted({status.name for status in statuses})}"
        )


@contextlib.contextmanager
def _stores(config: PrefetchTtftBench, dram: int, data: int, name: str) -> Iterator[list[_Store]]:
    """Prefetch off, then on."""
    with contextlib.ExitStack() as stack:
        stores = []
        for hint in (False, True):
            log = config.directory / f"{name}-{'on' if hint else 'off'}"
            sizes = (
                "--dram",
                str(dram),
                "--ssd",
                str(log),
                "--ssd-size",
                str(4 * data),
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
                *(["--ssd-prefetch"] if hint else []),
            )
            url = stack.enter_context(store_process(*sizes, *flags))
            stores.append(
                _Store(url, stack.enter_context(StoreClient.connect(url, timeout_s=60.0)), log)
            )
        yield stores


@contextlib.contextmanager
def _arms(
    config: PrefetchTtftBench, model: ModelConfig, route: FetchRoute, stores: Sequence[_Store]
) -> Iterator[list[_Arm]]:
    """A server of this route on each store."""
    with contextlib.ExitStack() as stack:
        arms = []
        for store in stores:
            server = stack.enter_context(
                running(config.model, _settings(config, model, route, store.url))
            )
            client = Client(server.url, MODEL_NAME, 1)
            arms.append(
                _Arm(
                    ArmServer(Arm(route), client, store.log / f"timeline-{route.value}"),
                    store.client,
                )
            )
        yield arms


def _settings(
    config: PrefetchTtftBench, model: ModelConfig, route: FetchRoute, url: str
) -> Settings:
    pages = -(-(config.prefix + config.tail) // config.page) + 2
    memory = 2 * pages * max(config.concurrencies) * _page_bytes(config, model)
    return resolve(
        {
            "host": "127.0.0.1",
            "port": 0,
            "served_model_name": MODEL_NAME,
            "store": url,
            "fetch_route": route,
            "fetch_policy": "wait",
            "fetch_threshold": config.page,
            "page_size": config.page,
            "chunk_size": config.prefix,
            "device_memory": memory,
            "host_memory": memory,
        },
        environment={},
    )


def _page_bytes(config: PrefetchTtftBench, model: ModelConfig) -> int:
    dtype = model.dtype
    ((shard,),) = shards(model, 1, 1)
    return page_block(
        model, shard, config.page, kv_format(DType.AUTO.value, getattr(torch, dtype))
    ).size
