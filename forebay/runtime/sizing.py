"""How much memory and how many threads a server takes of what its machine or container lets it have.

    limit - what others use = weights + processes + store + [ device pages | host pages, twice as many ] + rest

Sizes that nobody gave are shares of it. Pages are committed as they are used, so what does not fit
would only show under load, and then as a killed process: it is refused at the start.
"""

import sys
from dataclasses import dataclass

from forebay import machine
from forebay.models.config import ModelConfig
from forebay.models.shard import shard_parameters, shards
from forebay.runtime.start_error import StartError
from forebay.settings import Device, Settings, format_size
from forebay.store.backends.embedded import DRAM_PART, private_dram

# Of the memory that is free at the start, for the device pages of all ranks when the device is the
# CPU. Host pages take twice as much; weights and everything else share the rest.
KV_SHARE = 0.15
HOST_FACTOR = 2
# Of what weights and processes leave, where that is less than the shares above: the rest is for
# activations, and for the file pages of libraries.
KV_SHARE_OF_REST = 0.8
# Private memory of processes with a tiny model, measured, and some more.
RANK_BYTES = 200 << 20
SERVER_BYTES = 100 << 20  # the planner, and what the frontend, which measures, will grow by
STORE_BYTES = 40 << 20
NCCL_BYTES = 64 << 20  # of /dev/shm for each rank, some more than its buffers for one peer
# A server whose pages hold fewer tokens than this (or than the model's longest) is of no use.
LEAST_TOKENS = 2048
_NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1}


@dataclass(frozen=True)
class Sizes:
    """Bytes of each rank; ``device_memory`` 0: what the device has left."""

    device_memory: int
    host_memory: int


@dataclass(frozen=True)
class Needs:
    """Bytes that a server takes whatever is cached, and the pages that it needs at least.
    ``has_private_store``: its memory is a share of what is free (`default_dram`)."""

    weights: int
    processes: int
    least_pages: int
    has_private_store: bool = False

    @property
    def fixed(self) -> int:
        return self.weights + self.processes

    def store_bytes(self, available: int) -> int:
        return private_dram(available) if self.has_private_store else 0

    @property
    def least(self) -> int:
        """What must be free for all of it, and for the store's share of that."""
        own = self.fixed + int(self.least_pages / KV_SHARE_OF_REST)
        return own + self.store_bytes(own * DRAM_PART // (DRAM_PART - 1))


def needs_of(config: ModelConfig, settings: Settings, dtype: str, kv_dtype: str) -> Needs:
    """About what this model needs here in the format asked for."""
    ranks = settings.pp * settings.tp
    on_cpu = settings.device is Device.CPU
    parameters = sum(
        shard_parameters(config, shard)
        for stage in shards(config, settings.pp, settings.tp)
        for shard in stage
    )
    processes = SERVER_BYTES + ranks * RANK_BYTES
    has_private_store = settings.store.partition("?")[0].partition(":")[0] == "embedded"
    if has_private_store:
        processes += STORE_BYTES
    tokens = min(config.max_context, settings.max_context or config.max_context, LEAST_TOKENS)
    numbers = 2 * config.layers * config.kv_heads * config.head_dim * tokens
    return Needs(
        parameters * _NUMBER_BYTES[dtype] if on_cpu else 0,
        processes,
        numbers * _NUMBER_BYTES[kv_dtype] * (1 + HOST_FACTOR if on_cpu else HOST_FACTOR),
        has_private_store,
    )


def choose_sizes(settings: Settings, needs: Needs, memory: machine.Memory) -> Sizes:
    """As asked, or shares of what is free, said in one line each. Raises ``StartError`` if that
    cannot be had: what was asked for, or a model that this memory does not hold."""
    ranks = settings.pp * settings.tp
    if settings.device_memory is None or settings.host_memory is None:
        _check_model(needs, memory)
    rest = memory.available - needs.fixed - needs.store_bytes(memory.available)
    free = min(KV_SHARE * memory.available, KV_SHARE_OF_REST * rest / (1 + HOST_FACTOR))
    share = max(int(free), 1) // ranks
    device = settings.device_memory
    if device is None:
        device = share if settings.device is Device.CPU else 0
        if device:
            _say("--device-memory", device, ranks)
    host = settings.host_memory
    if host is None:
        host = HOST_FACTOR * (device or share)
        _say("--host-memory", host, ranks)
    pages = ranks * (host + (device if settings.device is Device.CPU else 0))
    _check_pages(pages, ranks, needs, memory)
    return Sizes(device, host)


def threads_per_rank(settings: Settings) -> int:
    """Compute threads of each rank: as asked, else the cores that may be used, shared out."""
    if settings.threads_per_rank is not None:
        return settings.threads_per_rank
    cores = machine.cores()
    ranks = settings.pp * settings.tp
    threads = max(cores.usable // ranks, 1)
    if cores.usable < cores.present:
        print(
            f"forebay: the CPU quota is {cores.usable} of {cores.present} cores; "
            f"{threads} thread(s) for each rank ({ranks})",
            file=sys.stderr,
        )
    return threads


def warn_of_shared_memory(settings: Settings) -> None:
    """NCCL alone has names in /dev/shm, for GPUs that cannot reach each other's memory; everything of
    Forebay's is anonymous. What it lacks there it says less plainly."""
    ranks = settings.pp * settings.tp
    needed, there = ranks * NCCL_BYTES, machine.shared_memory()
    if settings.device is Device.CUDA and ranks > 1 and there < needed:
        print(
            f"forebay: NCCL may need {format_size(needed)} of /dev/shm for {ranks} ranks, and "
            f"{format_size(there)} is free; give the container more (--shm-size {format_size(needed)})",
            file=sys.stderr,
        )


def _check_model(needs: Needs, memory: machine.Memory) -> None:
    missing = needs.least - memory.available
    if missing > 0:
        raise StartError(
            f"the model needs about {format_size(needs.least)} "
            f"(weights {format_size(needs.weights)}, processes {format_size(needs.processes)}, "
            f"pages {format_size(needs.least_pages)}); {memory.where} is "
            f"{format_size(memory.limit)}, of which {format_size(memory.available)} is free; "
            f"give it {_enough(memory.limit + missing)}, or serve a smaller model"
        )


def _check_pages(pages: int, ranks: int, needs: Needs, memory: machine.Memory) -> None:
    wanted = pages + needs.fixed
    if wanted > memory.limit:
        raise StartError(
            f"--device-memory and --host-memory come to {format_size(pages)} over {ranks} rank(s), "
            f"weights and processes to about {format_size(needs.fixed)}; {memory.where} is "
            f"{format_size(memory.limit)}; give less, or {_enough(wanted)} of memory"
        )


def _enough(size: int) -> str:
    """A little more: all of this is about, and the number must do once it is rounded."""
    return format_size(int(1.02 * size))


def _say(flag: str, size: int, ranks: int) -> None:
    print(
        f"forebay: {flag} is not given; {format_size(size)} for each rank ({ranks})",
        file=sys.stderr,
    )
