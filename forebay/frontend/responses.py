"""Bodies that the API gives back, as OpenAI's clients read them. `null` stands where OpenAI has it."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from forebay.core.messages import TokenLogprobs
from forebay.frontend.generation import Generation
from forebay.frontend.sequence import Position
from forebay.frontend.tools import CallArguments, CallStart, Content, Piece, Reasoning
from forebay.models.spelling import Spelling


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
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def __add__(self, more: "CompletionLogprobs") -> "CompletionLogprobs":
        return CompletionLogprobs(
            self.text_offset + more.text_offset,
            self.token_logprobs + more.token_logprobs,
            self.tokens + more.tokens,
            self.top_logprobs + more.top_logprobs,
        )


class RankedLogprob(msgspec.Struct):
    """``rank``: 1 for the most likely; None for a given token beyond those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


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
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "chat.completion.chunk"


def usage_body(generation: Generation, only_prompt: bool = False) -> UsageBody:
    """``only_prompt``: nothing was to be generated, so what was to get at the prompt's scores counts for nothing."""
    cached = generation.cached
    device, host, store = cached.cached_device, cached.cached_host, cached.cached_store
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    if only_prompt:
        completion = 0
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


def completion_logprobs(
    positions: Sequence[Position], spelling: Spelling, shift: int = 0
) -> CompletionLogprobs:
    """``shift``: characters before the positions' text, of a prompt that is echoed. Joined, the tokens are the text."""
    return CompletionLogprobs(
        text_offset=[position.offset + shift for position in positions],
        token_logprobs=[
            None if position.logprobs is None else position.logprobs.chosen
            for position in positions
        ],
        tokens=[position.text for position in positions],
        top_logprobs=[_top_by_text(position, spelling) for position in positions],
    )


def _top_by_text(position: Position, spelling: Spelling) -> dict[str, float] | None:
    """As many entries as were asked for, and the chosen token even where it is not among the most likely, as OpenAI has it.

    The chosen token is spelled as in the text; of others that read alike, all but the first are named by their id.
    """
    found = position.logprobs
    if found is None:
        return None
    top: dict[str, float] = {}
    for token, value in zip(found.top_ids, found.top, strict=True):
        text = position.text if token == position.token else spelling.alone(token)
        is_taken = text in top or (text == position.text and token != position.token)
        top[f"token_id:{token}" if is_taken else text] = value
    top.setdefault(position.text, found.chosen)
    return top


def chat_logprobs(positions: Sequence[Position], spelling: Spelling) -> ChatLogprobs:
    """Joined, the tokens are the text, and their bytes are its bytes."""
    content = []
    for position in positions:
        found = position.logprobs
        assert found is not None
        top = [
            TopLogprob(spelling.alone(token), value, list(spelling.token_bytes(token)))
            for token, value in zip(found.top_ids, found.top, strict=True)
        ]
        raw = spelling.bytes_in(position.token, position.text)
        content.append(TokenLogprob(position.text, found.chosen, list(raw), top))
    return ChatLogprobs(content)


def prompt_logprobs(positions: Sequence[Position], spelling: Spelling) -> PromptLogprobs:
    """As vLLM words them: for each token of the prompt the tokens that were thought of, by id; nothing for the first."""
    return [
        None if position.logprobs is None else _by_id(position, position.logprobs, spelling)
        for position in positions
    ]


def _by_id(
    position: Position, found: TokenLogprobs, spelling: Spelling
) -> dict[str, RankedLogprob]:
    ranked = {
        str(token): RankedLogprob(value, rank, spelling.alone(token))
        for rank, (token, value) in enumerate(zip(found.top_ids, found.top, strict=True), start=1)
    }
    own = RankedLogprob(found.chosen, None, position.text)
    ranked.setdefault(str(position.token), own)
    return ranked


def json_body(value: Any) -> bytes:
    return msgspec.json.encode(value)
