"""Running the store's roles in this process until it is told to end: what `forebay store up|master|holder` and `embedded` do."""

import asyncio
import contextlib
import gc
import signal
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace

import uvloop

from forebay.store.address import Address
from forebay.store.holder.node import Holder, HolderConfig, HolderError
from forebay.store.master.records import MasterConfig
from forebay.store.master.server import MasterServer
from forebay.store.wire import auth


@dataclass(frozen=True)
class Roles:
    """``master``/``listen``: run a master there, inside ``tls`` if that is given. ``holder``: run a holder; its ``master`` is ours if
    we run one."""

    listen: Address | None
    master: MasterConfig | None
    holder: HolderConfig | None
    secrets: auth.Secrets
    tls: ssl.SSLContext | None = None


@dataclass
class Running:
    master: MasterServer | None = None
    holder: Holder | None = None


async def serve(roles: Roles, started: Callable[[Running], None], ended: asyncio.Event) -> None:
    """Start the roles, say so, run until ``ended``, stop in good order. Raises what a start raises."""
    running = Running()
    try:
        if roles.master is not None and roles.listen is not None:
            running.master = MasterServer(roles.master, roles.listen, roles.secrets, roles.tls)
            await running.master.start()
        if roles.holder is not None:
            config = roles.holder
            if running.master is not None:
                config = replace(config, master=running.master.address)
            holder = Holder(config, roles.secrets)
            await holder.start()
            running.holder = holder
        started(running)
        await _first(ended, running.holder.failed if running.holder is not None else ended)
        if running.holder is not None and running.holder.failed.is_set():
            raise HolderError("the holder failed inside; its log above says how")
    finally:
        if running.holder is not None:
            await running.holder.stop()
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

    gc.set_threshold(100_000, 20, 50)  # the master's tables are large, live long, and are freed by counting
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main())
