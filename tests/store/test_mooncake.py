"""Mooncake behind the engine: a real master and segment that are full, killed, stopped, or hold another's bytes.

The contract that every backend keeps is in test_backends.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from forebay.store.address import AddressError
from forebay.store.backend import GetItem, PageStore, PutItem, Status
from forebay.store.backends import StoreURLError, open_store
from forebay.store.backends.mooncake.store import MooncakeStore
from forebay.store.backends.mooncake.url import MooncakeUrl
from forebay.store.backends.open import url_for_ranks
from tests.store.mooncake_cluster import Cluster, mooncake_cluster
from tests.store.redis_server import free_port
from tests.store.store_cluster import wait_for

PAGE = 70_000
T = 10.0


def put(store: PageStore, key: bytes, value: bytes) -> Status:
    return store.put_from([PutItem(key, value)], T)[0]


def get(store: PageStore, key: bytes, length: int, timeout_s: float = T) -> bytes | Status:
    buffer = bytearray(length)
    status = store.get_into([GetItem(key, 0, length, buffer)], timeout_s)[0]
    return bytes(buffer) if status is Status.OK else status


@contextlib.contextmanager
def opened(cluster: Cluster) -> Iterator[MooncakeStore]:
    store = open_store(cluster.url)
    assert isinstance(store, MooncakeStore)
    try:
        yield store
    finally:
        store.close()


def test_a_url_names_the_master_and_what_this_server_gives() -> None:
    url = MooncakeUrl.parse(
        "mooncake://[::1]:50051?segment=4GiB&protocol=rdma&devices=mlx5_0,mlx5_1"
    )
    assert (str(url.master), url.segment_bytes, url.protocol) == ("[::1]:50051", 4 << 30, "rdma")
    assert url.devices == "mlx5_0,mlx5_1" and MooncakeUrl.parse("mooncake://h:1").segment_bytes == 0
    for bad in (
        "mooncake://",
        "mooncake://h:1?segment=much",
        "mooncake://h:1?protocol=ib",
        "mooncake://h:1?x=1",
    ):
        with pytest.raises(AddressError):
            MooncakeUrl.parse(bad)


def test_only_the_planner_gives_its_segment() -> None:
    assert url_for_ranks("mooncake://h:1?segment=1GiB&host=h") == "mooncake://h:1?host=h"
    assert url_for_ranks("mooncake://h:1?segment=1GiB") == "mooncake://h:1"
    assert url_for_ranks("redis://h:1/2?ttl=3") == "redis://h:1/2?ttl=3"


def test_no_master_is_one_line_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(StoreURLError) as refused:
        open_store(f"mooncake://127.0.0.1:{free_port()}")
    assert "\n" not in str(refused.value) and "refused" in str(refused.value)
    assert time.monotonic() - began < 5


def test_without_the_package_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['mooncake'] = None\n"
        "from forebay.store.backends import StoreURLError, open_store\n"
        "try: open_store('mooncake://127.0.0.1:1')\n"
        "except StoreURLError as error: print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "forebay[mooncake]" in said.stdout and said.stdout.count("\n") == 1, said


def test_a_full_cluster_refuses_puts_in_words_and_reads_go_on() -> None:
    with mooncake_cluster(segment_bytes=32 << 20) as cluster, opened(cluster) as store:
        statuses = [put(store, b"%d" % i, os.urandom(4 << 20)) for i in range(12)]
        assert statuses[0] is Status.OK and Status.NO_SPACE in statuses
        newest = max(i for i, status in enumerate(statuses) if status is Status.OK)
        assert isinstance(get(store, b"%d" % newest, 4 << 20), bytes)


def test_another_keys_value_or_a_changed_one_is_never_a_page() -> None:
    with mooncake_cluster() as cluster, opened(cluster) as store:
        assert put(store, b"a", b"a" * PAGE) is Status.OK
        client, scratch = store._client, bytearray(PAGE + 12)
        import numpy as np

        region = np.frombuffer(scratch, np.uint8)
        client.register(region)
        assert client.get(["forebay//" + b"a".hex()], [region]) == [len(region)]
        assert client.put(["forebay//" + b"b".hex()], [region]) == [0]
        assert get(store, b"b", PAGE) is Status.CHECKSUM, "the page of another key"
        region[100] ^= 1
        assert client.put(["forebay//" + b"c".hex()], [region]) == [0]
        assert get(store, b"c", PAGE) is Status.CHECKSUM
        assert get(store, b"a", PAGE) == b"a" * PAGE


def test_a_stopped_master_costs_the_time_out_and_touches_nothing_later() -> None:
    with mooncake_cluster() as cluster, opened(cluster) as store:
        assert put(store, b"k", b"x" * PAGE) is Status.OK
        assert cluster.master is not None
        cluster.master.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        buffer = bytearray(b"-" * PAGE)
        assert store.get_into([GetItem(b"k", 0, PAGE, buffer)], 0.5) == [Status.TIMEOUT]
        assert store.match_prefix([b"k"], [], hint=False, timeout_s=0.2) == 0
        assert put_within(store, b"new", 0.5) is Status.TIMEOUT
        assert not store.health().ok
        assert time.monotonic() - began < 5
        cluster.master.send_signal(signal.SIGCONT)
        wait_for(lambda: get(store, b"k", PAGE) == b"x" * PAGE, 60, "the master to answer again")
        assert buffer == b"-" * PAGE


def put_within(store: PageStore, key: bytes, timeout_s: float) -> Status:
    return store.put_from([PutItem(key, b"y" * PAGE)], timeout_s)[0]


def test_a_dead_segment_or_master_costs_pages_and_one_that_comes_back_is_used() -> None:
    with mooncake_cluster() as cluster, opened(cluster) as store:
        assert put(store, b"k", b"x" * PAGE) is Status.OK
        assert cluster.segment is not None
        cluster.segment.kill()
        # The master lists the value for a while yet; nobody has its bytes.
        assert get(store, b"k", PAGE) in (Status.UNAVAILABLE, Status.NOT_FOUND, Status.TIMEOUT)
        cluster.kill()
        assert get(store, b"k", PAGE) in (Status.UNAVAILABLE, Status.TIMEOUT)
        assert not store.health().ok
        cluster.start()

        def works() -> bool:
            return (
                put(store, b"k", b"x" * PAGE) in (Status.OK, Status.EXISTS)
                and get(store, b"k", PAGE) == b"x" * PAGE
            )

        wait_for(works, 60, "the new master to be used")
