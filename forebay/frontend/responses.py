"""Bodies that the API gives back, as OpenAI's clients read them. `null` stands where OpenAI has it."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from forebay.frontend.generation import Generation
from forebay.frontend.sequence import Position
from forebay.frontend.tools import CallArguments, CallStart, Content, Piece, Reasoning

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


class CallFunction(msgspec.Struct, omit_defaults=True):
    """In a stream the name comes once, with the call's first chunk."""

    arguments: str
    name: str | None = None


class Call(msgspec.Struct, omit_defaults=True):
    """``index`` only in a stream; ``id`` and ``type`` with a call's first chunk."""

    function: CallFunction
    id: str | None = None
    type: str | None = None
    index: int | None = None


class ChatMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[Call] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[Call] | None = None
    reasoning_content: str | None = None


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


def chat_message(pieces: Sequence[Piece]) -> ChatMessage:
    """A whole message. Its content is null where there are calls and nothing else was said."""
    content, reasoning = "", ""
    calls: list[Call] = []
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(_, name):
                calls.append(Call(CallFunction("", name), call_id(), "function"))
            case CallArguments(index, text):
                calls[index].function.arguments += text
    return ChatMessage(
        None if calls and not content else content,
        tool_calls=calls or msgspec.UNSET,
        reasoning_content=reasoning or msgspec.UNSET,
    )


def chat_delta(piece: Piece) -> ChatDelta:
    match piece:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text)
        case CallStart(index, name):
            start = Call(CallFunction("", name), call_id(), "function", index)
            return ChatDelta(tool_calls=[start])
        case CallArguments(index, text):
            return ChatDelta(tool_calls=[Call(CallFunction(text), index=index)])


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


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
