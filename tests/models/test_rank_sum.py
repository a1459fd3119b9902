"""A row's sum over tensor parallel ranks, whatever rows it is computed beside."""

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from forebay.models.rank_sum import sum_over_ranks
from tests.models.thread_ranks import run_ranks

WIDTH = 576
PLACES = [
    (1, 0),
    (3, 0),
    (3, 1),
    (3, 2),
    (64, 0),
    (64, 17),
    (64, 63),
]  # rows of the batch, the row that is looked at


def part(rank: int, dtype: torch.dtype) -> Tensor:
    """(WIDTH,) of one rank"""
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_the_sum_of_a_row_is_the_same_in_every_batch_on_every_rank(
    tp: int, dtype: torch.dtype
) -> None:
    def sums(rank: int, group: ProcessGroup) -> list[Tensor]:
        mine, found = part(rank, dtype), []
        for rows, place in PLACES:
            batch = torch.randn(rows, WIDTH).to(dtype)
            batch[place] = mine
            found.append(sum_over_ranks(batch, group)[place])
        return found

    exact = torch.stack([part(rank, dtype).double() for rank in range(tp)]).sum(0)
    expected = None
    for on_rank in run_ranks(tp, sums):
        for row in on_rank:
            expected = row if expected is None else expected
            assert row.dtype == dtype and torch.equal(row, expected)
    assert expected is not None
    assert torch.allclose(expected.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
