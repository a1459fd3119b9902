"""Small values read without asking anybody, on the word of a holder that runs beside its master: only what the key holds now."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from forebay.store import Status, StoreClient
from forebay.store.client import own_reads as own_reads_module
from forebay.store.client.gets import Want
from forebay.store.client.own_reads import OwnRead
from forebay.store.client.puts import Gift, Putter
from forebay.store.crc import crc32c
from forebay.store.holder.log import hints as log_hints
from forebay.store.holder.log.files import Directory, Lock
from forebay.store.holder.log.hints import LogHints, LogView
from forebay.store.holder.log.log import Item, SsdLog
from forebay.store.holder.node import Holder
from forebay.store.holder.segment import as_bytes
from forebay.store.holder.writer import Fsync
from forebay.store.master.records import MasterConfig
from forebay.store.wire.frames import decode_master_to_client, encode
from forebay.store.wire.messages import Grant, Grave, PutRevoke, Tier, Touched
from tests.store.store_cluster import Cluster, cluster, wait_for
from tests.store.store_process import farm

TENANT = "t"
SIZE = 64 << 10


@pytest.fixture(autouse=True)
def _can_read_itself(tmp_path: Path) -> None:
    if own_reads_module._reader() is None or not Directory(tmp_path).direct:
        pytest.skip("no compiler, a kernel without such reads, or a file system without O_DIRECT")


def content(key: bytes, version: int, size: int = SIZE) -> bytes:
    return (b"%b/%d;" % (key, version) * (size // 4 + 1))[:size]


def unasked(client: StoreClient) -> int:
    return sum(log.unasked for master in client.masters for _, log in master._holders.logs())


def logs(client: StoreClient) -> list[tuple[int, LogView]]:
    return [log for master in client.masters for log in master._holders.logs()]


# ---------------------------------------------------------------------------------------------- the word


class Desk:
    """A log with one record, a table that shows it, and a client's view of that."""

    def __init__(self, path: Path) -> None:
        self.lock = Lock(path)
        self.log = SsdLog(Directory(path), 1 << 30)
        self.hints = LogHints(path, 1 << 30, self.lock.mark)
        self.log.tell(self.hints)
        self.value = content(b"k", 1)
        self.log.append([Item(TENANT, b"k", 7, crc32c(self.value), memoryview(self.value))])
        self.log.show(TENANT, b"k")
        self.view = LogView([os.dup(fd) for fd in self.hints.descriptors])

    def read(
        self, between: Callable[[], object] = lambda: None, count: int = SIZE, offset: int = 0
    ) -> bytes | None:
        want = Want(b"k", offset, np.zeros(count, np.uint8))
        own = OwnRead.prepare(self.view, 3, TENANT, b"k", want.target)
        if own is None:
            return None
        between()
        return (
            want.target.tobytes()
            if own.unasked(want, time.monotonic() + 10) and want.status is Status.OK
            else None
        )

    def close(self) -> None:
        self.hints.close()
        self.log.close()
        self.lock.release()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.close()


def test_nothing_is_read_unasked_but_whole_values_while_the_word_is_given(desk: Desk) -> None:
    assert desk.read() is None
    desk.hints.vouch(True)
    assert desk.read() == desk.value
    assert (
        desk.read(count=100) is None
        and desk.read(count=SIZE - 1) is None
        and desk.read(offset=1) is None
    )
    assert desk.read(count=SIZE + 1) is None
    desk.hints.vouch(False)
    assert desk.read() is None
    desk.hints.vouch(True)
    assert desk.read() == desk.value
    desk.log.bury([Grave(TENANT, b"k", 7)], [])
    assert desk.read() is None


def test_a_word_that_changes_while_a_slot_is_read_is_none(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.hints.vouch(True)
    assert desk.read() == desk.value
    check = log_hints.crc32c

    def taken_back_and_given(data: bytes) -> int:
        """Of the slot: it is looked at between the two looks at the word."""
        if len(data) == log_hints._SHOWN.size:
            desk.hints.vouch(False)
            desk.hints.vouch(True)
        return check(data)

    monkeypatch.setattr(log_hints, "crc32c", taken_back_and_given)
    assert desk.read() is None
    monkeypatch.undo()
    assert desk.read() == desk.value


def test_a_word_ends_with_the_lock_and_another_lock_does_not_renew_it(
    desk: Desk, tmp_path: Path
) -> None:
    desk.hints.vouch(True)
    later: list[Lock] = []

    def change_hands() -> None:
        desk.lock.release()
        later.append(Lock(tmp_path))

    assert desk.read(between=change_hands) is None
    assert desk.read() is None
    desk.lock = later[0]


def test_a_slot_that_is_half_written_shows_nothing(desk: Desk) -> None:
    desk.hints.vouch(True)
    table, place = desk.hints._table, desk.hints._place(log_hints._name(TENANT, b"k"))
    for at in range(place, place + log_hints._SHOWN.size + 4):
        table[at] ^= 1
        assert desk.view.find(TENANT, b"k") is None, at - place
        table[at] ^= 1
    assert desk.read() == desk.value


def test_without_a_lock_there_is_no_word(tmp_path: Path) -> None:
    hints = LogHints(tmp_path, 1 << 30)
    hints.vouch(True)
    assert not hints.vouches
    hints.close()


# ---------------------------------------------------------------------------------------------- beside a master


class Witnessed:
    """A cluster of one holder beside its master. After each step of the master, and whenever something is shown, all that the holder
    gives its word for must be what the master has."""

    def __init__(self, made: Cluster, path: Path, dram: int, ssd_bytes: int) -> None:
        self.cluster = made
        self.false: list[object] = []
        self.shown = 0
        self.holder: Holder | None = None
        assert made.master is not None
        watch = made.master.watch

        def watched(
            name: str,
            instance: str,
            witness: Callable[[bool, int, Sequence[tuple[int, Sequence[Grave]]]], None],
        ) -> bool:
            def checked(
                usable: bool, session: int, told: Sequence[tuple[int, Sequence[Grave]]]
            ) -> None:
                witness(usable, session, told)
                self.check()

            return watch(name, instance, checked)

        made.master.watch = watched  # type: ignore[method-assign]
        self.holder = made.holder(dram=dram, ssd=path, ssd_bytes=ssd_bytes)

    def check(self) -> None:
        """In the loop's thread."""
        if self.holder is None:  # starting
            return
        log, table, master = self.holder.log, self.holder._hints, self.cluster.master
        assert log is not None and table is not None and master is not None
        with log._lock:
            known = list(log.index.items())
            shown = (
                [(place, record) for place, record in known if table.shows(*place, record)]
                if table.vouches
                else []
            )
        for (tenant, key), record in shown:
            self.shown += 1
            held = master.machine.state.tenants[tenant].objects.get(key)
            if held is None or held.generation != record.generation or not held.readable():
                self.false.append((key, record.generation, held and held.generation))


def test_what_a_holder_gives_its_word_for_is_what_the_master_has(tmp_path: Path) -> None:
    """Puts that replace, removals, puts that are given up after they were written, evicted memory and evicted files, all at once."""
    keys = [b"key-%d" % number for number in range(60)]
    halt = threading.Event()
    done = dict.fromkeys(("put", "remove", "give up", "get"), 0)

    def work(made: Cluster, seed: int) -> None:
        random, buffer = Random(seed), bytearray(SIZE)
        client = StoreClient.connect(made.url, timeout_s=3.0)
        master = client.masters[0]
        while not halt.is_set():
            key, version = random.choice(keys), random.randrange(4)
            what = random.choice(("put", "put", "remove", "give up", "get", "get"))
            if what == "put":
                done[what] += client.put(key, content(key, version, SIZE - version)) is Status.OK
            elif what == "remove":
                done[what] += client.remove([key]) == [Status.OK]
            elif what == "get":
                done[what] += client.get_into([key], [buffer]) == [Status.OK]
            else:
                with master._master.lease(time.monotonic() + 3) as channel:
                    putter = Putter(channel, master._holders, time.monotonic() + 3)
                    putter._end = lambda granted, results: channel.close()  # type: ignore[method-assign,assignment,misc]
                    putter._round([Gift(key, as_bytes(content(key, version, SIZE - version)))])
                    done[what] += 1
        client.close()

    with cluster(MasterConfig(settle_s=0.0, lease_s=0.1, put_wait_s=0.2)) as made:
        witnessed = Witnessed(made, tmp_path / "log", 24 * (SIZE + 64) + 4096, 6 << 20)
        threads = [threading.Thread(target=work, args=(made, seed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: min(done.values()) > 80 and witnessed.shown > 1000, 60)
        finally:
            halt.set()
            for thread in threads:
                thread.join(30)
    assert witnessed.false == []


class SlowToSync(Directory):
    """While ``may_sync`` is not set the log's writer stands still in ``sync``: what it wrote is in the index, and nobody was told."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_sync = threading.Event()
        self.may_sync.set()

    def sync(self, fd: int) -> None:
        self.may_sync.wait()
        super().sync(fd)


class Late(Putter):
    """A put that is given up before its value is written."""

    before_write: Callable[[], None]

    def _write_all(self, granted: list[tuple[Gift, Grant]]) -> dict[int, dict[int, Status]]:
        revoke = PutRevoke(
            self._master.new_call(),
            [gift.key for gift, _ in granted],
            [grant.generation for _, grant in granted],
        )
        self._master.ask(revoke, decode_master_to_client, self._deadline)
        self.before_write()
        return super()._write_all(granted)

    def _end(
        self, granted: list[tuple[Gift, Grant]], results: dict[int, dict[int, Status]]
    ) -> None:
        for index, (gift, _) in enumerate(granted):
            [gift.status] = results[index].values()


def test_what_is_written_after_its_put_was_given_up_is_not_read(tmp_path: Path) -> None:
    """Its room goes to another before the master has heard that the log has it, and says that it must forget it."""
    files, buffer = SlowToSync(tmp_path / "log"), bytearray(SIZE)
    with cluster(MasterConfig(settle_s=0.0)) as made:
        holder = made.holder(ssd=tmp_path / "log", fsync=Fsync.BATCH, files=files)
        assert holder.log is not None and holder._hints is not None
        log, table, client = holder.log, holder._hints, made.client()
        master = client.masters[0]

        def stall() -> None:
            wait_for(lambda: not holder._burying)
            files.may_sync.clear()

        try:
            with master._master.lease(time.monotonic() + 15) as channel:
                master._holders.check_epoch(channel.epoch)
                master.reach(time.monotonic() + 15)
                putter = Late(channel, master._holders, time.monotonic() + 15)
                putter.before_write = stall
                gift = Gift(b"late", as_bytes(content(b"late", 1)))
                putter._round([gift])
            assert gift.status is Status.OK
            wait_for(lambda: log.newest_length("default", b"late"))
            assert client.put(b"other", content(b"other", 1)) is Status.OK
            wait_for(lambda: not holder.memory.of("default", b"late"), what="its room is taken")
            assert table.vouches
            assert client.get_into([b"late"], [buffer]) != [Status.OK]
        finally:
            files.may_sync.set()
        wait_for(lambda: log.newest_length("default", b"late") is None, what="the log forgets it")


def test_no_client_can_claim_more_reads_than_can_be_told(tmp_path: Path) -> None:
    with cluster(MasterConfig(settle_s=0.0)) as made:
        holder = made.holder(ssd=tmp_path / "log")
        client, most = made.client(), (1 << 63) - 1
        client.masters[0].reach(time.monotonic() + 15)
        [peer] = client.masters[0]._holders._peers.values()
        with peer.words.lease(time.monotonic() + 15) as channel:
            for _ in range(3):  # more than any number on a wire can be
                channel.send(
                    encode(Touched([(b"k", 1)], most, most, most), optional=True),
                    (),
                    time.monotonic() + 15,
                )
        assert made.master is not None
        counters = made.master.machine.state.counters
        wait_for(
            lambda: (
                counters.get("get_found") or counters.get("holder_lost") or holder.failed.is_set()
            )
        )
        assert (
            counters.get("get_found")
            and not counters.get("holder_lost")
            and not holder.failed.is_set()
        )


@pytest.mark.parametrize("how", ["beside", "apart", "promoting"])
def test_who_gives_its_word(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a holder whose master is elsewhere, nor one whose master must hear of each get. The master's figures count all the same."""
    monkeypatch.setattr(log_hints, "TELL_AFTER", 1)
    config = MasterConfig(settle_s=0.0, lease_s=0.5, promotion_on_hit=how == "promoting")
    with cluster(config, beside=how != "apart") as made:
        made.holder(dram=16 * (SIZE + 64) + 4096, ssd=tmp_path / "log")
        client, keys, buffer = (
            made.client(),
            [b"k-%d" % number for number in range(60)],
            bytearray(SIZE),
        )
        for key in keys:
            assert client.put(key, content(key, 0)) is Status.OK
        some = [
            key for key, tiers in zip(keys, client.tiers(keys), strict=True) if tiers == {Tier.SSD}
        ][:20]
        assert client.get_into([some[0]], [buffer]) == [Status.OK]  # opens the door, if nothing has
        before, found = unasked(client), client.stats().counters.get("got_ssd_bytes", 0)
        for key in some[1:]:
            assert client.get_into([key], [buffer]) == [Status.OK] and buffer == content(key, 0)
        assert unasked(client) - before == (len(some) - 1 if how == "beside" else 0)
        if how != "promoting":
            wait_for(
                lambda: (
                    client.stats().counters.get("got_ssd_bytes", 0)
                    >= found + (len(some) - 1) * SIZE
                )
            )


def test_a_master_that_goes_takes_the_word_with_it(tmp_path: Path) -> None:
    with cluster(MasterConfig(settle_s=0.0, lease_s=0.1)) as made:
        witnessed = Witnessed(made, tmp_path / "log", 16 << 20, 1 << 30)
        holder = witnessed.holder
        assert holder is not None and holder._hints is not None
        table = holder._hints
        wait_for(lambda: table.vouches)
        made.stop_master()
        assert not table.vouches
        made.start_master()  # not the one that the holder was told of
        wait_for(lambda: holder.serving)
        assert not table.vouches


# ---------------------------------------------------------------------------------------------- real processes


def test_nobody_believes_the_word_of_a_killed_store(tmp_path: Path) -> None:
    """Its table is still mapped and says what it said; what its successor removes is not read."""
    keys, buffer = [b"k-%d" % number for number in range(80)], bytearray(SIZE)
    with farm(tmp_path) as nodes:
        args = (
            "--dram",
            "1MiB",
            "--ssd",
            str(tmp_path / "log"),
            "--lease-s",
            "0.5",
            "--fsync",
            "always",
        )
        store = nodes.run("up", "--listen", "127.0.0.1:0", *args)
        with StoreClient.connect(store.url) as client, StoreClient.connect(store.url) as other:
            for key in keys:
                assert client.put(key, content(key, 0)) is Status.OK

            def cold() -> list[bytes]:
                return [
                    key
                    for key, tiers in zip(keys, client.tiers(keys), strict=True)
                    if tiers == {Tier.SSD}
                ]

            some = cold()[:20]

            def reads_unasked() -> bool:
                before = unasked(client)
                return (
                    client.get_into([some[0]], [buffer]) == [Status.OK] and unasked(client) > before
                )

            wait_for(reads_unasked, what="the store gives its word")
            [(number, view)] = logs(client)
            store.kill()
            for key in some:
                want = Want(key, 0, np.zeros(SIZE, np.uint8))
                own = OwnRead.prepare(view, number, "default", key, want.target)
                assert own is not None and own._hint.word, "the table is as it was"
                assert not own.unasked(want, time.monotonic() + 10)
                assert own.read.end(time.monotonic() + 10), (
                    "what was begun can still be used, if the answer is the right one"
                )
            nodes.again(store)
            gone, stays = some[:10], some[10:]
            wait_for(lambda: other.remove(gone) == [Status.OK] * len(gone))
            for key in gone:
                assert client.get_into([key], [buffer]) != [Status.OK]
            for key in stays:
                assert client.get_into([key], [buffer]) == [Status.OK] and buffer == content(key, 0)
            some = stays
            wait_for(reads_unasked, what="its successor gives its own")


def test_readers_beside_removals_and_replacements_see_what_was_acknowledged(tmp_path: Path) -> None:
    keys = [b"key-%d" % number for number in range(100)]
    newest = dict.fromkeys(keys, 0)  # that was acknowledged; 0: the key was removed, or never put
    begun = dict.fromkeys(keys, 0)
    wrong: list[object] = []
    counts = {"unasked": 0, "change": 0}
    halt = threading.Event()

    def change(url: str) -> None:
        """Only upwards: a removal is a version like any other, and every third is one."""
        with StoreClient.connect(url, timeout_s=3.0) as client:
            version = 0
            while not halt.is_set():
                version += 1
                key = keys[version * 7 % len(keys)]
                begun[key] = version
                if version % 3 == 0:
                    good = client.remove([key]) in ([Status.OK], [Status.NOT_FOUND])
                else:
                    good = client.put(key, content(key, version, SIZE - version % 7)) is Status.OK
                if good:
                    newest[key] = version
                    counts["change"] += 1

    def read(url: str) -> None:
        with StoreClient.connect(url, timeout_s=3.0) as client:
            while not halt.is_set():
                for key, tiers in zip(keys, client.tiers(keys), strict=True):
                    oldest = newest[key]
                    buffer = bytearray(SIZE - oldest % 7)
                    if tiers != {Tier.SSD} or client.get_into([key], [buffer]) != [Status.OK]:
                        continue
                    latest = begun[key]
                    version = int(bytes(buffer[:64]).split(b"/", 1)[1].split(b";", 1)[0])
                    if (
                        buffer != content(key, version, len(buffer))
                        or not oldest <= version <= latest
                        or not version % 3
                    ):
                        wrong.append((key, version, oldest, latest))
                counts["unasked"] = unasked(client)

    with farm(tmp_path) as nodes:
        args = (
            "--dram",
            "3MiB",
            "--ssd",
            str(tmp_path / "log"),
            "--ssd-size",
            "16MiB",
            "--lease-s",
            "0.5",
        )
        store = nodes.run("up", "--listen", "127.0.0.1:0", *args)
        threads = [threading.Thread(target=work, args=(store.url,)) for work in (change, read)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: counts["unasked"] > 30 and counts["change"] > 400, 60)
        finally:
            halt.set()
            for thread in threads:
                thread.join(30)
    assert wrong == []
