"""One API request in the engine: ``n`` sequences for each prompt, and their text as it comes.

        Generation ---Submit x (prompts x n)---> engine.Call ---Output---> sequence.Sequence ---Delta---> reader

Sequence ``index`` = prompt index * n + choice, which is also the ``index`` that the API shows.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from forebay.core.messages import FinishReason, Output, Snapshot, Submit, Usage, pack_tokens
from forebay.core.sampling import SamplingParams
from forebay.frontend.engine import Call, Engine
from forebay.frontend.prompts import Prompt, PromptTooLong
from forebay.frontend.seeds import SeedCounter, derive_seed
from forebay.frontend.sequence import Delta, Detokenizer, Finish, Position, Sequence
from forebay.settings import Settings

Event = tuple[int, Delta]
DetokenizerFactory = Callable[[bool], Detokenizer]  # takes ``skip_special``


class GenerationError(Exception):
    """The engine ended a sequence without its text being complete. ``reason`` says which way, the text why."""

    def __init__(self, reason: FinishReason, message: str) -> None:
        super().__init__(message or f"the engine ended the request: {reason.value}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Work:
    """What one API request asks of the engine, every default filled in. ``max_tokens``: one for each prompt."""

    request_id: str
    prompts: tuple[Prompt, ...]
    max_tokens: tuple[int, ...]
    params: SamplingParams
    salt: bytes = b""
    no_store: bool = False
    priority: int = 0


def room_tokens(max_context: int, snapshot: Snapshot | None, page_tokens: int) -> int:
    """Tokens that one request can have at all: the context, or all of L1 where that is less."""
    pages = snapshot.device.capacity if snapshot is not None else 0
    return min(max_context, pages * page_tokens) if pages else max_context


def fit_max_tokens(
    asked: int | None, default: int | None, prompt_tokens: int, max_context: int, room: int
) -> int:
    """``max_tokens`` for a prompt: what was asked, else the default, or all that fits, cut to the ``room`` there is.

    Raises ``PromptTooLong`` if the prompt, or what was asked with it, exceeds the context. What exceeds only L1 is the planner's
    to refuse.
    """
    if asked is not None and prompt_tokens + asked > max_context:
        raise PromptTooLong(
            f"prompt ({prompt_tokens} tokens) and max_tokens ({asked}) are {prompt_tokens + asked} tokens together; "
            f"the context holds {max_context}; shorten the prompt or lower max_tokens"
        )
    if asked is not None:
        return asked
    if prompt_tokens >= room:
        raise PromptTooLong(
            f"the prompt has {prompt_tokens} tokens; at most {room - 1} fit; shorten it"
        )
    return room - prompt_tokens if default is None else min(default, room - prompt_tokens)


def sequence_places(settings: Settings) -> int:
    """Sequences that the planner has room for, running and waiting."""
    return settings.max_running + settings.max_waiting


def check_sequences(prompts: int, n: int, places: int) -> None:
    """Raises ``ValueError`` for more sequences at once than there can ever be room for."""
    if prompts * n > places:
        raise ValueError(
            f"{prompts} prompt(s) with n = {n} are {prompts * n} sequences; at most {places} can run or wait"
        )


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises ``ValueError`` for a stop token or bias outside the vocabulary."""
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(params.logit_bias)),
    ):
        for bad in (token for token in ids if not 0 <= token < vocab_size):
            raise ValueError(
                f"{name} has the token id {bad}; the model's ids are 0 to {vocab_size - 1}"
            )


class Generation:
    """Submits at once. Read ``events``, and always ``close`` (or use it as a context manager): that aborts what still runs."""

    def __init__(
        self,
        engine: Engine,
        work: Work,
        eos: tuple[int, ...],
        seeds: SeedCounter,
        detokenizer: DetokenizerFactory,
    ) -> None:
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
        self.call: Call = engine.submit(submits)

    async def events(self) -> AsyncIterator[list[Event]]:
        """Deltas by sequence index, until every sequence has finished. Raises ``GenerationError``; then everything is aborted."""
        try:
            while outputs := await self.call.take():
                events, failure = self._read(outputs)
                if events:
                    yield events
                if failure is not None:
                    raise failure
        finally:
            self.close()

    def close(self) -> None:
        self.call.close()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

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
