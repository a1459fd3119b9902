"""What processes measure adds up, over ranks and over epochs."""

import pytest

from forebay.observe.figures import (
    SECONDS_BOUNDS,
    FiguresOfRanks,
    Meter,
    Report,
    decode_report,
    encode_report,
)


def measured(pages: int) -> bytes:
    meter = Meter()
    meter.transfer("load", pages * 100, 0.002)
    meter.store_op("get", "ok", pages)
    return meter.encoded()


def test_the_last_word_of_each_rank_counts_once() -> None:
    ranks = FiguresOfRanks()
    ranks.heard(0, measured(1))
    ranks.heard(0, measured(3))
    ranks.heard(1, measured(5))
    own = Meter()
    own.ticket("query", 0.0001)
    total = ranks.total(own.encoded())
    assert total.transfer_bytes == {"load": 800}
    assert total.store_ops == {"get/ok": 8}
    assert sum(total.transfer_seconds["load"].buckets) == 2
    assert total.ticket_seconds["query"].buckets[0] == 1


def test_figures_of_lost_ranks_are_kept_and_totals_only_rise() -> None:
    ranks = FiguresOfRanks()
    ranks.heard(0, measured(4))
    ranks.end_epoch()
    assert ranks.total().transfer_bytes == {"load": 400}
    ranks.heard(0, measured(1))
    assert ranks.total().transfer_bytes == {"load": 500}
    assert ranks.total().transfer_bytes == {"load": 500}, "asking changes nothing"


def test_a_time_falls_into_the_bucket_of_the_first_bound_that_is_not_below_it() -> None:
    meter = Meter()
    for seconds in (0.0, SECONDS_BOUNDS[0], SECONDS_BOUNDS[0] * 1.01, SECONDS_BOUNDS[-1] + 1):
        meter.transfer("fetch", 1, seconds)
    ranks = FiguresOfRanks()
    ranks.heard(0, meter.encoded())
    buckets = ranks.total().transfer_seconds["fetch"].buckets
    assert (buckets[0], buckets[1], buckets[-1]) == (2, 1, 1)


def test_what_is_no_report_is_a_value_error() -> None:
    assert decode_report(encode_report(Report())) == Report()
    for bad in (b"", b"\xff", b"\x92\x01\x02"):
        with pytest.raises(ValueError, match="no figures"):
            decode_report(bad)
