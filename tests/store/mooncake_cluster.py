"""A real Mooncake master, and a segment in a process of its own, for a test."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.store.redis_server import free_port

START_S = 30.0
_SEGMENT = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
at = "127.0.0.1:" + sys.argv[1]
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", at), flush=True)
sys.stdin.read()
"""


@dataclass
class Cluster:
    segment_bytes: int
    port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    master: subprocess.Popen[bytes] | None = None
    segment: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}?metrics={self.metrics_port}"

    def start(self) -> None:
        program = Path(sys.executable).with_name("mooncake_master")
        ports = (f"--rpc_port={self.port}", f"--metrics_port={self.metrics_port}")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [str(program), *ports, "--rpc_address=127.0.0.1", "--default_kv_lease_ttl=1s"]
        self.master = subprocess.Popen(command, **quiet)
        self._wait_listening(self.master)
        env = os.environ | {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "GLOG_minloglevel": "3"}
        self.segment = subprocess.Popen(
            [sys.executable, "-c", _SEGMENT, str(self.port), str(self.segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
        )
        assert self.segment.stdout is not None
        assert self.segment.stdout.readline() == b"0\n", "the segment was not set up"

    def kill(self) -> None:
        for child in (self.segment, self.master):
            if child is not None:
                child.send_signal(signal.SIGCONT)
                child.kill()
                child.wait()
                for stream in (child.stdin, child.stdout):
                    if stream is not None:
                        stream.close()
        self.segment = self.master = None

    def _wait_listening(self, child: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert child.poll() is None, "mooncake_master ended"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < deadline, "mooncake_master does not listen"
            time.sleep(0.02)


@contextlib.contextmanager
def mooncake_cluster(segment_bytes: int = 64 << 20) -> Iterator[Cluster]:
    """Skips the test where the package is not installed; CI installs it and counts skips."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("mooncake-transfer-engine is not installed")
    cluster = Cluster(segment_bytes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()
