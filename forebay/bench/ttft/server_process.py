"""A server for the bench: `forebay serve` without its command line, which ends with the bench however that ends."""

import os
import sys

import msgspec

from forebay.frontend.server import serve
from forebay.models.errors import ModelError
from forebay.runtime.boot import die_with_parent, read_boot
from forebay.runtime.start_error import StartError
from forebay.settings import Settings


class ServerBoot(msgspec.Struct, frozen=True):
    """What the process is told over its standard input."""

    model: str
    settings: Settings
    parent_pid: int


def main() -> int:
    boot = read_boot(ServerBoot)
    die_with_parent(boot.parent_pid)
    try:
        return serve(boot.model, boot.settings)
    except (ModelError, StartError) as error:
        print(f"forebay: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
