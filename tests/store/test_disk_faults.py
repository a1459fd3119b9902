"""Disks that are full, fail or flip bits, and clocks that jump, under real processes with clients at work."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.store import Status, StoreClient
from forebay.store.wire.messages import Tier
from tests.store.store_cluster import wait_for
from tests.store.store_process import Farm, Process, farm
from tests.store.store_traffic import RECOVERY_S, Traffic, assert_whole, durable, value

MIB = 1 << 20
TOMBSTONE = b"FBLG\1\0\2\0"  # how the head of its record begins


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Farm]:
    with farm(tmp_path) as one:
        yield one


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own, which can really be full."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "forebay-test", str(where)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(
            f"a full disk needs a file system of its own, and this user cannot mount one: {mounted.stderr.decode().strip()}"
        )
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def stored(client: StoreClient, key: bytes) -> bool:
    return client.put(key, value(key)) in (Status.OK, Status.EXISTS)


def there(client: StoreClient, keys: set[bytes]) -> set[bytes]:
    named = sorted(keys)
    return {key for key, found in zip(named, client.exists(named), strict=True) if found}


def state(client: StoreClient) -> str:
    return client.holders().holders[0].ssd_state


class Disease:
    """How a disk is made to fail, and to be well again."""

    def __init__(self, strike: Callable[[], None], heal: Callable[[], None]) -> None:
        self.strike = strike
        self.heal = heal


def survives_a_broken_disk(
    master: Process, holder: Process, nodes: Farm, disease: Disease, words: str
) -> None:
    """Stored and read throughout, removals not acknowledged meanwhile, a clear state, well again within 5 s, and a kill -9 after
    that costs nothing durable and brings back nothing removed."""
    with StoreClient.connect(master.url, timeout_s=0.5) as client, Traffic(master.url) as traffic:
        wait_for(lambda: len(durable(client, traffic.stored)) > 10 and len(traffic.removed) > 2)

        def struck() -> bool:
            disease.strike()
            return words in state(client)

        wait_for(struck, 20.0, f"the state says {words!r}")
        wait_for(traffic.progress(), what="puts and reads go on in DRAM alone")
        wait_for(lambda: stored(client, b"during"), RECOVERY_S)
        assert client.get(b"during") in (value(b"during"), None), (
            "evicted as in a plain cache, or itself"
        )
        meanwhile = set(traffic.stored)
        disease.heal()
        wait_for(lambda: state(client) == "ok", RECOVERY_S, "well again")
        wait_for(
            lambda: there(client, meanwhile) <= durable(client, meanwhile),
            RECOVERY_S,
            "what DRAM still has of it is logged",
        )
        unlogged = client.stats().counters.get("evicted_unlogged", 0)
        wait_for(traffic.progress(), what="traffic goes on")
        assert client.stats().counters.get("evicted_unlogged", 0) == unlogged, (
            "while the disk works nothing goes before it is logged"
        )
    with StoreClient.connect(master.url) as client:
        # Nothing is put any more that it would have to make room for, in DRAM or in the log: under traffic both turn over in a second.
        wait_for(lambda: stored(client, b"after"), RECOVERY_S)
        wait_for(lambda: durable(client, {b"after"}), RECOVERY_S, "what comes now is logged")
        safe = durable(client, traffic.stored) | {b"after"}
        holder.kill()
        nodes.again(holder)
        assert_whole(client, safe, traffic.removed)
    assert traffic.wrong == []


def test_a_disk_that_is_really_full(small_disk: Path, nodes: Farm) -> None:
    master = nodes.master("--put-wait-s", "0.5")
    holder = nodes.run(
        "holder",
        "--master",
        master.url,
        "--dram",
        "16MiB",
        "--ssd",
        str(small_disk / "log"),
        "--ssd-size",
        "16MiB",
    )
    ballast = small_disk / "ballast"

    def fill() -> None:
        """Another program takes whatever is free, also what the log gives back."""
        with ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(64 << 10))
            except OSError:
                pass

    survives_a_broken_disk(master, holder, nodes, Disease(fill, ballast.unlink), "No space left")


FAILING_DISK = """
import errno, os
from pathlib import Path
from forebay.store.holder.log import files
real = files.Directory.write
def write(self, fd, data, at):
    if Path({sick!r}).exists():
        real(self, fd, data[: len(data) // 2 & -4096], at)  # half of it is written, as a dying disk does
        raise OSError({code}, os.strerror({code}))
    real(self, fd, data, at)
files.Directory.write = write
"""


@pytest.mark.parametrize(
    "code, words",
    [(5, "Input/output error"), pytest.param(28, "No space left", marks=pytest.mark.slow)],
)
def test_a_disk_whose_writes_fail_half_way(
    nodes: Farm, tmp_path: Path, code: int, words: str
) -> None:
    sick = tmp_path / "sick"
    nodes.prelude = FAILING_DISK.format(sick=str(sick), code=code)
    master = nodes.master("--put-wait-s", "0.5")
    holder = nodes.holder(master, "h", "16MiB")
    survives_a_broken_disk(master, holder, nodes, Disease(sick.touch, sick.unlink), words)


def test_bits_that_flip_on_disk_are_misses_and_never_wrong_bytes(
    nodes: Farm, tmp_path: Path
) -> None:
    """In values, heads and tombstones, under a running holder and before it starts; the neighbours are fine, what is removed
    stays so, and what is put again stays."""
    master = nodes.master()
    holder = nodes.holder(master)
    keys = {b"key-%02d" % index for index in range(24)}
    with StoreClient.connect(master.url) as client:
        wait_for(lambda: client.put(b"warm", b"up") in (Status.OK, Status.EXISTS))
        for key in keys:
            assert client.put(key, value(key)) is Status.OK
        wait_for(lambda: durable(client, keys) == keys)
        assert client.remove([b"key-23"]) == [Status.OK]
        keys -= {b"key-23"}
        holder.kill()
        flip(tmp_path / "h", TOMBSTONE, 20)
        flip(tmp_path / "h", value(b"key-00")[:64], 150_000)
        flip(tmp_path / "h", value(b"key-01")[:64], -4096 + 20)  # its head block
        holder = nodes.again(holder)
        wait_for(lambda: client.exists([b"key-02"]) == [True], RECOVERY_S)
        assert client.tiers([b"key-02"]) == [{Tier.SSD}], (
            "nothing is in DRAM that could answer instead of the disk"
        )
        flip(tmp_path / "h", value(b"key-02")[:64], 1)  # under the running holder
        damaged = {b"key-00", b"key-01", b"key-02"}
        for key in damaged:
            assert client.get(key) is None, key
        wait_for(lambda: not any(client.exists(sorted(damaged))), what="it is not claimed any more")
        assert_whole(client, keys - damaged, {b"key-23"})
        for key in damaged:
            assert client.put(key, value(key)) is Status.OK
        wait_for(lambda: durable(client, keys) == keys)
        holder.kill()
        nodes.again(holder)
        assert_whole(client, keys, set())


def flip(directory: Path, begin: bytes, offset: int) -> None:
    """One bit, ``offset`` bytes from where a value begins."""
    for file in sorted(directory.glob("*.log")):
        at = file.read_bytes().find(begin)
        if at >= 0:
            with file.open("r+b") as log:
                log.seek(at + offset)
                byte = log.read(1)[0]
                log.seek(at + offset)
                log.write(bytes([byte ^ 4]))
                log.flush()
                os.fsync(log.fileno())
            return
    raise AssertionError(f"no value that begins with {begin[:8]!r} is in {directory}")


OTHER_CLOCK = """
import time
from pathlib import Path
real_ns = time.time_ns
def time_ns():
    try:
        return real_ns() + int(Path({clock!r}).read_text() or 0) * 10**9
    except OSError:
        return real_ns()
time.time_ns, time.time = time_ns, lambda: time_ns() / 1e9
"""
YEARS = 365 * 86400


@pytest.mark.slow
def test_a_wall_clock_that_jumps_under_running_and_restarted_processes(
    nodes: Farm, tmp_path: Path
) -> None:
    clock = tmp_path / "clock"
    nodes.prelude = OTHER_CLOCK.format(clock=str(clock))
    master = nodes.master()
    holder = nodes.holder(master)
    with StoreClient.connect(master.url) as client, Traffic(master.url) as traffic:
        wait_for(lambda: len(traffic.removed) > 2)
        for jump in (10 * YEARS, -10 * YEARS):
            clock.write_text(str(jump))
            wait_for(traffic.progress(), RECOVERY_S, "running processes do not care")
            assert client.put(b"replaced", b"of %d" % jump) is Status.OK
            wait_for(lambda: durable(client, {b"replaced"}), RECOVERY_S)
            master.kill()
            master = nodes.again(master)
            wait_for(traffic.progress(), RECOVERY_S, "nor do restarted ones")
            assert client.get(b"replaced") == b"of %d" % jump
        assert client.put(b"replaced", b"at last") is Status.OK, (
            "a put under a clock that went back still is the newest"
        )
        wait_for(lambda: durable(client, {b"replaced"}), RECOVERY_S)
        safe = durable(client, traffic.stored)
        holder.kill()
        nodes.again(holder)
        wait_for(traffic.progress(), RECOVERY_S)
    with StoreClient.connect(master.url) as client:
        assert_whole(client, safe & traffic.stored, traffic.removed)
        assert client.get(b"replaced") == b"at last"
    assert traffic.wrong == []
