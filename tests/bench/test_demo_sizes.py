"""`make demo` fits its time on fast machines and slow ones, and is whole where there is time."""

from pathlib import Path

import pytest

from forebay.bench.demo_sizes import (
    BUDGET_S,
    COMPARISONS,
    TALK_SHARE,
    TALKS,
    Speed,
    choose,
    shorten,
)

MANUAL = (Path(__file__).parents[2] / "examples" / "manual.txt").read_text()
AVX512 = Speed(start_s=5.0, prefill_tokens_s=1500.0, decode_s=0.012)
SLOW = Speed(start_s=10.0, prefill_tokens_s=40.0, decode_s=0.05)


def test_a_fast_machine_shows_everything() -> None:
    assert choose(TALKS, AVX512, TALK_SHARE * BUDGET_S) == (TALKS[0], True)
    assert choose(COMPARISONS, AVX512, (1 - TALK_SHARE) * BUDGET_S) == (COMPARISONS[0], True)
    assert shorten(MANUAL, TALKS[0].manual_tokens, 1.6) == MANUAL


def test_a_slow_machine_shows_less_in_the_same_time() -> None:
    talk, _ = choose(TALKS, SLOW, TALK_SHARE * BUDGET_S)
    comparison, _ = choose(COMPARISONS, SLOW, (1 - TALK_SHARE) * BUDGET_S)
    assert talk != TALKS[0] and comparison != COMPARISONS[0]
    assert talk.seconds(SLOW) + comparison.seconds(SLOW) < BUDGET_S
    assert TALKS[0].seconds(SLOW) + COMPARISONS[0].seconds(SLOW) > 3 * BUDGET_S


def test_where_nothing_fits_the_least_is_taken_and_that_is_known() -> None:
    assert choose(TALKS, SLOW, 1.0) == (TALKS[-1], False)


@pytest.mark.parametrize("kinds", [TALKS, COMPARISONS])
def test_what_comes_later_takes_less(kinds: tuple[object, ...]) -> None:
    seconds = [size.seconds(SLOW) for size in kinds]  # type: ignore[attr-defined]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == len(seconds)


def test_every_comparison_has_stored_pages_to_fetch() -> None:
    """`bench ttft` wants whole rounds, and prefixes of at least 256 tokens in pages of 64."""
    for size in COMPARISONS:
        assert size.requests % (2 * size.rounds) == 0
        assert (size.input_len - 1) // 64 * 64 >= 256


def test_a_manual_is_cut_between_its_sections() -> None:
    short = shorten(MANUAL, 300, 1.6)
    assert MANUAL.startswith(short) and MANUAL[len(short)] == "\n" and 90 < len(short.split()) < 190
