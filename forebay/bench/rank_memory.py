"""What the process of each rank has in memory beside its weights and the pages in use: libraries and buffers, which have a bound.

    rss = weights + pools + over

``rss`` is what the kernel counts (proc(5)). ``weights`` are the shard's matrices in the dtype that they are computed in, ``pools`` the
pages of device and host memory that hold something: a pool takes no memory for pages that were never used.
"""

from pathlib import Path
from typing import Any

import psutil
import torch

from forebay.core.messages import Snapshot
from forebay.models.config import load_config
from forebay.models.kv import page_block
from forebay.models.kv_format import kv_format
from forebay.models.shard import shard_parameters, shards
from forebay.settings import Settings

OVER_BYTES_MAX = 450_000_000
_WORKER = "forebay.runtime.worker"


def memory_rows(
    planner_pid: int, snapshot: Snapshot, model: Path, dtype: torch.dtype, settings: Settings
) -> list[dict[str, Any]]:
    """One row for each rank, in bytes. ``settings``: of an engine on CPUs, whose planner said ``snapshot``."""
    config = load_config(model)
    kept = kv_format(settings.kv_dtype.value, dtype)
    pages = sum(tier.capacity - tier.free for tier in (snapshot.device, snapshot.host))
    grid = [shard for stage in shards(config, settings.pp, settings.tp) for shard in stage]
    rows = []
    for rank, (shard, process) in enumerate(zip(grid, _ranks(planner_pid), strict=True)):
        rss = process.memory_info().rss
        weights = shard_parameters(config, shard) * dtype.itemsize
        pools = pages * page_block(config, shard, settings.page_size, kept).size
        over = rss - weights - pools
        rows.append(
            {
                "rank": rank,
                "rss": rss,
                "weights": weights,
                "pools": pools,
                "over": over,
                "over_max": OVER_BYTES_MAX,
            }
        )
    return rows


def _ranks(planner_pid: int) -> list[psutil.Process]:
    """In the order of their numbers, which is that of their starts."""
    children = sorted(
        psutil.Process(planner_pid).children(), key=lambda process: process.create_time()
    )
    return [child for child in children if _WORKER in child.cmdline()]
