"""One contract for everything that may stand behind `backend.PageStore`, and what is special to each."""

import contextlib
import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.store.backend import GetItem, PageStore, PutItem, Status
from forebay.store.backends import StoreURLError, open_store
from forebay.store.backends.directory import DirectoryStore
from forebay.store.backends.embedded import EmbeddedStore
from forebay.store.backends.forebay import ForebayStore
from forebay.store.backends.grouped import GroupedStore
from forebay.store.backends.guarded import GuardedStore
from forebay.store.wire.messages import Tier
from tests.store.mooncake_cluster import mooncake_cluster
from tests.store.redis_server import redis_server
from tests.store.store_cluster import cluster, wait_for

PAGE = 70_000
T = 10.0


@contextlib.contextmanager
def made(kind: str, path: Path) -> Iterator[PageStore]:
    if kind == "file":
        yield DirectoryStore(path, 1 << 30)
    elif kind == "guarded":
        yield GuardedStore(DirectoryStore(path, 1 << 30), print)
    elif kind == "grouped":
        stores = {
            name: GuardedStore(DirectoryStore(path / name, 1 << 30), print)
            for name in ("one", "two")
        }
        grouped = GroupedStore(stores)
        yield grouped
        grouped.close()
    elif kind == "embedded":
        store = EmbeddedStore(path, 16 << 20, 1 << 30)
        try:
            yield store
        finally:
            store.close()
    elif kind == "mooncake":
        with mooncake_cluster() as mooncake:
            opened = open_store(mooncake.url)
            assert opened is not None
            yield opened
            opened.close()
    elif kind == "redis":
        with redis_server(path) as server:
            opened = open_store(server.url)
            assert opened is not None
            yield opened
            opened.close()
    else:
        with cluster() as nodes:
            nodes.holder(ssd=path)
            yield ForebayStore(nodes.client(allow_local=kind == "forebay-local"))


@pytest.fixture(
    params=[
        "file",
        "guarded",
        "grouped",
        "forebay-local",
        "forebay-tcp",
        "embedded",
        "redis",
        "mooncake",
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PageStore]:
    with made(request.param, tmp_path / "store") as one:
        yield one


def put(store: PageStore, key: bytes, value: bytes) -> Status:
    return store.put_from([PutItem(key, value)], T)[0]


def get(store: PageStore, key: bytes, length: int, offset: int = 0) -> bytes | Status:
    buffer = bytearray(length)
    status = store.get_into([GetItem(key, offset, length, buffer)], T)[0]
    return bytes(buffer) if status is Status.OK else status


def test_what_was_put_is_got_whole_and_in_part_item_by_item(store: PageStore) -> None:
    values = {b"key-%d" % index: os.urandom(PAGE + index) for index in range(10)}
    assert (
        store.put_from([PutItem(key, value) for key, value in values.items()], T)
        == [Status.OK] * 10
    )
    assert all(get(store, key, len(value)) == value for key, value in values.items())
    assert get(store, b"key-3", 100, offset=5000) == values[b"key-3"][5000:5100]
    buffers = [bytearray(10) for _ in range(3)]
    items = [
        GetItem(key, 0, 10, buffer)
        for key, buffer in zip([b"key-1", b"none", b"key-2"], buffers, strict=True)
    ]
    assert store.get_into(items, T) == [Status.OK, Status.NOT_FOUND, Status.OK]
    assert bytes(buffers[2]) == values[b"key-2"][:10]


def test_clearing_takes_the_objects_of_these_parts_and_no_others(store: PageStore) -> None:
    keys = [b"%d%s" % (index, part) for index in range(3) for part in (b"-a", b"-b", b"-c")]
    assert store.put_from([PutItem(key, bytes(PAGE)) for key in keys], T) == [Status.OK] * 9
    assert store.clear([b"-a", b"-b"], T) == 6
    assert [key for key in keys if get(store, key, PAGE) is not Status.NOT_FOUND] == [
        b"0-c",
        b"1-c",
        b"2-c",
    ]
    assert store.clear([b"-a", b"-b"], T) == 0
    assert put(store, b"0-a", bytes(PAGE)) is Status.OK


def test_a_store_says_what_it_holds(store: PageStore) -> None:
    put(store, b"k", bytes(PAGE))
    sizes = store.use().sizes
    assert sizes["objects"] == 1
    assert sizes.get("ssd_bytes", 0) + sizes.get("dram_bytes", 0) > 0


def test_an_equal_put_exists_and_another_length_replaces(store: PageStore) -> None:
    assert put(store, b"k", b"a" * PAGE) is Status.OK
    assert put(store, b"k", b"a" * PAGE) is Status.EXISTS
    assert put(store, b"k", b"b" * (PAGE + 1)) is Status.OK
    assert get(store, b"k", PAGE + 1) == b"b" * (PAGE + 1)


def test_of_writers_of_one_key_that_come_at_once_one_wins_and_the_others_know(
    store: PageStore,
) -> None:
    for round in range(5):
        values = [bytes([number]) * 1000 for number in range(6)]
        barrier = threading.Barrier(len(values))
        won: list[bytes] = []

        def work(
            value: bytes,
            key: bytes = b"race-%d" % round,
            start: threading.Barrier = barrier,
            won: list[bytes] = won,
        ) -> None:
            start.wait()
            if put(store, key, value) is Status.OK:
                won.append(value)

        threads = [threading.Thread(target=work, args=(value,)) for value in values]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 or not store.capabilities.tells_losers
        assert get(store, b"race-%d" % round, 1000) in won


def test_any_contiguous_buffer_will_do_and_a_longer_one_is_filled_in_front(
    store: PageStore,
) -> None:
    import numpy as np

    source = np.arange(PAGE, dtype=np.float32)
    assert store.put_from([PutItem(b"array", source.reshape(100, -1))], T) == [Status.OK]
    target = np.zeros(PAGE + 5, dtype=np.float32)
    assert store.get_into([GetItem(b"array", 0, PAGE * 4, target)], T) == [Status.OK]
    assert np.array_equal(target[:PAGE], source) and not target[PAGE:].any()


def test_what_cannot_be_is_invalid_and_harms_nothing_else(store: PageStore) -> None:
    put(store, b"k", b"x" * 100)
    assert put(store, b"", b"x") is Status.INVALID
    assert put(store, b"empty", b"") is Status.INVALID
    assert put(store, b"k" * 5000, b"x") is Status.INVALID
    assert get(store, b"k", 101) is Status.INVALID, "longer than the object"
    assert get(store, b"k", 100, offset=1) is Status.INVALID
    assert store.get_into([GetItem(b"k", 0, 100, b"x" * 100)], T) == [Status.INVALID], (
        "a buffer that cannot be written"
    )
    assert store.get_into([GetItem(b"k", 0, 100, bytearray(99))], T) == [Status.INVALID], (
        "a buffer that is too short"
    )
    assert get(store, b"k", 100) == b"x" * 100


def test_match_prefix_counts_leading_keys_of_which_every_part_is_there(store: PageStore) -> None:
    for key in (b"1a", b"1b", b"2a", b"2b", b"3a", b"4a", b"4b"):
        assert put(store, key, b"page") is Status.OK
    assert store.match_prefix([b"1", b"2", b"3", b"4"], [b"a", b"b"], hint=False, timeout_s=T) == 2
    assert store.match_prefix([b"1a", b"2a", b"3a"], [b""], hint=True, timeout_s=T) == 3
    assert store.match_prefix([b"9"], [b"a"], hint=False, timeout_s=T) == 0
    assert store.match_prefix([], [b"a"], hint=False, timeout_s=T) == 0


def test_many_threads_may_use_it_at_once(store: PageStore) -> None:
    wrong: list[object] = []

    def work(name: int) -> None:
        for index in range(12):
            key, value = b"%d-%d" % (name, index), bytes([name * 16 + index]) * PAGE
            status = put(store, key, value)
            if status is not Status.OK or get(store, key, PAGE) != value:
                wrong.append((key, status))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_health_says_that_it_is_well(store: PageStore) -> None:
    assert store.health().ok, store.health()


# ---------------------------------------------------------------------------------------------- the directory


def files(path: Path) -> list[Path]:
    return sorted(path.glob("?/?/*.page"))


def test_directory_keeps_its_size_by_least_recent_use_and_over_a_restart(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, 10 * 1100)
    for index in range(9):
        assert put(store, b"%d" % index, bytes(1000)) is Status.OK
    assert get(store, b"0", 1000) == bytes(1000)
    store = DirectoryStore(tmp_path, 10 * 1100)
    for index in range(9, 14):
        assert put(store, b"%d" % index, bytes(1000)) is Status.OK
    assert get(store, b"0", 1000) == bytes(1000) and get(store, b"1", 1000) is Status.NOT_FOUND
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10 * 1100


def test_directory_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    """It had 256 folders on each level."""
    store = DirectoryStore(tmp_path, 1 << 20)
    for index in range(20):
        assert put(store, b"%d" % index, bytes([index]) * 1000) is Status.OK
    for path in files(tmp_path):
        earlier = tmp_path / path.name[:2] / path.name[2:4]
        earlier.mkdir(parents=True)
        path.rename(earlier / path.name)
    assert files(tmp_path) == []
    store = DirectoryStore(tmp_path, 1 << 20)
    assert [get(store, b"%d" % index, 1000) for index in range(20)] == [
        bytes([index]) * 1000 for index in range(20)
    ]
    assert len(files(tmp_path)) == 20 and not list(tmp_path.glob("??")), (
        "nothing of the old form is left"
    )
    assert store.files.count == 20


def test_directory_a_damaged_or_foreign_file_is_a_miss_and_goes(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, 1 << 20)
    for change in (
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:60] + b"?" + data[61:],
    ):
        assert put(store, b"k", bytes(1000)) is Status.OK
        path = files(tmp_path)[0]
        path.write_bytes(change(path.read_bytes()))
        assert get(store, b"k", 1000) is Status.CHECKSUM
        assert files(tmp_path) == []


@pytest.mark.parametrize("first", ["get", "put"])
def test_directory_what_is_no_file_gives_its_place_up(tmp_path: Path, first: str) -> None:
    store = DirectoryStore(tmp_path, 1 << 20)
    path = store.files.path(b"k")
    (path / "with something in it").mkdir(parents=True)
    if first == "get":
        assert get(store, b"k", 1000) is Status.CHECKSUM
        assert store.match_prefix([b"k"], [], hint=False, timeout_s=5.0) == 0
    assert put(store, b"k", bytes(1000)) is Status.OK
    assert get(store, b"k", 1000) == bytes(1000)


def test_directory_a_reader_out_of_descriptors_costs_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path, 1 << 20)
    assert put(store, b"k", bytes(1000)) is Status.OK

    def out_of_descriptors(self: Path, *args: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", out_of_descriptors)
        assert get(store, b"k", 1000) is Status.UNAVAILABLE
    assert get(store, b"k", 1000) == bytes(1000)


def test_directory_a_file_that_cannot_be_read_is_a_miss_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path, 1 << 20)
    assert put(store, b"k", bytes(1000)) is Status.OK
    bad, read = store.files.path(b"k"), Path.open

    def unreadable(self: Path, *args: Any, **options: Any) -> Any:
        if self == bad:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", unreadable)
        assert get(store, b"k", 1000) is Status.CHECKSUM
    assert store.match_prefix([b"k"], [], hint=False, timeout_s=5.0) == 0
    assert put(store, b"k", bytes(1000)) is Status.OK
    assert get(store, b"k", 1000) == bytes(1000)


def test_directory_a_file_that_cannot_be_removed_does_not_wedge_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report B14."""
    store = DirectoryStore(tmp_path, 5 * 1100)
    for index in range(5):
        put(store, b"%d" % index, bytes(1000))
    oldest = store.files.path(b"0").name
    unlink = Path.unlink

    def stubborn(self: Path, missing_ok: bool = False) -> None:
        if self.name == oldest:
            raise PermissionError(1, "Operation not permitted")
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", stubborn)
    assert [put(store, b"new-%d" % index, bytes(1000)) for index in range(5)] == [Status.OK] * 5


def test_directory_files_that_cannot_be_removed_are_counted_but_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path, 50 * 1100)
    for index in range(45):
        assert put(store, b"%d" % index, bytes(1000)) is Status.OK
    stubborn = {store.files.path(b"%d" % index).name for index in range(20)}
    unlink, tries = Path.unlink, []

    def unlink_some(self: Path, missing_ok: bool = False) -> None:
        if self.name in stubborn:
            tries.append(self.name)
            raise PermissionError(1, "Operation not permitted")
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_some)
    statuses = [put(store, b"new-%d" % index, bytes(1000)) for index in range(100)]
    assert statuses.count(Status.OK) >= 99, "one put meets more of them than it tries"
    assert sorted(tries) == sorted(stubborn), "once each"
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 50 * 1100


def test_directory_several_processes_keep_one_size_together(tmp_path: Path) -> None:
    """Each rank opens the directory for itself."""
    stores = [DirectoryStore(tmp_path, 128 * 1100) for _ in range(3)]
    for index in range(300):
        assert put(stores[index % 3], b"%d" % index, bytes(1000)) is Status.OK
    used = sum(path.stat().st_size for path in files(tmp_path))
    assert used <= 128 * 1100 * (1 + 3 / 64) + 3 * 1100, (
        "each notices what others put after a 64th of the size"
    )
    assert (
        get(stores[0], b"299", 1000) == bytes(1000)
        and get(stores[0], b"0", 1000) is Status.NOT_FOUND
    )


def test_directory_that_was_cleared_under_it_is_made_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "pages", 1 << 20)
    assert put(store, b"k", bytes(1000)) is Status.OK
    shutil.rmtree(tmp_path / "pages")
    store.files._free_seen = (float("-inf"), 0)  # some time has passed
    assert get(store, b"k", 1000) is Status.NOT_FOUND
    assert store.health().ok
    shutil.rmtree(tmp_path / "pages")
    store.files._free_seen = (float("-inf"), 0)
    assert put(store, b"k", bytes(1000)) is Status.OK and get(store, b"k", 1000) == bytes(1000)


def test_directory_that_cannot_be_written_is_unavailable_not_full(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "pages", 1 << 20)
    shutil.rmtree(tmp_path / "pages")
    (tmp_path / "pages").write_text("a file now")
    assert put(store, b"k", bytes(1000)) is Status.UNAVAILABLE
    assert store.match_prefix([b"k"], [], hint=False, timeout_s=T) == 0


def hang(store: DirectoryStore, key: bytes) -> Callable[[], None]:
    """Reads of ``key`` block from now on, as on a dead network file system, until what is returned is called."""
    path = store.files.path(key)
    path.unlink(missing_ok=True)
    os.mkfifo(path)

    def go_on() -> None:
        os.close(
            os.open(path, os.O_RDWR | os.O_NONBLOCK)
        )  # whoever opens it for reading goes on, and finds nothing

    return go_on


def test_directory_a_file_system_that_hangs_costs_the_time_out_and_touches_nothing_later(
    tmp_path: Path,
) -> None:
    store = DirectoryStore(tmp_path, 1 << 20)
    assert (
        put(store, b"well", b"w" * 1000) is Status.OK
        and put(store, b"hangs", b"h" * 1000) is Status.OK
    )
    go_on = hang(store, b"hangs")
    buffers = [bytearray(b"-" * 1000) for _ in range(2)]
    items = [GetItem(b"hangs", 0, 1000, buffers[0]), GetItem(b"well", 0, 1000, buffers[1])]
    assert store.get_into(items, 0.2) == [Status.TIMEOUT, Status.OK]
    go_on()
    assert get(store, b"well", 1000) == b"w" * 1000
    assert buffers[0] == b"-" * 1000


def test_directory_when_every_thread_hangs_calls_still_come_back(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, 1 << 20)
    keys = [b"hangs-%d" % index for index in range(8)]
    assert set(store.put_from([PutItem(key, bytes(1000)) for key in keys], T)) == {Status.OK}
    assert put(store, b"well", b"w" * 1000) is Status.OK
    release = [hang(store, key) for key in keys]
    items = [GetItem(key, 0, 1000, bytearray(1000)) for key in keys]
    assert store.get_into(items, 0.2) == [Status.TIMEOUT] * 8
    assert store.get_into([GetItem(b"well", 0, 1000, bytearray(1000))], 0.2) == [Status.TIMEOUT]
    assert store.match_prefix([b"well"], [], hint=False, timeout_s=0.2) == 0
    assert store.put_from([PutItem(b"new", b"value")], 0.2) == [Status.TIMEOUT]

    def let_go() -> bool:
        for go_on in release:
            go_on()
        return get(store, b"well", 1000) == b"w" * 1000

    wait_for(let_go, what="the file system to come back")


def test_directory_leaves_the_free_space_alone(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, 1 << 30, free=1 << 60)
    assert put(store, b"k", b"x") is Status.NO_SPACE


def test_directory_sweeps_what_dead_processes_left_half_written(tmp_path: Path) -> None:
    DirectoryStore(tmp_path, 1 << 20)
    machine = DirectoryStore(tmp_path, 1 << 20).files._machine
    dead, ours = (
        tmp_path / "tmp" / f"{machine}-999999999-0",
        tmp_path / "tmp" / f"{machine}-{os.getpid()}-x",
    )
    theirs, forgotten = (
        tmp_path / "tmp" / "another-999999999-0",
        tmp_path / "tmp" / "another-999999999-1",
    )
    for path in (dead, ours, theirs, forgotten):
        path.write_bytes(b"half")
    os.utime(forgotten, (0, 0))
    DirectoryStore(tmp_path, 1 << 20)
    assert sorted(path for path in (tmp_path / "tmp").iterdir()) == sorted([ours, theirs])


# ---------------------------------------------------------------------------------------------- embedded


def test_embedded_is_warm_after_a_restart_though_nothing_waited_for_the_disk(
    tmp_path: Path,
) -> None:
    store = EmbeddedStore(tmp_path, 16 << 20, 1 << 30)
    values = [os.urandom(PAGE) for _ in range(50)]
    assert (
        store.put_from([PutItem(b"%d" % index, value) for index, value in enumerate(values)], T)
        == [Status.OK] * 50
    )
    pid = store.pid
    store.close()
    assert not Path(f"/proc/{pid}").exists()
    store = EmbeddedStore(tmp_path, 16 << 20, 1 << 30)
    assert [get(store, b"%d" % index, PAGE) for index in range(50)] == values
    store.close()


def test_embedded_a_second_server_takes_a_sub_directory(tmp_path: Path) -> None:
    first = EmbeddedStore(tmp_path, 8 << 20, 64 << 20)
    second = EmbeddedStore(tmp_path, 8 << 20, 64 << 20)
    assert first.directory == tmp_path and second.directory == tmp_path / "server-2"
    assert put(second, b"k", b"v") is Status.OK and get(first, b"k", 1) is Status.NOT_FOUND
    second.close()
    first.close()


def test_embedded_a_killed_child_is_statuses_and_bad_health_not_exceptions(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path, 8 << 20, 64 << 20)
    put(store, b"k", b"v")
    os.kill(store.pid, signal.SIGKILL)
    wait_for(lambda: not store.health().ok)
    assert store.get_into([GetItem(b"k", 0, 1, bytearray(1))], 0.5)[0] in (
        Status.UNAVAILABLE,
        Status.TIMEOUT,
    )
    assert store.put_from([PutItem(b"k", b"v")], 0.5)[0] in (Status.UNAVAILABLE, Status.TIMEOUT)
    assert store.match_prefix([b"k"], [b""], hint=False, timeout_s=0.5) == 0
    store.close()


def test_embedded_a_killed_child_comes_back_where_it_was_when_it_is_guarded(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path, 8 << 20, 64 << 20)

    def revive(there: PageStore | None) -> PageStore:
        store.start_again_if_dead()
        return store

    said: list[str] = []
    guarded = GuardedStore(store, said.append, revive)
    assert put(guarded, b"k", b"v") is Status.OK
    wait_for(lambda: Tier.SSD in store.client.tiers([b"k"])[0], what="it is durable")
    url, pid = store.url, store.pid
    os.kill(pid, signal.SIGKILL)

    def refused() -> bool:
        guarded.match_prefix([b"k"], [b""], hint=False, timeout_s=0.2)
        return guarded.is_open

    wait_for(refused, what="the breaker")
    wait_for(lambda: not guarded.is_open, what="a probe that goes well")
    assert store.url == url and store.pid != pid and len(said) == 2
    wait_for(lambda: get(guarded, b"k", 1) == b"v", what="its log is listed")
    guarded.close()
    assert not Path(f"/proc/{store.pid}").exists()


def test_store_urls(tmp_path: Path) -> None:
    assert open_store("none") is None
    directory = open_store(f"file:{tmp_path}?size=1MiB&free=1KiB")
    assert isinstance(directory, DirectoryStore)
    for bad in (
        "redis://x",
        "file:x?sice=1",
        "file:x?size=0",
        "forebay://nowhere",
        "forebay://127.0.0.1:1",
    ):
        with pytest.raises(StoreURLError):
            open_store(bad)
