"""Tensor parallel ranks as threads of this process; the group that joins them is gloo's own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from tests.pace import paced

DEADLINE = timedelta(seconds=paced(60))

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[int, dist.ProcessGroup], T]) -> list[T]:
    """What `work(rank, group)` returns on each rank."""
    store = dist.HashStore()

    def run(rank: int) -> T:
        return work(rank, dist.ProcessGroupGloo(store, rank, size, DEADLINE))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
