"""Running the store's roles in this process until it is told to end: what `forebay store up|master|holder` and `embedded` do."""

import asyncio
import contextlib
import gc
import resource
import signal
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import uvloop

from forebay.store.address import Address
from forebay.store.holder.node import Holder, HolderConfig, HolderError
from forebay.store.master.records import MasterConfig
from forebay.store.master.server import MasterServer
from forebay.store.metrics import Endpoint
from forebay.store.wire import auth


@dataclass(frozen=True)
class Roles:
    """``master``/``listen``: run a master there, inside ``tls`` if that is given. ``holders``: run these, one
    for each master that there is (rule ST5); of ours if we run one.
    ``metrics``: where to tell them over HTTP."""

    listen: Address | None
    master: MasterConfig | None
    holders: Sequence[HolderConfig]
    secrets: auth.Secrets
    tls: ssl.SSLContext | None = None
    metrics: Address | None = None


@dataclass
class Running:
    master: MasterServer | None = None
    holders: list[Holder] = field(default_factory=list)
    metrics: Endpoint | None = None


async def serve(roles: Roles, started: Callable[[Running], None], ended: asyncio.Event) -> None:
    """Start the roles, say so, run until ``ended``, stop in good order. Raises what a start raises."""
    running = Running()
    try:
        if roles.master is not None and roles.listen is not None:
            running.master = MasterServer(roles.master, roles.listen, roles.secrets, roles.tls)
            await running.master.start()
        for config in roles.holders:
            ours = (
                replace(config, master=running.master.address)
                if running.master is not None
                else config
            )
            holder = Holder(ours, roles.secrets, beside=running.master)
            await holder.start()
            running.holders.append(holder)
        if roles.metrics is not None:
            running.metrics = Endpoint(roles.metrics, running.master, running.holders)
        started(running)
        await _first(ended, *(holder.failed for holder in running.holders))
        if any(holder.failed.is_set() for holder in running.holders):
            raise HolderError("the holder failed inside; its log above says how")
    finally:
        if running.metrics is not None:
            await asyncio.get_running_loop().run_in_executor(None, running.metrics.close)
        await asyncio.gather(*(holder.stop() for holder in running.holders))
        if running.master is not None:
            await running.master.stop()


async def _first(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def run(roles: Roles, started: Callable[[Running], None]) -> None:
    """``serve`` under uvloop until SIGTERM or SIGINT."""

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        await serve(roles, started, ended)

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the default soft limit is often 1,024
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.set_threshold(
        100_000, 20, 50
    )  # the master's tables are large, live long, and are freed by counting
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main())
