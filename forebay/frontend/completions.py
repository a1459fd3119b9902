"""`POST /v1/completions`: plain text on from a prompt, or from each of several."""

import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from forebay.frontend.answer import answer
from forebay.frontend.disconnect import run_while_connected
from forebay.frontend.errors import ApiError
from forebay.frontend.generation import Generation, collect
from forebay.frontend.limits import MAX_PROMPTS, read_body
from forebay.frontend.prompts import Prompt
from forebay.frontend.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionRequest,
    decode_body,
    wants_usage,
)
from forebay.frontend.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    UsageBody,
    completion_logprobs,
    usage_body,
)
from forebay.frontend.sequence import Delta, Position
from forebay.frontend.service import Service

T = TypeVar("T")


async def completions(service: Service, request: Request) -> Response:
    """Raises what `errors` knows an answer to."""
    asked = decode_body(await read_body(request, service.body_bytes_max), CompletionRequest)
    service.check_model(asked.model)
    params = service.checked_params(asked)
    with_usage = wants_usage(asked)
    service.require_ready()
    prompts = await run_while_connected(request.receive, _prompts(service, asked.prompt))
    generation = service.generate(asked, params, prompts, DEFAULT_COMPLETION_TOKENS, "cmpl")
    return await answer(
        request, generation, _Wording(service, generation, with_usage), bool(asked.stream)
    )


async def _prompts(service: Service, prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """Text, texts, tokens or lists of tokens. Raises ``ApiError`` for a mixture, none or too many, ``PromptError``."""
    encoder = service.encoder
    if isinstance(prompt, str):
        return [await encoder.from_text(prompt)]
    if not prompt:
        raise ApiError(
            400,
            "the prompt is empty; allowed: text, texts, token ids, or lists of token ids",
            "prompt",
        )
    if tokens := _all_of(prompt, int):
        return [encoder.from_tokens(tokens)]
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(
            400, f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are allowed", "prompt"
        )
    if texts := _all_of(prompt, str):
        return await encoder.from_texts(texts)
    if lists := _all_of(prompt, list):
        return [encoder.from_tokens(tokens) for tokens in lists]
    raise ApiError(400, "prompt mixes texts and token ids; allowed: one kind of them", "prompt")


def _all_of(items: Sequence[object], kind: type[T]) -> list[T]:
    found = [item for item in items if isinstance(item, kind)]
    return found if len(found) == len(items) else []


class _Wording:
    """A Generation in the words of this endpoint, whole or in chunks."""

    def __init__(self, service: Service, generation: Generation, with_usage: bool) -> None:
        self._generation = generation
        self._spell = service.spell
        self._with_logprobs = generation.work.params.logprobs is not None
        self._with_usage = with_usage
        self._created = int(time.time())
        self._model = service.model.name

    async def whole(self) -> Completion:
        choices = [
            CompletionChoice(
                index,
                result.text,
                self._logprobs(result.positions),
                result.finish,
                result.stop_reason,
            )
            for index, result in enumerate(await collect(self._generation))
        ]
        return self._completion(choices, usage_body(self._generation))

    def opening(self) -> Iterable[Completion]:
        return ()

    def delta(self, index: int, delta: Delta) -> Iterable[Completion]:
        if delta.text or delta.positions or delta.finish:
            choice = CompletionChoice(
                index, delta.text, self._logprobs(delta.positions), delta.finish, delta.stop_reason
            )
            yield self._completion([choice], None if self._with_usage else UNSET)

    def closing(self) -> Iterable[Completion]:
        return (self._completion([], usage_body(self._generation)),) if self._with_usage else ()

    def _completion(
        self, choices: list[CompletionChoice], usage: UsageBody | UnsetType | None
    ) -> Completion:
        return Completion(
            self._generation.work.request_id, self._created, self._model, choices, usage
        )

    def _logprobs(self, positions: Sequence[Position]) -> CompletionLogprobs | None:
        return completion_logprobs(positions, self._spell) if self._with_logprobs else None
