"""What a child process is told when it starts, over its standard input, and how its life is tied to its parent's.

The parent writes one msgpack document and keeps the pipe open. Nothing secret is on a command line or in the environment.

Channels are zmq ROUTER (planner, binds) and DEALER (everyone else, connects). A DEALER's routing id is a random token that only
the planner told it, so the id is the credential: frames from ids that the planner did not hand out are dropped. Endpoints are
Linux abstract Unix sockets: they live in no directory, so kill -9 leaves nothing behind.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import sys
from typing import TypeVar

import msgspec

from forebay.models.content_hash import FileMark
from forebay.settings import Settings

T = TypeVar("T")
IDENTITY_BYTES = 16
_PR_SET_PDEATHSIG = 1


class PlannerBoot(msgspec.Struct, frozen=True):
    """What was resolved before the start: ``fingerprint`` of the model, ``dtype``, ``kv_dtype`` (never
    ``auto``), ``max_context`` in tokens, ``threads``, ``device_memory`` and ``host_memory`` of each rank
    (bytes; 0 device memory = what the device has left). ``flight_dir``: where flight records go, empty
    if nowhere; ``ring_fds``: the span rings of all processes, in the order of `ring_names`.
    ``without``: what is done without as far as is known already, a line each.
    """

    model_path: str
    marks: tuple[FileMark, ...]
    dtype: str
    kv_dtype: str
    max_context: int
    threads: int
    device_memory: int
    host_memory: int
    settings: Settings
    frontend_endpoint: str
    frontend_identity: bytes
    parent_pid: int
    flight_dir: str
    ring_fds: tuple[int, ...] = ()
    without: tuple[str, ...] = ()


class WorkerBoot(msgspec.Struct, frozen=True):
    """One rank's world. ``rank`` = stage * tp + tp_rank.

    ``device_memory``: bytes for this rank's KV pages (0: what the device has left once the weights are loaded); ``host_memory``
    likewise for its host pages; ``kv_dtype``: a name of `models.kv_format`, or ``auto``; ``kernels``: of `models.llama.Kernels`.
    ``store_url`` and ``store_secret``: the store below them, if any; ``staged``: its pages come by
    the staged route. ``marks``: of the files that it must load; empty: whatever is there.
    ``max_plan_tokens``: no plan has more tokens. Plans come and acks go over ``plan_endpoint`` with
    ``plan_identity``; heartbeats, tickets and their acks go over ``io_endpoint`` with
    ``io_identity``, on a thread of its own. ``ring_fd``: the memory of its span ring; -1: it keeps
    a private one.
    """

    epoch: int
    rank: int
    pp: int
    tp: int
    model_path: str
    dtype: str
    device: str
    threads: int
    page_size: int
    device_memory: int
    max_plan_tokens: int
    max_running: int
    max_context: int
    plan_endpoint: str
    plan_identity: bytes
    io_endpoint: str
    io_identity: bytes
    parent_pid: int
    host_memory: int = 0
    kv_dtype: str = "auto"
    kernels: str = "auto"
    store_url: str | None = None
    store_secret: str | None = None
    staged: bool = False
    marks: tuple[FileMark, ...] = ()
    ring_fd: int = -1


def ring_names(ranks: int) -> list[str]:
    """The processes of one server that keep spans."""
    return ["frontend", "planner", *(f"rank {rank}" for rank in range(ranks))]


def new_endpoint(purpose: str) -> str:
    """A fresh local endpoint that nobody can guess."""
    return f"ipc://@forebay-{purpose}-{secrets.token_hex(16)}"


def new_identity() -> bytes:
    # A routing id may not begin with a zero byte: zmq keeps those for itself.
    return b"f" + secrets.token_bytes(IDENTITY_BYTES)


def read_boot(kind: type[T]) -> T:
    """The document on standard input: 4 bytes of length, then msgpack. Raises ``EOFError`` if the parent died first."""
    stream = sys.stdin.buffer
    header = stream.read(4)
    body = stream.read(int.from_bytes(header, "little"))
    if len(header) < 4 or len(body) < int.from_bytes(header, "little"):
        raise EOFError("the parent process ended before it said what to do")
    return msgspec.msgpack.decode(body, type=kind, dec_hook=_decode_path)


def frame_boot(document: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(document, enc_hook=str)
    return len(body).to_bytes(4, "little") + body


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens (Linux ``PR_SET_PDEATHSIG``, prctl(2)).

    Ctrl-C reaches a terminal's whole process group; children ignore it, since their parent ends them in order.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_death_signal()
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def set_death_signal() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _decode_path(kind: type, value: object) -> object:
    return kind(value)
