"""The sum over a stage's tensor parallel ranks, in one order for every element.

An all-reduce may add an element's parts in an order that depends on where the element lies in the buffer, so with three ranks or more
a row would depend on what it is computed beside: a text on its neighbours, and after a crash on how it is computed again.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Element by element the sum of all ranks' contiguous `partial`, the same on each of them; `partial` may be overwritten.

    Parts are added in the order of the ranks, in float32, and rounded once. Raises ``RuntimeError`` when a rank is gone.
    """
    if group.size() <= 2:  # a + b is b + a
        dist.all_reduce(partial, group=group)
        return partial
    parts = partial.new_empty(group.size(), *partial.shape)
    dist.all_gather(list(parts), partial, group=group)
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total.to(partial.dtype)
