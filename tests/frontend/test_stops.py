"""Stop strings: nothing of one ever gets out, however the text was cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.frontend.stops import StopMatcher


def stream(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        out += text
        if stop is not None:
            return out, stop
    return out + matcher.finish(), None


def whole_text(stops: list[str], text: str) -> tuple[str, str | None]:
    """The dumb twin: look at every end position in turn."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_string_over_three_pieces_is_cut_and_its_start_never_leaks() -> None:
    matcher = StopMatcher(["END."])
    assert matcher.push("the E") == ("the ", None)
    assert matcher.push("ND") == ("", None)
    assert matcher.push(". and more") == ("", "END.")


def test_what_only_looked_like_a_stop_string_comes_out_later() -> None:
    matcher = StopMatcher(["END."])
    assert matcher.push("EN") == ("", None)
    assert matcher.push("DLESS") == ("ENDLESS", None)
    assert matcher.push(" EN") == (" ", None)
    assert matcher.finish() == "EN"


def test_before_min_tokens_a_stop_string_is_plain_text() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", armed=False) == ("xab", None)
    assert matcher.push("a", armed=False) == ("", None)
    assert matcher.push("b") == ("", "ab")  # it ends in an armed piece, so it counts


@pytest.mark.parametrize("stops", [["bc", "abcd"], ["abcd", "bc"]])
def test_the_first_to_be_complete_wins_whatever_their_order(stops: list[str]) -> None:
    assert stream(stops, ["a", "b", "c", "d"]) == ("a", "bc")
    assert stream(stops, ["abcd"]) == ("a", "bc")


@given(
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("ab.", max_size=5), max_size=12),
)
def test_pieces_give_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    assert stream(stops, pieces) == whole_text(stops, "".join(pieces))
