"""A whole store inside the test's process: a real master and real holders on their own event loop thread, over real sockets."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import uvloop

from forebay.store import StoreClient
from forebay.store.address import Address
from forebay.store.holder.log.files import Files
from forebay.store.holder.node import Holder, HolderConfig
from forebay.store.holder.writer import Fsync
from forebay.store.master.records import MasterConfig
from forebay.store.master.server import MasterServer
from forebay.store.wire import auth
from forebay.store.wire.tls import client_context, server_context
from tests.pace import paced

T = TypeVar("T")
LOCALHOST = Address("127.0.0.1", 0)
CERTIFICATE, KEY = (
    Path(__file__).parent / "tls" / "localhost.pem",
    Path(__file__).parent / "tls" / "localhost.key",
)


def wait_for(condition: Callable[[], T], timeout_s: float = 15.0, what: str = "") -> T:
    """The first true value of ``condition``; fails at the deadline, which is `paced`."""
    timeout_s = paced(timeout_s)
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.01)


class Cluster:
    """``master`` and ``holders`` may be stopped and started again one by one. ``beside``: holders know that the master is in their
    process, as those of `store.up` do; the first master, that is."""

    def __init__(
        self,
        config: MasterConfig | None = None,
        secrets: auth.Secrets | None = None,
        *,
        tls: bool = False,
        beside: bool = True,
    ) -> None:
        self.beside = beside
        self.config = config or MasterConfig(settle_s=0.0)
        self.secrets = secrets or auth.Secrets()
        self.tls = server_context(CERTIFICATE, KEY) if tls else None
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        self._thread.start()
        self.address = LOCALHOST
        self.holders: list[Holder] = []
        self.clients: list[StoreClient] = []
        self.master: MasterServer | None = None
        self.start_master()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def do(self, work: Awaitable[T]) -> T:
        """Run in the cluster's loop."""

        async def wrapped() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop).result(30)

    @property
    def url(self) -> str:
        return (
            f"forebay+tls://{self.address}?ca={CERTIFICATE}"
            if self.tls
            else f"forebay://{self.address}"
        )

    def start_master(self) -> MasterServer:
        self.master = MasterServer(self.config, self.address, self.secrets, self.tls)
        self.do(self.master.start())
        self.address = self.master.address
        return self.master

    def stop_master(self) -> None:
        assert self.master is not None
        self.do(self.master.stop())
        self.master = None

    def holder(
        self,
        dram: int = 8 << 20,
        ssd: Path | None = None,
        ssd_bytes: int = 1 << 30,
        fsync: Fsync = Fsync.NEVER,
        files: Files | None = None,
    ) -> Holder:
        master_tls = client_context(CERTIFICATE) if self.tls else None
        config = HolderConfig(
            self.address, LOCALHOST, dram, ssd, ssd_bytes if ssd else 0, fsync, self.tls, master_tls
        )
        holder = Holder(config, self.secrets, files, beside=self.master if self.beside else None)
        self.do(holder.start())
        self.holders.append(holder)
        wait_for(lambda: holder.serving, what="holder serves")
        return holder

    def stop_holder(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self.do(holder.stop())

    def client(
        self, tenant: str = "default", secret: str | None = None, **options: object
    ) -> StoreClient:
        client = StoreClient.connect(self.url, tenant, secret, **options)  # type: ignore[arg-type]
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for holder in list(self.holders):
            self.stop_holder(holder)
        if self.master is not None:
            self.stop_master()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextlib.contextmanager
def cluster(
    config: MasterConfig | None = None,
    secrets: auth.Secrets | None = None,
    *,
    tls: bool = False,
    beside: bool = True,
) -> Iterator[Cluster]:
    made = Cluster(config, secrets, tls=tls, beside=beside)
    try:
        yield made
    finally:
        made.close()
