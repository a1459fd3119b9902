"""`forebay bench store`: what this store moves, beside floors measured in the same run.

Every figure rotates over ``footprint`` bytes of keys, so that no cache holds them. Rounds of all contenders are interleaved and the
median is reported; what counts is the ratio to the floor of the same run. Floors: memcpy over the same footprint (local), a raw
socket pair between two processes (TCP), O_DIRECT reads of the same block size into an ordinary buffer (SSD; into huge pages beside it).
Forebay's connections on one machine are not paced (`wire.loopback`), so neither is the TCP floor; with the congestion control that the
machine gives every socket, which peers have, it is in ``floors`` of the row.
"""

import contextlib
import itertools
import json
import mmap
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.store.backend import Status
from forebay.store.bench_peers import Peer, opened
from forebay.store.client.store import StoreClient
from forebay.store.holder.log.files import HUGE_PAGE_BYTES, aligned_buffer
from forebay.store.wire.messages import Tier

Bytes = npt.NDArray[np.uint8]
Peers = dict[tuple[str, str], Peer]  # by where and name
WAIT_S = 120.0
IN_FLIGHT = 4
EXISTS_CALLS = 500
START_S = 60.0
SETTLE_S = 1.5  # the segment's pages are being mapped in the background meanwhile
_UP = "from forebay.cli.store import app; app(prog_name='forebay store')"


class BenchError(Exception):
    """The measurement is not valid; one line that says why."""


@dataclass(frozen=True)
class BenchConfig:
    """Sizes in bytes. ``rounds``: interleaved repetitions of each contender. ``directory``: where the SSD arm's log lies.
    ``peers``: names of `bench_peers`. ``tiers``: which of dram and ssd are measured."""

    sizes: tuple[int, ...] = (64 << 10, 1 << 20, 4 << 20)
    batches: tuple[int, ...] = (1, 32)
    footprint: int = 1 << 30
    rounds: int = 7
    round_bytes: int = 128 << 20
    directory: Path | None = None
    peers: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ("dram", "ssd")


@dataclass
class Row:
    """One line of the result. ``floor`` is the same measure of the floor, ``floors`` of others; ``unit``: GB/s, us_p50 or keys/s."""

    op: str
    size: int
    batch: int
    where: str
    tier: str
    forebay: float
    floor: float
    unit: str
    peers: dict[str, float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)


@contextlib.contextmanager
def store_process(*args: str, query: str = "") -> Iterator[str]:
    """A store in a process of its own; its URL, with ``query`` behind it."""
    command = [sys.executable, "-c", _UP, "up", "--listen", "127.0.0.1:0", "--json", *args]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        ready, _, _ = select.select([child.stdout], [], [], START_S)
        line = child.stdout.readline() if ready else b""
        if not line:
            raise BenchError("the store to be measured did not start")
        url = str(json.loads(line)["url"]) + query
        with StoreClient.connect(url) as client:
            wait_until(lambda: client.stats().holders_usable == 1, "the store serves")
        time.sleep(SETTLE_S)
        yield url
    finally:
        child.terminate()
        child.wait(30)
        child.stdout.close()


def run(config: BenchConfig) -> dict[str, Any]:
    """All rows, as `forebay bench store --json` prints them. Raises ``BenchError``."""
    rows = _memory_rows(config) if "dram" in config.tiers else []
    rows += _ssd_rows(config) if "ssd" in config.tiers else []
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


def _memory_rows(config: BenchConfig) -> list[Row]:
    """A store of its own for each size: what is removed while leased keeps its memory for a while."""
    rows: list[Row] = []
    dram = str(max(config.footprint, 40 * max(config.sizes)) + config.footprint // 4)
    with (
        RawPeer(max(config.footprint, 40 * max(config.sizes))) as raw,
        opened(config.peers, int(dram)) as peers,
    ):
        for size in config.sizes:
            with (
                store_process(
                    "--dram", dram, "--high-watermark", "1", "--low-watermark", "1"
                ) as url,
                StoreClient.connect(url, timeout_s=30.0) as local,
                StoreClient.connect(url, timeout_s=30.0, allow_local=False) as tcp,
            ):
                clients = {"local": local, "tcp": tcp}
                rows += _put_rows(config, clients, peers, size)
                for batch in config.batches:
                    rows += _get_rows(config, clients, peers, raw, size, batch)
                if size == config.sizes[0]:
                    rows += _exists_rows(config, tcp, peers, raw)
                for peer in peers.values():
                    peer.clear()
    return rows


def _put_rows(
    config: BenchConfig, clients: dict[str, StoreClient], peers: Peers, size: int
) -> list[Row]:
    """Half of the keys are put locally, half over TCP, in batches of 32; peers get all; the floor is a copy."""
    keys = keys_for(size, config.footprint)
    source = np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)
    target = np.empty_like(source)
    half = len(keys) // 2
    rows = []
    for where, some in (("local", keys[:half]), ("tcp", keys[half:])):
        begun = time.perf_counter()
        for chunk in chunks(some, 32):
            statuses = clients[where].put_from(chunk, [source.data] * len(chunk), timeout_s=30.0)
            if set(statuses) - {Status.OK}:
                raise BenchError(f"put_from over {where} said {statuses}")
        rate = len(some) * size / (time.perf_counter() - begun) / 1e9
        begun = time.perf_counter()
        for _ in range(min(len(some), 64)):
            np.copyto(target, source)
        floor = min(len(some), 64) * size / (time.perf_counter() - begun) / 1e9
        rows.append(
            Row(
                "put_from",
                size,
                32,
                where,
                "dram",
                rate,
                floor,
                "GB/s",
                _peers_put(peers, where, keys, source),
            )
        )
    return rows


def _peers_put(peers: Peers, where: str, keys: list[bytes], source: Bytes) -> dict[str, float]:
    rates = {}
    for (place, name), peer in peers.items():
        if place == where:
            begun = time.perf_counter()
            for chunk in chunks(keys, 32):
                peer.put(chunk, source)
            rates[name] = len(keys) * len(source) / (time.perf_counter() - begun) / 1e9
    return rates


def _get_rows(
    config: BenchConfig,
    clients: dict[str, StoreClient],
    peers: Peers,
    raw: "RawPeer",
    size: int,
    batch: int,
) -> list[Row]:
    keys = keys_for(size, config.footprint)
    buffers = [np.zeros(size, np.uint8) for _ in range(batch)]
    flat = raw.flat
    places = itertools.cycle(range(0, len(keys) - batch + 1, batch))

    def get_with(client: StoreClient) -> None:
        at = next(places)
        statuses = client.get_into(keys[at : at + batch], [buffer.data for buffer in buffers])
        if any(statuses):
            raise BenchError(f"get_into said {statuses}")

    def get_from(peer: Peer) -> None:
        at = next(places)
        peer.get(keys[at : at + batch], buffers)

    def copy() -> None:
        at = next(places)
        for index, buffer in enumerate(buffers):
            np.copyto(buffer, flat[(at + index) * size : (at + index + 1) * size])

    contenders: dict[str, Callable[[], object]] = {
        "copy": copy,
        "local": lambda: get_with(clients["local"]),
        "raw": lambda: raw.pull(size, batch, buffers),
        "paced": lambda: raw.pull(size, batch, buffers, paced=True),
        "tcp": lambda: get_with(clients["tcp"]),
    }
    for (where, name), peer in peers.items():
        peer.use(buffers)
        contenders[f"{where}/{name}"] = partial(get_from, peer)
    medians = interleaved(contenders, config, size * batch)
    rate = {name: size * batch / seconds / 1e9 for name, seconds in medians.items()}
    beside = {
        at: {name: rate[f"{where}/{name}"] for where, name in peers if where == at}
        for at in ("local", "tcp")
    }
    paced = {"raw_socket_as_the_machine_has_it": rate["paced"]}
    rows = [
        Row(
            "get_into",
            size,
            batch,
            "local",
            "dram",
            rate["local"],
            rate["copy"],
            "GB/s",
            beside["local"],
        ),
        Row(
            "get_into",
            size,
            batch,
            "tcp",
            "dram",
            rate["tcp"],
            rate["raw"],
            "GB/s",
            beside["tcp"],
            paced,
        ),
    ]
    if batch == 1:
        singles = {
            "get": lambda: _must(clients["tcp"].get(keys[next(places)])),
            "raw": lambda: raw.pull(size, 1, buffers),
            "ping": raw.ping,
        }
        p50 = interleaved(singles, config, size)
        in_us = {name: medians[f"tcp/{name}"] * 1e6 for where, name in peers if where == "tcp"}
        rows.append(
            Row(
                "get",
                size,
                1,
                "tcp",
                "dram",
                p50["get"] * 1e6,
                (p50["raw"] + p50["ping"]) * 1e6,
                "us_p50",
                in_us,
            )
        )
    return rows


def _exists_rows(
    config: BenchConfig, client: StoreClient, peers: Peers, raw: "RawPeer"
) -> list[Row]:
    """128 keys a call: one call after another, and four threads' calls at once (a row of its own, ``batch`` 4 x 128)."""
    keys = [b"exists-%d" % index for index in range(128)]
    client.put_from(keys, [b"x"] * len(keys))
    contenders: dict[str, Callable[[], object]] = {
        "exists": lambda: _must(all(client.exists(keys))),
        "ping": raw.ping,
    }
    for (where, name), peer in peers.items():
        peer.put(keys, np.ones(1, np.uint8))
        if where == "tcp":
            contenders[name] = partial(_peer_exists, peer, keys)
    p50 = interleaved(contenders, config, 1 << 20)
    rate = {name: 128 / seconds for name, seconds in p50.items()}
    beside = {name: rate[name] for where, name in peers if where == "tcp"}
    several = statistics.median(_exists_in_flight(client, keys) for _ in range(config.rounds))
    return [
        Row("exists", 1, 128, "tcp", "dram", rate["exists"], rate["ping"], "keys/s", beside),
        Row("exists", 1, IN_FLIGHT * 128, "tcp", "dram", several, rate["ping"], "keys/s"),
    ]


def _peer_exists(peer: Peer, keys: list[bytes]) -> None:
    _must(peer.exists(keys))


def _exists_in_flight(client: StoreClient, keys: list[bytes]) -> float:
    """Keys per second of ``IN_FLIGHT`` threads, each with one call under way all the time."""

    def ask() -> None:
        for _ in range(EXISTS_CALLS):
            _must(all(client.exists(keys)))

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        begun = time.perf_counter()
        for work in [threads.submit(ask) for _ in range(IN_FLIGHT)]:
            work.result()
        return IN_FLIGHT * EXISTS_CALLS * len(keys) / (time.perf_counter() - begun)


def _ssd_rows(config: BenchConfig) -> list[Row]:
    """Keys that are on SSD only, beside O_DIRECT reads of a file of the same footprint and block size, by one thread each."""
    rows = []
    for size in config.sizes:
        with tempfile.TemporaryDirectory(dir=config.directory) as directory:
            path = Path(directory)
            dram = max(4 * size, 32 << 20)
            ssd = 4 * _cold_footprint(config, size)
            args = (
                "--dram",
                str(dram),
                "--ssd",
                str(path / "log"),
                "--ssd-size",
                str(ssd),
                "--fsync",
                "never",
                "--lease-s",
                "0.5",
                "--put-wait-s",
                "30",
            )
            with store_process(*args) as url, StoreClient.connect(url, timeout_s=60.0) as client:
                rows += _ssd_reads(config, client, size, path)
    return rows


def _cold_footprint(config: BenchConfig, size: int) -> int:
    """Enough that most of it is on SSD only."""
    return max(config.footprint, 64 * size, 96 << 20)


def _ssd_reads(config: BenchConfig, client: StoreClient, size: int, path: Path) -> list[Row]:
    keys = keys_for(size, _cold_footprint(config, size))
    source = np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)
    for chunk in chunks(keys, 32):
        statuses = client.put_from(chunk, [source.data] * len(chunk))
        if set(statuses) - {Status.OK, Status.EXISTS}:
            raise BenchError(f"the SSD arm could not be filled: {statuses}")
    raw = path / "raw"
    _write_raw(raw, size, len(keys))
    cold = [key for key, tiers in zip(keys, client.tiers(keys), strict=True) if tiers == {Tier.SSD}]
    fd = os.open(raw, os.O_RDONLY | os.O_DIRECT)
    rows = []
    try:
        for batch in config.batches:
            buffers = [np.zeros(size, np.uint8) for _ in range(batch)]
            small, huge = (
                memoryview(mmap.mmap(-1, size)),
                aligned_buffer(max(size, HUGE_PAGE_BYTES))[:size],
            )
            places, blocks = (
                itertools.cycle(range(0, len(cold) - batch + 1, batch)),
                itertools.cycle(range(len(keys))),
            )

            def get(
                batch: int = batch, buffers: list[Bytes] = buffers, places: Iterator[int] = places
            ) -> None:
                at = next(places)
                if any(client.get_into(cold[at : at + batch], [buffer.data for buffer in buffers])):
                    raise BenchError("a read from SSD failed")

            def direct(
                block: memoryview, batch: int = batch, blocks: Iterator[int] = blocks
            ) -> None:
                for _ in range(batch):
                    os.preadv(fd, [block], next(blocks) * size)

            contenders: dict[str, Callable[[], object]] = {
                "get": get,
                "direct": partial(direct, small),
                "huge": partial(direct, huge),
            }
            medians = interleaved(contenders, config, size * batch)
            rate = {name: size * batch / seconds / 1e9 for name, seconds in medians.items()}
            row = Row("get_into", size, batch, "local", "ssd", rate["get"], rate["direct"], "GB/s")
            row.floors["direct_into_huge_pages"] = rate["huge"]
            rows.append(row)
    finally:
        os.close(fd)
    return rows


class RawPeer:
    """A process that sends what it is asked for, out of ``footprint`` bytes, with nothing but sockets between."""

    _CODE = """
import select, socket, struct, sys
import numpy as np
from forebay.store.wire.loopback import send_unpaced
flat = memoryview(np.random.default_rng(0).integers(0, 255, int(sys.argv[2]), dtype=np.uint8))
paced, unpaced = peers = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(2)]
for peer in peers:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
send_unpaced(unpaced)
at = 0
while True:
    peer = select.select(peers, [], [])[0][0]
    asked = peer.recv(64, socket.MSG_WAITALL)
    if len(asked) < 64:
        break
    size, count = struct.unpack_from("<QQ", asked)
    if not count:
        peer.sendall(asked)
    for _ in range(count):
        at = at if at + size <= len(flat) else 0
        peer.sendall(flat[at : at + size])
        at += size
"""

    def __init__(self, footprint: int) -> None:
        self.flat: Bytes = np.random.default_rng(1).integers(0, 255, footprint, dtype=np.uint8)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            command = [
                sys.executable,
                "-c",
                self._CODE,
                str(listener.getsockname()[1]),
                str(footprint),
            ]
            self._child = subprocess.Popen(command)
            self._paced, self._unpaced = listener.accept()[0], listener.accept()[0]
        for connected in (self._paced, self._unpaced):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self._paced.close()
        self._unpaced.close()
        self._child.wait(30)

    def pull(self, size: int, count: int, buffers: list[Bytes], *, paced: bool = False) -> None:
        """``paced``: as the machine's congestion control has it."""
        connected = self._paced if paced else self._unpaced
        _ask(connected, size, count)
        for buffer in buffers[:count]:
            view, done = buffer.data, 0
            while done < size:
                done += connected.recv_into(view[done:], 0, socket.MSG_WAITALL)

    def ping(self) -> None:
        """64 bytes there and back."""
        _ask(self._unpaced, 0, 0)
        self._unpaced.recv(64, socket.MSG_WAITALL)


def _ask(connected: socket.socket, size: int, count: int) -> None:
    connected.sendall(size.to_bytes(8, "little") + count.to_bytes(8, "little") + bytes(48))


def interleaved(
    contenders: Mapping[str, Callable[[], object]], config: BenchConfig, call_bytes: int
) -> dict[str, float]:
    """Median seconds of one call of each contender, over rounds in which they take turns; the first round warms up."""
    calls = max(3, min(400, config.round_bytes // call_bytes))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(config.rounds + 1):
        for name, call in contenders.items():
            times = []
            for _ in range(calls):
                begun = time.perf_counter()
                call()
                times.append(time.perf_counter() - begun)
            if number:
                seconds[name].append(statistics.median(times))
    return {name: statistics.median(times) for name, times in seconds.items()}


def _write_raw(path: Path, size: int, count: int) -> None:
    block = aligned_buffer(size)[:size]
    block[:] = os.urandom(size)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        for index in range(count):
            os.pwrite(fd, block, index * size)
    finally:
        os.close(fd)


def keys_for(size: int, footprint: int) -> list[bytes]:
    """As many as the footprint holds, and at least a large batch."""
    return [b"bench-%d-%d" % (size, index) for index in range(max(32, footprint // (size + 64)))]


def chunks(keys: list[bytes], count: int) -> list[list[bytes]]:
    return [keys[start : start + count] for start in range(0, len(keys), count)]


def _must(value: object) -> None:
    if not value:
        raise BenchError("a key that was put is not there")


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"not within {WAIT_S} s: {what}")
        time.sleep(0.02)
