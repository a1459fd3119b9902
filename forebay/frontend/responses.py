"""Bodies that the API gives back, as OpenAI's clients read them. `null` stands where OpenAI has it."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from forebay.frontend.generation import Generation
from forebay.frontend.sequence import Position

Spell = Callable[[int], str]


class PromptDetails(msgspec.Struct):
    """``cached_tokens`` is the sum of the others: prompt tokens whose KV was there already, by tier."""

    cached_tokens: int
    cached_device: int
    cached_host: int
    cached_store: int


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "text_completion"


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Chat(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: str = "chat.completion"


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "chat.completion.chunk"


def usage_body(generation: Generation) -> UsageBody:
    cached = generation.cached
    device, host, store = cached.cached_device, cached.cached_host, cached.cached_store
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    details = PromptDetails(device + host + store, device, host, store)
    return UsageBody(prompt, completion, prompt + completion, details)


def completion_logprobs(positions: Sequence[Position], spell: Spell) -> CompletionLogprobs:
    """The chosen token is among ``top_logprobs`` even where it is not among the most likely, as OpenAI has it."""
    tops: list[dict[str, float]] = []
    for position in positions:
        top: dict[str, float] = {}
        for token, value in zip(position.logprobs.top_ids, position.logprobs.top, strict=True):
            top.setdefault(spell(token), value)  # two ids may read alike: the likelier one stays
        top.setdefault(spell(position.token), position.logprobs.chosen)
        tops.append(top)
    return CompletionLogprobs(
        text_offset=[position.offset for position in positions],
        token_logprobs=[position.logprobs.chosen for position in positions],
        tokens=[spell(position.token) for position in positions],
        top_logprobs=tops,
    )


def chat_logprobs(positions: Sequence[Position], spell: Spell) -> ChatLogprobs:
    content = []
    for position in positions:
        top = [
            TopLogprob(spell(token), value, _utf8(spell(token)))
            for token, value in zip(position.logprobs.top_ids, position.logprobs.top, strict=True)
        ]
        text = spell(position.token)
        content.append(TokenLogprob(text, position.logprobs.chosen, _utf8(text), top))
    return ChatLogprobs(content)


def _utf8(text: str) -> list[int] | None:
    """None for a token that is only a part of a character: its text does not tell its bytes."""
    return None if "\ufffd" in text else list(text.encode())


def json_body(value: Any) -> bytes:
    return msgspec.json.encode(value)
