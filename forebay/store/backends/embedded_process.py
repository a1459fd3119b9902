"""The child of `embedded`: one JSON line in on standard input, one out on standard output (where it listens, or ``error``), then a
store until the input closes."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from forebay import compiled
from forebay.observe.output import unhurried_output
from forebay.store.address import Address
from forebay.store.holder.log.files import Lock
from forebay.store.holder.node import HolderConfig, HolderError
from forebay.store.holder.segment import SegmentError
from forebay.store.master.records import MasterConfig
from forebay.store.up import Roles, Running, run
from forebay.store.wire import auth

MAX_SIBLINGS = 64


def _free_directory(directory: Path) -> Path:
    """``directory``, or the first of its sub-directories that no other server has. (A log file names itself, so they do not mix.)"""
    for candidate in [
        directory,
        *(directory / f"server-{index}" for index in range(2, MAX_SIBLINGS)),
    ]:
        try:
            Lock(candidate).release()
        except BlockingIOError:
            continue
        return candidate
    raise HolderError(
        f"{directory} and {MAX_SIBLINGS - 2} sub-directories of it are in use; give another directory"
    )


def _main() -> int:
    boot = json.loads(sys.stdin.buffer.readline())
    if not boot["compile"]:
        compiled.compile_nothing()
    secret = boot["secret"].encode()
    listen = Address.parse(boot["listen"])
    try:
        directory = _free_directory(Path(boot["directory"]))
        roles = Roles(
            listen=listen,
            master=MasterConfig(ssd_prefetch=True, settle_s=0.0),
            holders=[
                HolderConfig(listen, Address(listen.host, 0), boot["dram"], directory, boot["ssd"])
            ],
            secrets=auth.Secrets({auth.DEFAULT_TENANT: secret, auth.HOLDER_TENANT: secret}),
        )

        def started(running: Running) -> None:
            assert running.master is not None
            _say({"url": f"forebay://{running.master.address}", "directory": str(directory)})
            _end_with_stdin()

        with unhurried_output():
            run(roles, started)
    except (OSError, HolderError, SegmentError) as error:
        _say({"error": str(error)})
        return 1
    return 0


def _say(document: dict[str, str]) -> None:
    os.write(1, json.dumps(document).encode() + b"\n")


def _end_with_stdin() -> None:
    """Our parent closes our input when it ends, however it ends."""
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(0, readable)


if __name__ == "__main__":
    sys.exit(_main())
