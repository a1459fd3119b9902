"""One generated sequence as a reader sees it: tokens of the engine in, text that may go out.

        Output.tokens -> detokenizer -> StopMatcher -> Delta.text
        Output.logprobs ------ held back with their text ---> Delta.positions

Sans-IO: knows neither the engine nor HTTP.
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from forebay.core.messages import FinishReason, Output, TokenLogprobs
from forebay.core.sampling import SamplingParams
from forebay.frontend.stops import HiddenTokens, StopMatcher

Finish = Literal["stop", "length"]


class Detokenizer(Protocol):
    """Text of tokens as they come, whole characters only. ``hidden``: the tokens that the text
    leaves out, by spelling."""

    @property
    def hidden(self) -> Mapping[str, int]: ...
    def push(self, ids: Items[int]) -> str: ...
    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Position:
    """Log-probabilities at one token. ``text``: what it adds to the sequence's text, from character ``offset`` on; joined, these
    are the text. ``logprobs``: None for the first token of a prompt, which nothing comes before."""

    token: int
    offset: int
    logprobs: TokenLogprobs | None
    text: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What one Output adds. ``finish`` ends the sequence; ``stop_reason``: the stop string or stop token that did it."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    positions: tuple[Position, ...] = ()
    finish: Finish | None = None
    stop_reason: str | int | None = None


class Sequence:
    """``token_count`` tokens have come; ``finished`` once a Delta had ``finish``."""

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams, eos: Items[int]) -> None:
        self._detokenizer = detokenizer
        self._hidden = HiddenTokens(params.stop, detokenizer.hidden if params.stop else {})
        self._stops = StopMatcher(self._hidden.stops)
        self._min_tokens = params.min_tokens
        self._is_scored = params.prompt_logprobs is not None
        self._eos = frozenset(eos)
        # Without either, text may be made for all new tokens at once.
        self._by_token = bool(params.stop) or params.logprobs is not None
        self._waiting: deque[Position] = deque()
        self._decoded_chars = 0
        self._sent_chars = 0
        self.token_count = 0
        self.scores: dict[int, TokenLogprobs] = {}  # of the prompt, by position
        self.finish: Finish | None = None

    @property
    def finished(self) -> bool:
        return self.finish is not None

    def push(self, output: Output) -> Delta:
        """Takes an Output that has no ``finish``, or one of STOP and LENGTH."""
        assert not self.finished
        assert output.finish in (None, FinishReason.STOP, FinishReason.LENGTH)
        for position, logprobs in enumerate(output.scores, start=output.scored_from):
            self.scores[position] = logprobs
        silent = self._silent_tokens(output)
        text, taken, stop = self._take(output, len(output.tokens) - silent)
        if stop is not None:
            return self._delta(text, output.tokens[:taken], "stop", stop)
        self.token_count += silent
        if silent and output.logprobs and self._is_scored:
            # Who scores a text counts positions, so that a token without text must have its own (as lm-eval does).
            end = Position(output.tokens[-1], self._decoded_chars, output.logprobs[-1], "")
            self._waiting.append(end)
        if output.finish is None:
            return self._delta(text, output.tokens)
        rest, stop = self._flush()
        finish: Finish = (
            "stop" if stop is not None or output.finish is FinishReason.STOP else "length"
        )
        return self._delta(
            text + rest, output.tokens, finish, output.stop_token if stop is None else stop
        )

    def _silent_tokens(self, output: Output) -> int:
        """1 if the last token is what ended the sequence: it is counted, but is no part of the text."""
        if output.finish is not FinishReason.STOP or not output.tokens:
            return 0
        return int(output.tokens[-1] in self._eos or output.tokens[-1] == output.stop_token)

    def _take(self, output: Output, count: int) -> tuple[str, int, str | None]:
        """Text of the first ``count`` tokens, how many were looked at, and the stop string that was found in it."""
        if not self._by_token:
            self.token_count += count
            return self._decode(output.tokens[:count]), count, None
        sent = ""
        for index in range(count):
            self.token_count += 1
            token, offset = output.tokens[index], self._decoded_chars
            decoded = self._decode((token,))
            if output.logprobs:
                self._waiting.append(Position(token, offset, output.logprobs[index], decoded))
            text, stop = self._stops.push(
                decoded + self._hidden.mark(token), self.token_count >= self._min_tokens
            )
            sent += text
            if stop is not None:
                return self._hidden.text(sent), index + 1, self._hidden.asked(stop)
        return self._hidden.text(sent), count, None

    def _decode(self, tokens: Items[int]) -> str:
        text = self._detokenizer.push(tokens)
        self._decoded_chars += len(text)
        return text

    def _flush(self) -> tuple[str, str | None]:
        """The characters that detokenizer and matcher still held, now that no token follows."""
        rest = self._detokenizer.finish()
        if rest and self._waiting:  # half a character, which no token completes any more
            last = self._waiting.pop()
            self._waiting.append(replace(last, text=last.text + rest))
        text, stop = self._stops.push(rest, self.token_count >= self._min_tokens)
        held = "" if stop is not None else self._stops.finish()
        return self._hidden.text(text + held), self._hidden.asked(stop)

    def _delta(
        self,
        text: str,
        tokens: tuple[int, ...],
        finish: Finish | None = None,
        stop_reason: str | int | None = None,
    ) -> Delta:
        self._sent_chars += len(text)
        self.finish = finish
        released: list[Position] = []
        # A position goes out with its text; what a stop string cut off goes nowhere.
        ended_by_text = isinstance(stop_reason, str)
        while self._waiting and (
            self._waiting[0].offset < self._sent_chars or (self.finished and not ended_by_text)
        ):
            position = self._waiting.popleft()
            if ended_by_text:
                shown = self._sent_chars - position.offset
                position = replace(position, text=position.text[:shown])
            released.append(position)
        return Delta(text, tokens, tuple(released), finish, stop_reason)
