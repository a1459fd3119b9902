"""How many pages a ticket reads at once."""

import pytest

from forebay.core.batches import BATCH_S, MOST_BATCH_BYTES, BatchSizes


@pytest.mark.parametrize(
    ("pages", "seconds", "expected"),
    [
        (11, BATCH_S / 2, 22),
        (22, BATCH_S, 22),
        (44, BATCH_S * 4, 11),
        (11, 0.0, 88),
        (11, BATCH_S / 100, 88),
        (88, 4.0, 11),
    ],
)
def test_the_next_batch_takes_as_long_as_a_cancel_may_wait_at_the_rate_of_the_last(
    pages: int, seconds: float, expected: int
) -> None:
    sizes = BatchSizes(MOST_BATCH_BYTES // 88)
    assert sizes.first == 11 and sizes.following(pages, seconds) == expected


def test_where_a_page_is_larger_than_a_batch_it_is_one_page() -> None:
    sizes = BatchSizes(MOST_BATCH_BYTES + 1)
    assert sizes.first == sizes.following(1, 60.0) == sizes.following(1, 0.0) == 1
