"""From tokens to text that may go out: bulk and token-by-token paths agree, and log-probabilities keep step with the text."""

from collections.abc import Mapping
from collections.abc import Sequence as Items

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.messages import FinishReason, Output, TokenLogprobs
from forebay.core.sampling import SamplingParams
from forebay.frontend.sequence import Delta, Sequence

EOS = 0


class Latin:
    """One character per token; a token of 200 or more holds back until the next one."""

    def __init__(self, hidden: Mapping[str, int] | None = None) -> None:
        self.hidden = hidden or {}
        self._held = ""

    def push(self, ids: Items[int]) -> str:
        out = ""
        for token in (token for token in ids if token not in self.hidden.values()):
            self._held += chr(token)
            if token < 200:
                out, self._held = out + self._held, ""
        return out

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def run(
    params: SamplingParams, pieces: list[list[int]], finish: FinishReason, logprobs: bool = False
) -> list[Delta]:
    sequence = Sequence(Latin(), params, (EOS,))
    deltas = []
    for index, tokens in enumerate(pieces):
        last = index == len(pieces) - 1
        values = tuple(TokenLogprobs(-float(token)) for token in tokens) if logprobs else ()
        deltas.append(
            sequence.push(Output("r", tuple(tokens), values, finish=finish if last else None))
        )
        if sequence.finished:
            break
    return deltas


@given(st.lists(st.lists(st.integers(1, 255), max_size=4), min_size=1, max_size=6))
def test_text_does_not_depend_on_how_tokens_were_batched(pieces: list[list[int]]) -> None:
    bulk = run(SamplingParams(max_tokens=None), pieces, FinishReason.LENGTH)
    single = run(
        SamplingParams(max_tokens=None, logprobs=0), pieces, FinishReason.LENGTH, logprobs=True
    )
    text = "".join(chr(token) for piece in pieces for token in piece)
    assert "".join(delta.text for delta in bulk) == text
    assert "".join(delta.text for delta in single) == text
    tokens = [token for piece in pieces for token in piece]
    assert [position.token for delta in single for position in delta.positions] == tokens
    assert single[-1].finish == bulk[-1].finish == "length"


def test_the_end_token_is_counted_and_not_shown() -> None:
    (delta,) = run(SamplingParams(), [[65, EOS]], FinishReason.STOP)
    assert delta == Delta("A", (65, EOS), (), "stop", None)


def test_the_last_held_characters_may_complete_a_stop_string() -> None:
    deltas = run(SamplingParams(stop=("Aÿ",)), [[66, 65], [255]], FinishReason.LENGTH)
    assert [delta.text for delta in deltas] == ["B", ""]
    assert (deltas[-1].finish, deltas[-1].stop_reason) == ("stop", "Aÿ")


def test_logprobs_wait_with_text_that_may_be_a_stop_string() -> None:
    deltas = run(
        SamplingParams(stop=("XY",), logprobs=0),
        [[65], [ord("X")], [66]],
        FinishReason.LENGTH,
        logprobs=True,
    )
    assert [delta.text for delta in deltas] == ["A", "", "XB"]
    assert [[position.token for position in delta.positions] for delta in deltas] == [
        [65],
        [],
        [ord("X"), 66],
    ]
    assert [position.offset for delta in deltas for position in delta.positions] == [0, 1, 2]


HIDDEN = {"<|end|>": 1, "<|end|>!": 2, "<|tool|>": 3}


def of_hidden(
    stops: list[str], tokens: list[int], finish: FinishReason = FinishReason.LENGTH
) -> tuple[str, str | int | None, int]:
    """Text, stop reason and number of tokens, the tokens coming one by one."""
    sequence = Sequence(Latin(HIDDEN), SamplingParams(stop=tuple(stops), logprobs=0), (EOS,))
    text, reason = "", None
    for at, token in enumerate(tokens):
        last = at == len(tokens) - 1
        values = (TokenLogprobs(-1.0),)
        delta = sequence.push(Output("r", (token,), values, finish=finish if last else None))
        text += delta.text
        assert all(position.offset <= len(text) for position in delta.positions)
        if sequence.finished:
            reason = delta.stop_reason
            break
    return text, reason, sequence.token_count


def test_a_stop_string_that_is_a_special_token_stops_at_it() -> None:
    a, b, c = map(ord, "abc")
    assert of_hidden(["<|end|>"], [a, 1, b]) == ("a", "<|end|>", 2)
    assert of_hidden(["<|end|>"], [1]) == ("", "<|end|>", 1)
    assert of_hidden(["x", "<|end|>!"], [a, 1, b, 2, c]) == ("ab", "<|end|>!", 4)
    # In the middle of one, several in one, and one that is spelled by ordinary tokens.
    assert of_hidden(["b<|end|>c"], [a, b, 1, a, b, 1, c, c]) == ("aba", "b<|end|>c", 7)
    assert of_hidden(["<|tool|><|end|>"], [a, 3, b, 3, 1, c]) == ("ab", "<|tool|><|end|>", 5)
    assert of_hidden(["<|end|>"], [a, *map(ord, "<|end|>"), b]) == ("a", "<|end|>", 8)


def test_special_tokens_that_stop_nothing_stay_hidden() -> None:
    a, b, c = map(ord, "abc")
    assert of_hidden(["b<|end|>x"], [a, b, 1, c, 1, 3]) == ("abc", None, 6)
    assert of_hidden(["<|end|>x"], [a, 1]) == ("a", None, 2)
    assert of_hidden([], [a, 1, b]) == ("ab", None, 3)
