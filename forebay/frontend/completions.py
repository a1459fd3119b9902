"""`POST /v1/completions`: plain text on from a prompt, or from each of several."""

import time
from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from forebay.frontend.answer import answer
from forebay.frontend.asked import Asked, UsageWish
from forebay.frontend.generation import Generation, Result, collect
from forebay.frontend.limits import read_body
from forebay.frontend.parse import parse_completion
from forebay.frontend.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    UsageBody,
    completion_logprobs,
    prompt_logprobs,
    usage_body,
)
from forebay.frontend.sequence import Delta, Position
from forebay.frontend.service import Service


async def completions(service: Service, request: Request) -> Response:
    """Raises what `errors` knows an answer to."""
    with service.counting_refusals():
        body = await read_body(request, service.body_bytes_max)
        asked = parse_completion(body, service.model.sampling)
        generation = await service.generate(request, asked, "cmpl")
    wording = _Wording(service, generation, asked)
    heartbeat_s = service.settings.stream_heartbeat_s
    return await answer(request, generation, wording, asked.streamed, heartbeat_s)


class _Wording:
    """A Generation in the words of this endpoint, whole or in chunks."""

    def __init__(self, service: Service, generation: Generation, asked: Asked) -> None:
        self._generation = generation
        self._spelling = service.model.spelling
        self._prompt = asked.prompt
        self._is_scored = generation.work.params.prompt_logprobs is not None
        self._with_logprobs = generation.work.params.logprobs is not None
        self._usage = asked.usage
        self._created = int(time.time())
        self._model = asked.model or service.model.name

    async def whole(self) -> Completion:
        choices = [
            self._choice(index, result)
            for index, result in enumerate(await collect(self._generation))
        ]
        return self._completion(choices, usage_body(self._generation, self._prompt.alone))

    def _choice(self, index: int, result: Result) -> CompletionChoice:
        text, finish, shown = result.text, result.finish, result.positions
        if self._prompt.alone:
            text, finish, shown = "", "length", []
        before = ""
        given = self._generation.prompt_positions(index) if self._is_scored else []
        if self._prompt.echo:
            scored = "".join(position.text for position in given)
            before = scored if given else self._generation.echo(index)
        logprobs = None
        if self._with_logprobs:
            logprobs = completion_logprobs(given if before else [], self._spelling)
            logprobs += completion_logprobs(shown, self._spelling, len(before))
        choice = CompletionChoice(index, before + text, logprobs, finish, result.stop_reason)
        if self._prompt.scores:
            choice.prompt_logprobs = prompt_logprobs(given, self._spelling)
        return choice

    def opening(self) -> Iterable[Completion]:
        if self._prompt.echo:
            for index in range(len(self._generation.sequences)):
                choice = CompletionChoice(index, self._generation.echo(index), None, None)
                yield self._completion([choice], self._usage_beside())

    def delta(self, index: int, delta: Delta) -> Iterable[Completion]:
        if delta.text or delta.positions or delta.finish:
            choice = CompletionChoice(
                index, delta.text, self._logprobs(delta.positions), delta.finish, delta.stop_reason
            )
            yield self._completion([choice], self._usage_beside())

    def closing(self) -> Iterable[Completion]:
        if self._usage is UsageWish.NONE:
            return ()
        return (self._completion([], usage_body(self._generation)),)

    def _usage_beside(self) -> UsageBody | UnsetType | None:
        """What a chunk with text says of usage."""
        if self._usage is UsageWish.ALWAYS:
            return usage_body(self._generation)
        return UNSET if self._usage is UsageWish.NONE else None

    def _completion(
        self, choices: list[CompletionChoice], usage: UsageBody | UnsetType | None
    ) -> Completion:
        return Completion(
            self._generation.work.request_id, self._created, self._model, choices, usage
        )

    def _logprobs(self, positions: Sequence[Position]) -> CompletionLogprobs | None:
        return completion_logprobs(positions, self._spelling) if self._with_logprobs else None
