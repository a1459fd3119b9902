"""`POST /v1/chat/completions`: the next message of a conversation, through the model's chat template."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from forebay.frontend.answer import answer
from forebay.frontend.asked import Asked, UsageWish
from forebay.frontend.generation import Generation, collect
from forebay.frontend.limits import read_body
from forebay.frontend.parse import parse_chat
from forebay.frontend.responses import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    UsageBody,
    chat_delta,
    chat_logprobs,
    chat_message,
    prompt_logprobs,
    usage_body,
)
from forebay.frontend.sequence import Delta, Position
from forebay.frontend.service import Service


async def chat_completions(service: Service, request: Request) -> Response:
    """Raises what `errors` knows an answer to."""
    with service.counting_refusals():
        body = await read_body(request, service.body_bytes_max)
        asked = parse_chat(body, service.model.sampling)
        generation = await service.generate(request, asked, "chatcmpl")
    wording = _Wording(service, generation, asked)
    heartbeat_s = service.settings.stream_heartbeat_s
    return await answer(request, generation, wording, asked.streamed, heartbeat_s)


class _Wording:
    """A Generation in the words of this endpoint, whole or in chunks."""

    def __init__(self, service: Service, generation: Generation, asked: Asked) -> None:
        self._generation = generation
        self._spelling = service.model.spelling
        self._prompt = asked.prompt
        self._with_logprobs = generation.work.params.logprobs is not None
        self._usage = asked.usage
        self._created = int(time.time())
        self._model = asked.model or service.model.name
        (prompt,) = generation.work.prompts
        self._readers = [
            service.dialect.reader(replace(asked, params=generation.work.params), prompt.text)
            for _ in generation.sequences
        ]

    async def whole(self) -> Chat:
        choices = []
        for index, result in enumerate(await collect(self._generation)):
            part = self._readers[index].read(Delta(result.text, finish=result.finish))
            choices.append(
                ChatChoice(
                    index,
                    chat_message(part.pieces),
                    self._logprobs(result.positions),
                    part.finish,
                    result.stop_reason,
                )
            )
        request_id = self._generation.work.request_id
        chat = Chat(request_id, self._created, self._model, choices, usage_body(self._generation))
        if self._prompt.scores:
            positions = self._generation.prompt_positions(0)
            chat.prompt_logprobs = prompt_logprobs(positions, self._spelling)
        if self._prompt.alone:
            chat.usage = usage_body(self._generation, only_prompt=True)
            for choice in choices:
                choice.message.content, choice.logprobs, choice.finish_reason = "", None, "length"
        return chat

    def opening(self) -> Iterable[ChatChunk]:
        for index in range(len(self._generation.sequences)):
            yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))

    def delta(self, index: int, delta: Delta) -> Iterable[ChatChunk]:
        part = self._readers[index].read(delta)
        deltas = [chat_delta(piece) for piece in part.pieces]
        if delta.positions and not deltas:
            deltas = [ChatDelta(content="")]
        positions = delta.positions
        for said in deltas:
            yield self._chunk(ChatChunkChoice(index, said, self._logprobs(positions)))
            positions = ()
        if part.finish is not None:
            yield self._chunk(
                ChatChunkChoice(index, ChatDelta(), None, part.finish, delta.stop_reason)
            )

    def closing(self) -> Iterable[ChatChunk]:
        return () if self._usage is UsageWish.NONE else (self._usage_chunk(),)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        usage: UsageBody | UnsetType | None = UNSET if self._usage is UsageWish.NONE else None
        if self._usage is UsageWish.ALWAYS:
            usage = usage_body(self._generation)
        return ChatChunk(
            self._generation.work.request_id, self._created, self._model, [choice], usage
        )

    def _usage_chunk(self) -> ChatChunk:
        return ChatChunk(
            self._generation.work.request_id,
            self._created,
            self._model,
            [],
            usage_body(self._generation),
        )

    def _logprobs(self, positions: Sequence[Position]) -> ChatLogprobs | None:
        return chat_logprobs(positions, self._spelling) if self._with_logprobs else None
