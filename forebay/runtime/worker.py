"""One rank's process: `python -m forebay.runtime.worker`, its boot document on standard input.

Its life is tied to its parent's (the planner) before `runtime.worker_loop` is imported: with torch that takes seconds.
"""

import os

from forebay import compiled
from forebay.runtime.boot import WorkerBoot, die_with_parent, read_boot
from forebay.settings import Kernels


def main() -> None:
    """Entry point of the process. Exit status 0 after Stop, 1 after a Fault."""
    boot = read_boot(WorkerBoot)
    die_with_parent(boot.parent_pid)
    if boot.kernels == Kernels.TORCH:
        compiled.compile_nothing()
    from forebay.runtime.worker_loop import serve

    status = serve(boot)
    # Not through interpreter shutdown: after a Fault, groups whose other ranks are gone would be waited for there.
    os._exit(status)


if __name__ == "__main__":
    main()
