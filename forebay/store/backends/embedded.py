"""A private store: master and one holder in a child process, with an SSD directory that keeps pages over restarts.

The child is told everything over its standard input, says where it listens over its standard output, and ends in good order (what
memory has and the log has not is written, at most 10 s) when the input closes: also if this process is killed. A second server on
the same directory takes a sub-directory, for a log has one owner.
"""

import contextlib
import json
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from forebay import compiled, machine
from forebay.cache import cache_directory
from forebay.store.backend import Capabilities, GetItem, Health, PutItem, Status, StoreUse
from forebay.store.backends.forebay import ForebayStore
from forebay.store.client.prefetcher import PrefetchOptions
from forebay.store.client.store import StoreClient

DEFAULT_DRAM = 256 << 20
DRAM_PART = 16
DEFAULT_SSD = 8 << 30
START_S = 30.0
END_S = 12.0


class EmbeddedStore:
    """A `PageStore`. Raises ``OSError`` if the child cannot start; the text says why."""

    capabilities = Capabilities()

    def __init__(self, directory: Path, dram: int, ssd: int) -> None:
        self.secret = secrets.token_hex(32)
        self._boot = {
            "directory": str(directory),
            "dram": dram,
            "ssd": ssd,
            "secret": self.secret,
            "listen": "127.0.0.1:0",
            "compile": compiled.may_compile(),
        }
        self._child = _spawn()
        try:
            self.url, self.directory = self._start()
            client = StoreClient.connect(
                self.url, secret=self.secret, prefetch=PrefetchOptions(enabled=True)
            )
        except BaseException:
            self._end()
            raise
        self._store = ForebayStore(client)
        self.client = client
        self._wait_until_served()

    @property
    def pid(self) -> int:
        return self._child.pid

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes],
        *,
        hint: bool,
        timeout_s: float,
        group: bytes = b"",
    ) -> int:
        return self._store.match_prefix(keys, parts, hint=hint, timeout_s=timeout_s, group=group)

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]:
        return self._store.get_into(items, timeout_s)

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        return self._store.put_from(items, timeout_s)

    def health(self) -> Health:
        if self._child.poll() is not None:
            return Health(
                False, f"the embedded store's process ended with status {self._child.returncode}"
            )
        return self._store.health()

    def use(self) -> StoreUse:
        return self._store.use()

    def clear(self, parts: Sequence[bytes], timeout_s: float) -> int:
        return self._store.clear(parts, timeout_s)

    def close(self) -> None:
        self._store.close()
        self._end()

    def start_again_if_dead(self) -> None:
        """A child that has ended is started again on its address, so that clients find it. Raises ``OSError``."""
        if self._child.poll() is not None:
            self._end()
            self._boot |= {
                "directory": str(self.directory),
                "listen": self.url.removeprefix("forebay://"),
            }
            self._child = _spawn()
            self.url, self.directory = self._start()
            self._wait_until_served()

    def _start(self) -> tuple[str, Path]:
        """Tell the child what to be; its URL and directory."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(self._boot).encode() + b"\n")
        self._child.stdin.flush()
        ready, _, _ = select.select([self._child.stdout], [], [], START_S)
        line = self._child.stdout.readline() if ready else b""
        if not line:
            self._child.kill()
            raise OSError("the embedded store did not start")
        said = json.loads(line)
        if "error" in said:
            raise OSError(said["error"])
        return said["url"], Path(said["directory"])

    def _wait_until_served(self) -> None:
        """The holder registers within moments; its inventory takes as long as it takes."""
        deadline = time.monotonic() + START_S
        while (
            not self._store.health().ok
            and self._child.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)

    def _end(self) -> None:
        child = self._child
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()


def default_dram() -> int:
    """Where nobody gave a size."""
    return private_dram(machine.memory().available)


def private_dram(available: int) -> int:
    """Of ``available`` bytes: less where little memory is free."""
    return min(DEFAULT_DRAM, available // DRAM_PART)


def default_directory() -> Path:
    """Beside converted models. Raises `forebay.cache.NoCache`, an ``OSError``."""
    return cache_directory() / "store"


def _spawn() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "forebay.store.backends.embedded_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C is for us; we end the child in good order
    )
