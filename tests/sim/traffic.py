"""A small cluster and a small trace of conversations, for tests of the performance model."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from forebay.sim.cluster import Cluster, make_cluster
from forebay.sim.trace import BLOCK_TOKENS, TraceRequest

TABLE: dict[str, Any] = {
    "model": {"kv_bytes_per_token": 4096, "layers": 8, "activation_bytes_per_token": 1024},
    "engine": {
        "pp": 4, "tp": 2, "page_size": 64, "chunk_size": 512, "max_running": 16, "device_memory": "16MiB", "host_memory": "16MiB",
    },
    "forward": {"linear_s": 50e-6, "fixed_s": 4e-3, "decode_s": 1e-4, "decode_context_s": 1e-8, "jitter": 0.05},
    "network": {"jitter": 0.1, "control_jitter": 0.5},
    "store": {"holders": 2, "dram": "64MiB", "ssd": "256MiB"},
}  # fmt: skip


def small_cluster(turned: Mapping[str, str] | None = None) -> Cluster:
    return make_cluster(TABLE, turned or {}, "small")


def conversations(count: int, seed: int = 0, gap_s: float = 0.2) -> list[TraceRequest]:
    """``count`` requests, each a new turn of one of a few conversations, or a new one."""
    randomness = random.Random(seed)
    talks: list[list[int]] = []
    requests, fresh, at_s = [], 0, 0.0
    for _ in range(count):
        at_s += randomness.expovariate(1 / gap_s)
        if not talks or randomness.random() < 0.3:
            talks.append([])
        talk = talks[randomness.randrange(len(talks))]
        new = randomness.randint(1, 3)
        talk += range(fresh, fresh + new)
        fresh += new
        tokens = len(talk) * BLOCK_TOKENS - randomness.randrange(BLOCK_TOKENS)
        requests.append(TraceRequest(at_s, tokens, randomness.randint(1, 12), tuple(talk)))
    return requests


def write_trace(path: Path, requests: list[TraceRequest]) -> Path:
    lines = [
        msgspec.json.encode(
            {
                "timestamp": 1000 * one.at_s, "input_length": one.input_tokens, "output_length": one.output_tokens,
                "hash_ids": one.blocks,
            }
        )
        for one in requests
    ]  # fmt: skip
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path
