"""One rank made ready in two steps: its weights, then, once the planner knows what all ranks can afford, pool and groups.

load --> LoadedRank -- allocate(pages, rendezvous) --> ReadyRank -- executor.run(plan), ...
"""

import errno
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from forebay.core.messages import Allocate
from forebay.models.config import ModelConfig, load_config
from forebay.models.errors import ModelError
from forebay.models.fingerprint import check_marks
from forebay.models.grammar import load_compiler
from forebay.models.kv import KVPool, page_block
from forebay.models.kv_format import KvFormat, kv_format
from forebay.models.llama import Kernels, Stage, load_stage
from forebay.models.shard import Shard, shard_parameters, shards
from forebay.observe.events import SpanRing
from forebay.observe.figures import Meter
from forebay.pages.block import Block
from forebay.runtime.boot import WorkerBoot
from forebay.runtime.copy_engine import CopyEngine
from forebay.runtime.execute import AroundForward, Executor
from forebay.runtime.grammars import Compiled, SlotGrammars
from forebay.runtime.grid import Grid, Place, Rendezvous, device_of, join
from forebay.runtime.host_pool import HostPool
from forebay.runtime.mirror import Limits
from forebay.runtime.sampler import Sampler
from forebay.runtime.warmup import warm_up

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MIB = 1 << 20
_KV_SHARE = 0.85


class MemoryShortage(Exception):
    """The rank's memory does not hold what was asked for. One line."""


@dataclass(frozen=True, slots=True)
class ReadyRank:
    """``s_per_token``: measured cost of this rank's layers in prefill.

    ``executor``: makes what runs the plans, once it is known what goes around a forward pass.
    """

    copier: CopyEngine
    host: HostPool
    grid: Grid
    s_per_token: float
    executor: Callable[[SpanRing, AroundForward], Executor]


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """Weights are in memory. ``rendezvous`` is rank 0's, and None on the others and in a grid of one."""

    boot: WorkerBoot
    config: ModelConfig
    shard: Shard
    place: Place
    device: torch.device
    stage: Stage
    rendezvous: Rendezvous | None

    @property
    def kv_format(self) -> KvFormat:
        return kv_format(self.boot.kv_dtype, self.stage.dtype)

    @property
    def block(self) -> Block:
        """How a page of this rank lies in host memory and in the store."""
        return page_block(self.config, self.shard, self.boot.page_size, self.kv_format)

    @property
    def page_bytes(self) -> int:
        return self.block.size

    @property
    def weight_bytes(self) -> int:
        return shard_parameters(self.config, self.shard) * self.stage.dtype.itemsize

    def affordable_pages(self) -> int:
        """Pages that this rank's memory holds. Raises ``MemoryShortage`` if that is none."""
        memory = self.boot.device_memory or self._memory_left()
        pages = memory // self.page_bytes
        if not pages:
            raise MemoryShortage(
                f"device memory of {memory} bytes holds no page of {self.page_bytes} bytes "
                f"({self.boot.page_size} tokens on rank {self.place.rank}); "
                "give more with --device-memory or less with --page-size"
            )
        return pages

    def _memory_left(self) -> int:
        """Bytes of the GPU that weights left free, but for a share for activations, among the ranks that use this GPU."""
        if self.device.type != "cuda":
            return 0
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free * _KV_SHARE) // -(-self.place.world // torch.cuda.device_count())

    def host_pages(self) -> int:
        """Pages of host memory, maybe none."""
        return self.boot.host_memory // self.page_bytes

    def allocate(
        self, order: Allocate, ring: SpanRing, meter: Meter, saved: Callable[[int, int], None]
    ) -> ReadyRank:
        """Make the pools, meet the other ranks, and run a few passes that leave no trace.

        ``saved``: called with (transfer, pages) when a backup is done, on the thread that did it. All ranks must call this: it waits
        for them. Raises ``MemoryShortage``, or ``RuntimeError`` if the grid does not come about.
        """
        pages = order.device_pages
        pool = self._pool(pages)
        host = self._host_pool(pool, order.host_pages)
        copier = CopyEngine(pool, host, ring, meter, saved)
        grid = join(self.place, self.device, self.rendezvous, order.rendezvous)
        self.stage.join(grid.tp_group)
        receiver = grid.receiver(self.config.hidden_size, self.stage.dtype)
        sender = grid.sender()
        sampler = self._sampler() if self.place.samples else None

        def executor(ring: SpanRing, around_forward: AroundForward) -> Executor:
            return Executor(
                self.stage,
                self.place.stage,
                pool,
                self._limits(pages),
                ring,
                self.device,
                copier,
                receiver,
                sender,
                sampler,
                around_forward,
            )

        s_per_token = warm_up(executor(SpanRing("warm-up"), nullcontext), self.boot.epoch)
        return ReadyRank(copier, host, grid, s_per_token, executor)

    def _sampler(self) -> Sampler:
        vocab_size = self.config.vocab_size
        compiled = Compiled(lambda: load_compiler(Path(self.boot.model_path), self.config))
        return Sampler(vocab_size, self.device, SlotGrammars(compiled, vocab_size))

    def _host_pool(self, pool: KVPool, pages: int) -> HostPool:
        try:
            return HostPool(pool, pages)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise MemoryShortage(
                f"no memory for {pages} host pages of {self.page_bytes} bytes ({pages * self.page_bytes // _MIB} MiB) "
                f"on rank {self.place.rank}; give less with --host-memory"
            ) from error

    def _limits(self, pages: int) -> Limits:
        boot = self.boot
        # One entry more than the context needs: the last token may open a page before the request ends.
        # No request has more pages than there are.
        table_pages = min(-(-boot.max_context // boot.page_size), pages) + 1
        return Limits(
            boot.max_running,
            pages,
            boot.page_size,
            table_pages,
            boot.max_plan_tokens,
            self.config.vocab_size,
        )

    def _pool(self, pages: int) -> KVPool:
        try:
            return KVPool(
                self.config,
                self.shard,
                pages,
                self.boot.page_size,
                self.stage.dtype,
                self.device,
                self.kv_format,
            )
        except (MemoryError, OSError, OverflowError, RuntimeError) as error:
            if not _is_shortage(error):
                raise
            raise MemoryShortage(
                f"no memory for {pages} pages of {self.page_bytes} bytes ({pages * self.page_bytes // _MIB} MiB) "
                f"on rank {self.place.rank}; give less with --device-memory"
            ) from error


def load(boot: WorkerBoot) -> LoadedRank:
    """Read this rank's share of the weights. Raises ``ModelError`` or ``MemoryShortage``, one line each."""
    place = Place(boot.rank, boot.pp, boot.tp)
    device = device_of(boot.device, boot.rank)
    path = Path(boot.model_path)
    if boot.dtype not in _DTYPES:
        raise ModelError(f"dtype {boot.dtype} is not supported; allowed: {', '.join(_DTYPES)}")
    _check_files(boot)
    config = load_config(path)
    shard = shards(config, boot.pp, boot.tp)[place.stage][place.tp_rank]
    dtype = _DTYPES[boot.dtype]
    formats = (kv_format(boot.kv_dtype, dtype),)
    try:
        stage = load_stage(
            path, config, shard, dtype, device, kernels=Kernels(boot.kernels), kv_formats=formats
        )
    except (MemoryError, RuntimeError) as error:
        if not _is_shortage(error):
            raise
        raise MemoryShortage(
            f"no memory for the weights of rank {boot.rank}; use more stages with --pp"
        ) from error
    _check_files(boot)
    meets = place.rank == 0 and place.world > 1
    return LoadedRank(
        boot, config, shard, place, device, stage, Rendezvous(place) if meets else None
    )


def _check_files(boot: WorkerBoot) -> None:
    """What is loaded is what pages are named by. Raises ``ModelError``."""
    if boot.marks:
        check_marks(Path(boot.model_path), boot.marks)


def _is_shortage(error: Exception) -> bool:
    """PyTorch's CPU allocator raises a plain RuntimeError; a mapping raises OSError, or OverflowError if it is past any address."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(
        error, MemoryError | OverflowError | torch.OutOfMemoryError
    ) or "can't allocate memory" in str(error)
