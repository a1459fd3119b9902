"""What clients do to a store while its parts are killed, stopped and damaged, and what must hold whatever happens."""

import itertools
import threading
from collections.abc import Callable

from forebay.store import Status, StoreClient
from tests.store.store_cluster import wait_for

SIZE = 200_000
RECOVERY_S = 5.0


def value(key: bytes) -> bytes:
    return (key * (SIZE // len(key) + 1))[:SIZE]


class Traffic:
    """Clients that put, get and remove for as long as the block lasts, and remember what they were promised."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stored: set[bytes] = set()
        self.removed: set[bytes] = set()
        self.wrong: list[object] = []
        self.done = 0
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(name, name % 2 == 0), name=f"traffic-{name}")
            for name in range(4)
        ]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        wait_for(lambda: self.done > 40, what="traffic flows")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self._threads)

    def progress(self, by: int = 40) -> Callable[[], bool]:
        """True once ``by`` more operations have succeeded."""
        goal = self.done + by
        return lambda: self.done >= goal

    def _work(self, name: int, local: bool) -> None:
        mine: list[bytes] = []
        with StoreClient.connect(self.url, timeout_s=2.0, allow_local=local) as client:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                key = b"%d-%d" % (name, number)
                if client.put(key, value(key)) is Status.OK:
                    self.stored.add(key)
                    mine.append(key)
                    self.done += 1
                for old in mine[-1:] + mine[: number % 3]:
                    self._read(client, old)
                if number % 7 == 6 and mine:
                    gone = mine.pop(0)
                    self.stored.discard(gone)  # from here on it may or may not be there
                    if client.remove([gone]) == [Status.OK]:
                        self.removed.add(gone)

    def _read(self, client: StoreClient, key: bytes) -> None:
        got = client.get(key)
        if got is not None:
            self.done += 1
            if got != value(key):
                self.wrong.append(key)


def durable(client: StoreClient, keys: set[bytes]) -> set[bytes]:
    """Those of ``keys`` that are in a log now."""
    named = sorted(keys)
    return {
        key
        for key, tiers in zip(named, client.tiers(named), strict=True)
        if any(tier == 1 for tier in tiers)
    }


def logged_everywhere(client: StoreClient, count: int) -> bool:
    """Every holder's log has ``count`` values of ours."""
    return all(holder.ssd_used >= count * (SIZE + 4096) for holder in client.holders().holders)


def all_usable(client: StoreClient, count: int) -> bool:
    return sum(holder.usable for holder in client.holders().holders) == count


def assert_whole(client: StoreClient, present: set[bytes], removed: set[bytes]) -> None:
    """Within the time allowed everything that must be there is, with its own bytes, and nothing that must not."""
    keys = sorted(present)
    wait_for(lambda: all(client.exists(keys)), RECOVERY_S, f"all {len(keys)} keys are there again")
    for key in keys:
        assert client.get(key) == value(key), key
    assert not any(client.exists(sorted(removed))), "a removed key returned"
