"""One API request in the engine: ``n`` sequences for each prompt, and their text as it comes.

        Generation ---Submit x (prompts x n)---> engine.Call ---Output---> sequence.Sequence ---Delta---> reader

Sequence ``index`` = prompt index * n + choice, which is also the ``index`` that the API shows.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from forebay.core.messages import FinishReason, Output, Submit, Usage, pack_tokens
from forebay.frontend.assemble import Work
from forebay.frontend.engine import Call, Engine
from forebay.frontend.scored import echo_text, prompt_positions
from forebay.frontend.seeds import SeedCounter, derive_seed
from forebay.frontend.sequence import Delta, Detokenizer, Finish, Position, Sequence

_FAILURES = {FinishReason.REJECTED_TOO_LONG: "too_long", FinishReason.REJECTED_FULL: "full"}

Event = tuple[int, Delta]
DetokenizerFactory = Callable[[bool], Detokenizer]  # takes ``skip_special``


class GenerationError(Exception):
    """The engine ended a sequence without its text being complete. ``reason`` says which way, the text why."""

    def __init__(self, reason: FinishReason, message: str) -> None:
        super().__init__(message or f"the engine ended the request: {reason.value}")
        self.reason = reason


class Generation:
    """Submits at once. Read ``events``, and always ``close`` (or use it as a context manager): that aborts what still runs."""

    def __init__(
        self,
        engine: Engine,
        work: Work,
        eos: tuple[int, ...],
        seeds: SeedCounter,
        detokenizer: DetokenizerFactory,
        on_end: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._on_end = on_end
        self._detokenizer = detokenizer
        params = work.params
        submits: list[Submit] = []
        self.sequences: list[Sequence] = []
        self.usages: list[Usage | None] = []
        self._index: dict[str, int] = {}
        for prompt, max_tokens in zip(work.prompts, work.max_tokens, strict=True):
            packed = pack_tokens(prompt.tokens)
            for choice in range(params.n):
                index = len(submits)
                seed = seeds.next() if params.seed is None else derive_seed(params.seed, choice)
                # Stop strings are found here; the engine has no use for them.
                own = params.replace(n=1, seed=seed, max_tokens=max_tokens, stop=())
                if choice:  # the first one's scores are the prompt's
                    own = own.replace(prompt_logprobs=None)
                submit = Submit(
                    f"{work.request_id}-{index}",
                    packed,
                    own,
                    eos,
                    work.salt,
                    work.no_store,
                    work.priority,
                )
                submits.append(submit)
                self._index[submit.request_id] = index
                self.sequences.append(
                    Sequence(detokenizer(params.skip_special_tokens), params, eos)
                )
                self.usages.append(None)
        self.work = work
        self._failure: FinishReason | None = None
        self._is_closed = False
        self.call: Call = engine.submit(submits, params.n)

    async def events(self) -> AsyncIterator[list[Event]]:
        """Deltas by sequence index, until every sequence has finished. Raises ``GenerationError``; then everything is aborted."""
        try:
            while outputs := await self.call.take():
                events, failure = self._read(outputs)
                if events:
                    yield events
                if failure is not None:
                    self._failure = failure.reason
                    raise failure
        finally:
            self.close()

    def close(self) -> None:
        self.call.close()
        if not self._is_closed:
            self._is_closed = True
            self._on_end(self.outcome)

    @property
    def outcome(self) -> str:
        """How the request ended, for metrics (`observe.metrics.REQUEST_OUTCOMES`), all choices taken together."""
        if self._failure is not None:
            return _FAILURES.get(self._failure, "error")
        if not all(sequence.finished for sequence in self.sequences):
            return "abort"
        return "length" if any(one.finish == "length" for one in self.sequences) else "stop"

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def prompt_positions(self, index: int) -> list[Position]:
        """The prompt of sequence ``index``, token by token, where it was scored."""
        first = index - index % self.work.params.n
        prompt = self.work.prompts[index // self.work.params.n]
        return prompt_positions(prompt, self.sequences[first].scores, self._new_detokenizer())

    def echo(self, index: int) -> str:
        """The text of the prompt of sequence ``index``."""
        return echo_text(self.work.prompts[index // self.work.params.n], self._new_detokenizer())

    def _new_detokenizer(self) -> Detokenizer:
        return self._detokenizer(self.work.params.skip_special_tokens)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.work.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(sequence.token_count for sequence in self.sequences)

    @property
    def cached(self) -> Usage:
        """Cached prompt tokens, each prompt counted once (by its first choice)."""
        first = [usage for usage in self.usages[:: self.work.params.n] if usage is not None]
        return Usage(
            sum(usage.cached_device for usage in first),
            sum(usage.cached_host for usage in first),
            sum(usage.cached_store for usage in first),
        )

    def _read(self, outputs: list[Output]) -> tuple[list[Event], GenerationError | None]:
        """Events up to the first failure: text that came before it is not lost."""
        events: list[Event] = []
        for output in outputs:
            index = self._index[output.request_id]
            sequence = self.sequences[index]
            if sequence.finished:  # by a stop string, earlier in this very batch
                continue
            if output.finish not in (None, FinishReason.STOP, FinishReason.LENGTH):
                return events, GenerationError(output.finish, output.message)
            if output.usage is not None:
                self.usages[index] = output.usage
            delta = sequence.push(output)
            if delta.finish is not None:
                self.call.abort(
                    output.request_id
                )  # a stop string was found; for the engine's own endings this does nothing
            if delta.text or delta.tokens or delta.finish:
                events.append((index, delta))
        return events, None


@dataclass(slots=True)
class Result:
    """One whole sequence."""

    text: str
    tokens: list[int]
    positions: list[Position]
    finish: Finish
    stop_reason: str | int | None


async def collect(generation: Generation) -> list[Result]:
    """Every sequence to its end, in order of index. Raises ``GenerationError``."""
    deltas: list[list[Delta]] = [[] for _ in generation.sequences]
    async for events in generation.events():
        for index, delta in events:
            deltas[index].append(delta)
    return [_result(of_sequence) for of_sequence in deltas]


def _result(deltas: list[Delta]) -> Result:
    finish = deltas[-1].finish
    assert finish is not None
    return Result(
        text="".join(delta.text for delta in deltas),
        tokens=[token for delta in deltas for token in delta.tokens],
        positions=[position for delta in deltas for position in delta.positions],
        finish=finish,
        stop_reason=deltas[-1].stop_reason,
    )
