"""Small values that a client reads from its machine's disk itself: the right bytes of what the master named, or the holder is asked."""

import ctypes
import itertools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from forebay.store import Status, StoreClient
from forebay.store.client import own_reads as own_reads_module
from forebay.store.client.gets import Want, locate
from forebay.store.client.own_reads import OwnRead
from forebay.store.crc import crc32c
from forebay.store.holder.log import hints as log_hints
from forebay.store.holder.log.files import Directory
from forebay.store.holder.log.hints import LogHints, LogView
from forebay.store.holder.log.log import Item, SsdLog
from forebay.store.holder.log.record import BLOCK_BYTES, padded
from forebay.store.master.records import MasterConfig
from forebay.store.native.reads import OneRead
from forebay.store.wire.messages import Grave, Place, Spot, Tier
from tests.store.store_cluster import Cluster, cluster, wait_for
from tests.store.store_process import farm
from tests.store.store_traffic import all_usable

pytestmark = pytest.mark.skipif(
    own_reads_module._reader() is None, reason="no compiler, or a kernel without such reads"
)
TENANT = "t"
HOLDER = 3
MIB = 1 << 20
SIZE = 64 << 10


def content(key: bytes, number: int, size: int) -> bytes:
    return (b"%b/%d;" % (key, number) * (size // 4 + 1))[:size]


class Desk:
    """A log with hints, and a client's view of it. Its directory is a real disk's, as /dev/shm has no O_DIRECT. ``asks``: reads go
    on beside a question, as a client's do; else they are begun when they are taken."""

    def __init__(self, path: Path, capacity: int = 1 << 30, *, asks: bool = True) -> None:
        self.path, self.capacity, self.asks = path, capacity, asks
        self.lengths: dict[bytes, int] = {}  # as the master knows them
        self.start()

    def start(self) -> None:
        self.log = SsdLog(Directory(self.path), self.capacity)
        self.hints = LogHints(self.path, self.capacity)
        self.log.tell(self.hints)
        self.view = LogView([os.dup(fd) for fd in self.hints.descriptors])

    def close(self) -> None:
        self.hints.close()
        self.log.close()

    def append(self, key: bytes, generation: int, value: bytes) -> None:
        self.log.append([Item(TENANT, key, generation, crc32c(value), memoryview(value))])
        self.lengths[key] = len(value)
        self.log.show(TENANT, key)

    def read(self, key: bytes, generation: int, count: int, offset: int = 0) -> bytes | None:
        """What a client gets that the master told of ``generation``; None if it has to ask the holder."""
        want = Want(key, offset, np.zeros(count, np.uint8))
        own = OwnRead.prepare(self.view, HOLDER, TENANT, key, want.target)
        if own is not None and self.asks:
            self.ask(own.read)
        locate(
            want,
            Place(Status.OK, self.lengths.get(key, count), generation, (Spot(HOLDER, Tier.SSD),)),
        )
        if own is None or not own.settle(want, time.monotonic() + 10):
            return None
        assert want.status is Status.OK and not want.spots
        return want.target.tobytes()

    def ask(self, read: OneRead) -> None:
        """A question that was answered before it came."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(b"answer")
            into, sent = ctypes.create_string_buffer(64), ctypes.c_int64()
            assert (
                read.ask(ours.fileno(), b"question", ctypes.addressof(into), 64, ctypes.byref(sent))
                == 6
            )
            assert (into.value, sent.value, theirs.recv(64)) == (b"answer", 8, b"question")
            assert (
                read.ask(ours.fileno(), b"question", ctypes.addressof(into), 64, ctypes.byref(sent))
                is None
            ), "it is begun already"


@pytest.fixture(params=[True, False], ids=["asking", "later"])
def desk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Desk]:
    if not Directory(tmp_path).direct:
        pytest.skip("a file system without O_DIRECT")
    made = Desk(tmp_path, asks=request.param)
    yield made
    made.close()


def test_a_value_and_parts_of_it(desk: Desk) -> None:
    value = content(b"k", 1, 100_000)
    desk.append(b"k", 7, value)
    assert desk.read(b"k", 7, len(value)) == value
    assert desk.read(b"k", 7, 5000, 70_000) == value[70_000:75_000]
    assert desk.read(b"k", 7, 1, len(value)) is None, "beyond its end"
    assert desk.read(b"k", 8, len(value)) is None, "the master named another generation"
    assert desk.read(b"other", 7, len(value)) is None
    desk.log.hide(TENANT, b"k")
    assert desk.read(b"k", 7, len(value)) is None


def test_what_comes_while_the_answer_is_awaited_is_copied_and_summed_then(desk: Desk) -> None:
    value = content(b"k", 1, SIZE + 5)
    desk.append(b"k", 7, value)
    target = np.zeros(len(value), np.uint8)

    def copied() -> bool:
        """A disk that is slow for once is waited for by ``end``, and nothing copied."""
        own = OwnRead.prepare(desk.view, HOLDER, TENANT, b"k", target)
        assert own is not None
        if desk.asks:
            desk.ask(own.read)
        assert own.read.end(time.monotonic() + 10) == BLOCK_BYTES + padded(len(value))
        return own.read.copied_crc() is not None

    if desk.asks:
        wait_for(copied)
        assert target.tobytes() == value
    else:
        assert not copied() and not target.any()


def test_a_read_that_the_kernel_refuses_gives_nothing() -> None:
    reader = own_reads_module._reader()
    assert reader is not None
    assert reader.read.prepare(-1, 0, BLOCK_BYTES)
    assert reader.read.end(time.monotonic() + 10) is None and not reader.read.under_way
    assert reader.read.prepare(-1, 0, BLOCK_BYTES), "the next"


def test_a_hint_at_another_keys_record_or_a_damaged_one_gives_nothing(
    desk: Desk, tmp_path: Path
) -> None:
    first, second = content(b"a", 1, SIZE), content(b"b", 1, SIZE)
    desk.append(b"a", 7, first)
    desk.append(b"b", 7, second)
    here, there = desk.log.index.newest((TENANT, b"a")), desk.log.index.newest((TENANT, b"b"))
    assert here is not None and there is not None
    desk.hints.show(TENANT, b"a", there)
    assert desk.read(b"a", 7, SIZE) is None
    desk.hints.show(TENANT, b"a", here)
    assert desk.read(b"a", 7, SIZE) == first
    for position in (here.position + 30, here.position + BLOCK_BYTES + 1000):  # its head, its value
        with Directory(tmp_path).file(here.file).open("r+b") as file:
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 1]))
            file.flush()
            os.fsync(file.fileno())
            assert desk.read(b"a", 7, SIZE) is None
            file.seek(position)
            file.write(byte)
            file.flush()
            os.fsync(file.fileno())
    assert desk.read(b"a", 7, SIZE) == first
    assert (
        desk.log.read(TENANT, b"a", 8, memoryview(bytearray(1))) is None
        and desk.read(b"a", 7, SIZE) == first
    )


def test_a_file_that_goes_frees_its_space_though_a_client_has_it_open(desk: Desk) -> None:
    desk.append(b"k", 1, content(b"k", 1, SIZE))
    assert desk.read(b"k", 1, SIZE) is not None
    record = desk.log.index.newest((TENANT, b"k"))
    assert record is not None
    held = desk.view.file(record.file)
    assert held is not None and os.fstat(held.fd).st_blocks > 0
    desk.log.drop_oldest()
    assert (os.fstat(held.fd).st_nlink, os.fstat(held.fd).st_blocks) == (0, 0)
    assert desk.read(b"k", 1, SIZE) is None


def test_a_client_keeps_no_files_open_that_the_log_has_dropped(tmp_path: Path) -> None:
    if not Directory(tmp_path).direct:
        pytest.skip("a file system without O_DIRECT")
    desk = Desk(tmp_path, capacity=16 << 20)
    for number in range(60):
        key, value = b"%d" % number, content(b"k", number, 1 << 20)
        desk.log.make_room(BLOCK_BYTES + padded(len(value)), [])
        desk.append(key, 1, value)
        assert desk.read(key, 1, len(value)) == value
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert sum(link.startswith(str(tmp_path)) and link.endswith("(deleted)") for link in links) <= 1
    desk.close()


KEYS = [b"a", b"b", b"c", b"d"]


class OwnReadTwin(RuleBasedStateMachine):
    """Appends, burials, evicted files and restarts against a dictionary of what each generation was."""

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory(dir=Path.cwd())
        self.desk = Desk(Path(self.directory.name), 12 * MIB)
        self.generation = 0
        self.is_current = True  # what the client looks at
        self.values: dict[tuple[bytes, int], bytes] = {}

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.desk.close()
            self.directory.cleanup()

    @rule(key=st.sampled_from(KEYS), size=st.sampled_from([1, 5000, MIB]))
    def append(self, key: bytes, size: int) -> None:
        self.generation += 1
        value = self.values[key, self.generation] = content(key, self.generation, size)
        self.desk.log.make_room(BLOCK_BYTES + padded(size), [])
        self.desk.append(key, self.generation, value)
        assert not self.is_current or self.desk.read(key, self.generation, size) == value

    @rule(key=st.sampled_from(KEYS), back=st.integers(0, 5), exact=st.booleans())
    def bury(self, key: bytes, back: int, exact: bool) -> None:
        self.desk.log.bury([Grave(TENANT, key, max(1, self.generation - back), exact)], [])

    @rule()
    def restart(self) -> None:
        self.desk.close()
        old = self.desk.view
        self.desk.start()
        self.desk.view, self.is_current = old, False  # a client that has not noticed

    @rule()
    def look_again(self) -> None:
        self.desk.view, self.is_current = (
            LogView([os.dup(fd) for fd in self.desk.hints.descriptors]),
            True,
        )

    @rule(key=st.sampled_from(KEYS), back=st.integers(0, 8))
    def read(self, key: bytes, back: int) -> None:
        generation = max(0, self.generation - back)
        value = self.values.get((key, generation), b"?")
        assert self.desk.read(key, generation, len(value)) in (None, value)


@pytest.mark.skipif(not Directory(Path.cwd()).direct, reason="a file system without O_DIRECT")
class TestOwnReadTwin(OwnReadTwin.TestCase):
    settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


# ---------------------------------------------------------------------------------------------- through a store


def own_reads(client: StoreClient) -> int:
    return sum(log.reads for master in client.masters for _, log in master._holders.logs())


def cold(client: StoreClient, keys: list[bytes]) -> list[bytes]:
    return [key for key, tiers in zip(keys, client.tiers(keys), strict=True) if tiers == {Tier.SSD}]


def fill(client: StoreClient, name: bytes, count: int) -> list[bytes]:
    keys = [b"%b-%d" % (name, number) for number in range(count)]
    for key in keys:
        assert client.put(key, content(key, 0, SIZE)) is Status.OK
    return keys


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Cluster]:
    """16 values fit its memory."""
    if not Directory(tmp_path).direct:
        pytest.skip("a file system without O_DIRECT")
    with cluster(MasterConfig(settle_s=0.0, lease_s=0.3)) as made:
        made.holder(dram=16 * (SIZE + 64) + 4096, ssd=tmp_path / "log")
        yield made


def test_cold_values_are_read_past_the_holder_which_hears_of_it(
    small: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_hints, "TELL_AFTER", 4)
    client = small.client()
    keys = fill(client, b"k", 60)
    some = cold(client, keys)[:20]
    assert len(some) == 20
    buffer = bytearray(SIZE)
    assert client.get_into([some[0]], [buffer]) == [Status.OK]  # opens the door, if nothing has
    before = own_reads(client)
    for key in some:
        assert client.get_into([key], [buffer]) == [Status.OK] and buffer == content(key, 0, SIZE)
        assert client.get(key) == content(key, 0, SIZE)
    assert own_reads(client) == before + 2 * len(some)
    log = small.holders[0].log
    assert log is not None
    wait_for(
        lambda: (record := log.index.newest(("default", some[0]))) is not None and record.tick > 0
    )


def test_what_was_removed_replaced_or_promoted_is_not_read_from_where_it_lay(
    small: Cluster,
) -> None:
    client, other = small.client(), small.client()
    keys = fill(client, b"k", 60)
    gone, new, warm = cold(client, keys)[:3]
    for key in (gone, new, warm):
        assert client.get(key) == content(key, 0, SIZE)
    assert other.remove([gone]) == [Status.OK]
    assert client.get(gone) is None
    wait_for(lambda: other.put(new, content(new, 1, SIZE + 1)) is Status.OK)
    assert client.get(new) == content(new, 1, SIZE + 1)
    more = itertools.count()
    wait_for(
        lambda: fill(other, b"more-%d" % next(more), 20) and cold(client, [new]),
        what="it is on SSD only, behind its older record",
    )
    assert client.get(new) == content(new, 1, SIZE + 1)


def test_readers_beside_removals_replacements_evicted_files_and_a_killed_holder(
    tmp_path: Path,
) -> None:
    """Values change their length, so a put replaces; what a reader gets is one that was put and not replaced before it asked."""
    if not Directory(tmp_path).direct:
        pytest.skip("a file system without O_DIRECT")
    keys = [b"key-%d" % number for number in range(100)]
    number = {key: 0 for key in keys}  # of the newest put that was acknowledged
    begun = dict(number)  # of the newest that may be
    wrong: list[object] = []
    counts = {"own": 0, "put": 0}
    halt = threading.Event()

    def size(version: int) -> int:
        return SIZE + version % 7

    def change(url: str) -> None:
        with StoreClient.connect(url, timeout_s=3.0) as client:
            version = 0
            while not halt.is_set():
                version += 1
                key = keys[version * 7 % len(keys)]
                begun[key] = version
                if client.put(key, content(key, version, size(version))) is Status.OK:
                    number[key] = version
                    counts["put"] += 1

    def read(url: str) -> None:
        """What is on SSD only; what is in memory would be leased, and nothing evicted."""
        with StoreClient.connect(url, timeout_s=3.0) as client:
            while not halt.is_set():
                for key in cold(client, keys):
                    oldest = number[key]
                    got = client.get(key)
                    newest = begun[key]
                    if got is not None:
                        version = int(got.split(b"/", 1)[1].split(b";", 1)[0])
                        if (
                            got != content(key, version, len(got))
                            or not oldest <= version <= newest
                        ):
                            wrong.append((key, version, oldest, newest))
                counts["own"] = max(counts["own"], own_reads(client))

    with farm(tmp_path) as nodes:
        master = nodes.master("--lease-s", "0.5")
        holder = nodes.holder(master, "h", "3MiB", "--ssd-size", "16MiB")
        threads = [threading.Thread(target=work, args=(master.url,)) for work in (change, read)]
        with StoreClient.connect(master.url) as client:
            wait_for(lambda: all_usable(client, 1))
            for thread in threads:
                thread.start()
            try:
                wait_for(
                    lambda: counts["own"] > 30 and counts["put"] > 300, 60, "files go under readers"
                )
                holder.kill()
                nodes.again(holder)
                wait_for(lambda: all_usable(client, 1))
                goal = {name: count + 40 for name, count in counts.items()}
                counts["own"] = 0
                wait_for(
                    lambda: counts["own"] > 20 and counts["put"] > goal["put"],
                    60,
                    "all goes on with the new holder",
                )
            finally:
                halt.set()
                for thread in threads:
                    thread.join(30)
    assert wrong == []
