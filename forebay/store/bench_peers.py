"""Other stores beside ours in the same run: `forebay bench store --peer redis --peer mooncake`.

    redis      a `redis-server` of its own over loopback, nothing kept on disk; redis-py with hiredis; reads by its best call
    mooncake   its master, and a segment in another process over TCP (``tcp``) or in this one (``local``)

Beside each is ``redis_backend`` or ``mooncake_backend``: the same server through our `PageStore`, as an engine uses it.

To be fair: Mooncake is built for RDMA, and TCP is its weak side; Redis copies into Python objects, which its users get as they are.
Nothing of either is needed but for this: each is imported and started only when asked for.
"""

import contextlib
import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from forebay.store.backend import GetItem, PutItem, Status
from forebay.store.backends import open_store

Bytes = npt.NDArray[np.uint8]
START_S = 20.0
CALL_S = 30.0
MOONCAKE_BUFFER_BYTES = 64 << 20
NAMES = ("redis", "mooncake")


class PeerError(Exception):
    """The peer cannot be measured here; one line that says why and what to do."""


class Peer(Protocol):
    """One other store, holding values of equal length."""

    def put(self, keys: Sequence[bytes], source: Bytes) -> None:
        """``source`` under each key."""
        ...

    def use(self, buffers: Sequence[Bytes]) -> None:
        """These will be read into."""
        ...

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None: ...
    def exists(self, keys: Sequence[bytes]) -> bool: ...
    def clear(self) -> None: ...


def missing(name: str) -> str:
    """What is not installed for this peer, and how it is; "" if all is."""
    if name not in NAMES:
        return f"--peer {name} is not known; allowed: {', '.join(NAMES)}"
    modules = ("redis", "hiredis") if name == "redis" else ("mooncake.store",)
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"--peer {name}: {error}; pip install 'forebay[peers]' (and Debian's libibverbs1 for mooncake), or leave it out"
    if name == "redis" and shutil.which("redis-server") is None:
        return "--peer redis: there is no redis-server on PATH; install one (Debian: redis-server), or leave it out"
    return ""


@contextlib.contextmanager
def opened(names: Sequence[str], footprint: int) -> Iterator[dict[tuple[str, str], Peer]]:
    """(where, name) -> peer, each with room for ``footprint`` bytes. Raises ``PeerError``."""
    for name in names:
        if why := missing(name):
            raise PeerError(why)
    with contextlib.ExitStack() as stack:
        peers: dict[tuple[str, str], Peer] = {}
        if "redis" in names:
            peers["tcp", "redis"], peers["tcp", "redis_backend"] = stack.enter_context(_redis())
        if "mooncake" in names:
            for where in ("local", "tcp"):
                peers[where, "mooncake"], peers[where, "mooncake_backend"] = stack.enter_context(
                    _mooncake(2 * footprint + (256 << 20), in_process=where == "local")
                )
        yield peers


class BackendPeer:
    """The peer's server through our `PageStore`, which it closes."""

    def __init__(self, url: str) -> None:
        store = open_store(url)
        assert store is not None
        self._store = store

    def put(self, keys: Sequence[bytes], source: Bytes) -> None:
        statuses = self._store.put_from([PutItem(key, source.data) for key in keys], CALL_S)
        if set(statuses) - {Status.OK, Status.EXISTS}:
            raise PeerError(f"a put through the backend said {statuses}")

    def use(self, buffers: Sequence[Bytes]) -> None: ...

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        pairs = zip(keys, buffers, strict=True)
        items = [GetItem(key, 0, buffer.nbytes, buffer.data) for key, buffer in pairs]
        if any(self._store.get_into(items, CALL_S)):
            raise PeerError("a get through the backend failed")

    def exists(self, keys: Sequence[bytes]) -> bool:
        return self._store.match_prefix(keys, [], hint=False, timeout_s=CALL_S) == len(keys)

    def clear(self) -> None:
        self._store.clear([b""], CALL_S)

    def close(self) -> None:
        self._store.close()


# ------------------------------------------------------------------------------------------ Redis


class RedisPeer:
    """Over one connection."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, keys: Sequence[bytes], source: Bytes) -> None:
        pipe = self._client.pipeline(transaction=False)
        value = source.data
        for key in keys:
            pipe.set(key, value)
        pipe.execute()

    def use(self, buffers: Sequence[Bytes]) -> None: ...

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        """GET by GET in a pipeline, which is its best call for many large values (MGET: about half of it)."""
        if len(keys) == 1:
            values = [self._client.get(keys[0])]
        else:
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.get(key)
            values = pipe.execute()
        if any(
            len(value or b"") != len(buffer) for value, buffer in zip(values, buffers, strict=True)
        ):
            raise PeerError("redis lost a key; it has too little memory here")

    def exists(self, keys: Sequence[bytes]) -> bool:
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.exists(key)
        return all(pipe.execute())

    def clear(self) -> None:
        self._client.flushall()


@contextlib.contextmanager
def _redis() -> Iterator[tuple[RedisPeer, BackendPeer]]:
    redis = importlib.import_module("redis")
    port = _free_port()
    command = [
        "redis-server",
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
        "--loglevel",
        "warning",
    ]
    with tempfile.TemporaryDirectory() as directory, _running(command, Path(directory)) as alive:
        client = redis.Redis(port=port, protocol=2)
        _wait(
            "redis-server", alive, lambda: _answers(client.ping, redis.exceptions.ConnectionError)
        )
        backend = BackendPeer(f"redis://127.0.0.1:{port}")
        try:
            yield RedisPeer(client), backend
        finally:
            backend.close()
            client.close()


# ------------------------------------------------------------------------------------------ Mooncake


class MooncakePeer:
    def __init__(self, store: Any) -> None:
        self._store = store
        self._source: Bytes | None = None
        self._used: dict[int, Bytes] = {}

    def put(self, keys: Sequence[bytes], source: Bytes) -> None:
        if self._source is not source:
            self.use([source])
            self._source = source
        count = len(keys)
        codes = self._store.batch_put_from(
            _names(keys), [source.ctypes.data] * count, [source.nbytes] * count
        )
        if any(codes):
            raise PeerError(f"mooncake refused a put: {sorted(set(codes))}")

    def use(self, buffers: Sequence[Bytes]) -> None:
        for buffer in buffers:
            if buffer.ctypes.data not in self._used:
                self._store.register_buffer(buffer.ctypes.data, buffer.nbytes)
                self._used[buffer.ctypes.data] = (
                    buffer  # its memory must stay for as long as it is registered
                )

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        sizes = [buffer.nbytes for buffer in buffers]
        if (
            self._store.batch_get_into(
                _names(keys), [buffer.ctypes.data for buffer in buffers], sizes
            )
            != sizes
        ):
            raise PeerError("mooncake did not give a key that it took")

    def exists(self, keys: Sequence[bytes]) -> bool:
        return all(code == 1 for code in self._store.batch_is_exist(_names(keys)))

    def clear(self) -> None:
        self._store.remove_all(True)


_SEGMENT = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", "127.0.0.1:" + sys.argv[1])
print("up", code, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _mooncake(size: int, *, in_process: bool) -> Iterator[tuple[MooncakePeer, BackendPeer]]:
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it talks a lot
    module: Any = importlib.import_module("mooncake.store")
    program = shutil.which("mooncake_master") or str(
        Path(sys.executable).with_name("mooncake_master")
    )
    program = (
        program
        if Path(program).exists()
        else str(Path(module.__file__).parents[4] / "bin" / "mooncake_master")
    )
    port, metrics = _free_port(), _free_port()
    command = [
        program,
        f"--rpc_port={port}",
        "--rpc_address=127.0.0.1",
        f"--metrics_port={metrics}",
    ]
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        alive = stack.enter_context(_running(command, directory))
        _wait("mooncake_master", alive, lambda: _listens(port))
        if not in_process:
            segment = [sys.executable, "-c", _SEGMENT, str(port), str(size)]
            alive = stack.enter_context(_running(segment, directory))
            said = directory / "said"
            _wait("mooncake's segment", alive, lambda: "up 0" in said.read_text(errors="replace"))
        store = module.MooncakeDistributedStore()
        own = size if in_process else 0
        if store.setup(
            "127.0.0.1", "P2PHANDSHAKE", own, MOONCAKE_BUFFER_BYTES, "tcp", "", f"127.0.0.1:{port}"
        ):
            raise PeerError("mooncake's client cannot be set up here; leave --peer mooncake out")
        backend = BackendPeer(f"mooncake://127.0.0.1:{port}")
        try:
            yield MooncakePeer(store), backend
        finally:
            backend.close()
            store.close()


def _names(keys: Sequence[bytes]) -> list[str]:
    return [key.decode() for key in keys]


# ------------------------------------------------------------------------------------------ processes


@contextlib.contextmanager
def _running(command: list[str], directory: Path) -> Iterator[Callable[[], bool]]:
    """A process that is ended afterwards, and whether it lives; what it says goes to ``directory``."""
    with (directory / "said").open("wb") as said:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=said, stderr=said, cwd=directory
        )
    try:
        yield lambda: child.poll() is None
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdin is not None:
            child.stdin.close()


def _wait(what: str, alive: Callable[[], bool], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not ready():
        if not alive() or time.monotonic() > deadline:
            raise PeerError(f"{what} did not start within {START_S:.0f} s; leave this --peer out")
        time.sleep(0.05)


def _answers(ask: Callable[[], object], failure: type[Exception]) -> bool:
    try:
        return bool(ask())
    except failure:
        return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
