"""Starts one rank's process. Its world travels over its standard input (`runtime.boot`), never over the command line."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from forebay.runtime.boot import WorkerBoot, frame_boot

# Thread pools read these when their libraries load, so they must stand before the child's first import. Ranks of one replica
# are on one machine, hence the loopback interface: gloo would otherwise bind to whatever the host name resolves to.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# oneDNN makes code for every number of rows that a linear layer meets, 0.5 MB each and about 2 ms, and PyTorch keeps buffers beside
# it; by default 1,024 of each, which is all of a rank's memory and more. 256 hold the decodes of 32 sequences (seven kinds of layers).
_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "8"}


def worker_environment(threads: int) -> dict[str, str]:
    """What a rank's libraries read when they load. Where the user has said something, that counts, except for threads."""
    environment = {**_CACHES, **{name: "lo" for name in _NETWORK_VARIABLES}, **os.environ}
    environment.update({name: str(threads) for name in _THREAD_VARIABLES})
    return environment


def spawn_worker(boot: WorkerBoot) -> subprocess.Popen[bytes]:
    """Start the rank that ``boot`` describes; its stdout and stderr are the caller's.

    Call it from the thread that lives as long as this process: the kernel ends the child with the *thread* that made it
    (``PR_SET_PDEATHSIG``, prctl(2)). The child's stdin stays open in the result. A child that died at once shows by its exit
    status, not by an exception here. Raises ``OSError`` if no process can be made.
    """
    environment = worker_environment(boot.threads)
    # -P: a file called torch.py in the user's directory must not become the worker's torch.
    command = [sys.executable, "-P", "-m", "forebay.runtime.worker"]
    # A group of its own: signals that a terminal or a shell sends to the server's group are for the server, which ends us in order.
    keep = () if boot.ring_fd < 0 else (boot.ring_fd,)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, process_group=0, pass_fds=keep
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(frame_boot(boot))
        process.stdin.flush()
    return process


def is_stopped(pid: int) -> bool:
    """Whether the kernel has stopped the process (SIGSTOP, a debugger): it cannot even read a signal that asks it to end."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in (
        "T",
        "t",
    )  # proc(5); the name before it may hold anything
