"""A body, once, to the checked and frozen value of what it asks for (`asked.Asked`)."""

from collections.abc import Sequence
from typing import TypeVar

from forebay.core.sampling import MAX_LOGPROBS, SamplingParams
from forebay.frontend.asked import Asked, Conversation, Source, Texts, TokenLists
from forebay.frontend.errors import ApiError
from forebay.frontend.limits import MAX_PROMPTS
from forebay.frontend.protocol import (
    ChatRequest,
    CompletionRequest,
    Message,
    TokenizeRequest,
    decode_body,
    refuse_unsupported,
)

MAX_SALT_CHARS = 256
MAX_PRIORITY = 1 << 31
DEFAULT_COMPLETION_TOKENS = 16

T = TypeVar("T")


def parse_completion(body: bytes) -> Asked:
    """Raises ``ApiError`` (400)."""
    request = decode_body(body, CompletionRequest)
    return _asked(request, _prompts(request.prompt), DEFAULT_COMPLETION_TOKENS)


def parse_chat(body: bytes) -> Asked:
    """Raises ``ApiError`` (400)."""
    request = decode_body(body, ChatRequest)
    return _asked(request, Conversation(_messages(request.messages)), None)


def parse_tokenize(body: bytes) -> tuple[Source, str | None]:
    """What is to be tokenised, and the model that was named. Raises ``ApiError`` (400)."""
    request = decode_body(body, TokenizeRequest)
    return _tokenize_source(request), request.model


def _tokenize_source(request: TokenizeRequest) -> Source:
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if request.messages is not None:
        if request.add_special_tokens is not None:
            raise ApiError(
                400, "add_special_tokens goes with prompt, not with messages", "add_special_tokens"
            )
        return Conversation(_messages(request.messages), request.add_generation_prompt is not False)
    assert request.prompt is not None
    if request.add_generation_prompt is not None:
        raise ApiError(400, "add_generation_prompt goes with messages", "add_generation_prompt")
    return Texts((request.prompt,), request.add_special_tokens is not False)


def _asked(
    request: CompletionRequest | ChatRequest, source: Source, default_tokens: int | None
) -> Asked:
    return Asked(
        source=source,
        params=_sampling_params(request),
        model=request.model,
        default_tokens=default_tokens,
        salt=_cache_salt(request),
        no_store=bool(request.no_store),
        priority=_priority(request),
        streamed=bool(request.stream),
        with_usage=_wants_usage(request),
    )


def _prompts(prompt: str | list[str | int | list[int]]) -> Source:
    """Text, texts, tokens or lists of tokens. Raises ``ApiError`` for a mixture, none or too many."""
    if isinstance(prompt, str):
        return Texts((prompt,))
    if not prompt:
        raise ApiError(
            400,
            "the prompt is empty; allowed: text, texts, token ids, or lists of token ids",
            "prompt",
        )
    if tokens := _all_of(prompt, int):
        return TokenLists((tokens,))
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(
            400, f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are allowed", "prompt"
        )
    if texts := _all_of(prompt, str):
        return Texts(tuple(texts))
    if lists := _all_of(prompt, list):
        return TokenLists(tuple(lists))
    raise ApiError(400, "prompt mixes texts and token ids; allowed: one kind of them", "prompt")


def _all_of(items: Sequence[object], kind: type[T]) -> list[T]:
    found = [item for item in items if isinstance(item, kind)]
    return found if len(found) == len(items) else []


def _messages(messages: list[Message]) -> tuple[dict[str, str], ...]:
    """Messages as chat templates take them: role and text. Raises ``ApiError`` (400)."""
    if not messages:
        raise ApiError(400, "messages is empty; at least one message is needed", "messages")
    return tuple(
        {"role": _role(message, index), "content": _content(message, index)}
        for index, message in enumerate(messages)
    )


def _role(message: Message, index: int) -> str:
    refuse_unsupported(message, f"messages[{index}].")
    if (
        message.role == "developer"
    ):  # OpenAI's newer word for the same thing; chat templates know the old one
        return "system"
    if message.role not in ("system", "user", "assistant"):
        raise ApiError(
            400,
            f"messages[{index}].role is {message.role!r}; allowed: system, developer, user, assistant",
            f"messages[{index}].role",
        )
    return message.role


def _content(message: Message, index: int) -> str:
    where = f"messages[{index}].content"
    if message.content is None:
        raise ApiError(400, f"{where} is missing; allowed: text or a list of text parts", where)
    if isinstance(message.content, str):
        return message.content
    for number, part in enumerate(message.content):
        if part.type != "text":
            raise ApiError(
                400,
                f"{where}[{number}].type is {part.type!r}; allowed: 'text'",
                f"{where}[{number}].type",
            )
        refuse_unsupported(part, f"{where}[{number}].")
    return "".join(part.text for part in message.content)


def _sampling_params(request: CompletionRequest | ChatRequest) -> SamplingParams:
    """Raises ``ApiError`` (400) for a value out of range. ``max_tokens`` is what was asked, or None."""
    given = {
        name: value
        for name in SamplingParams.__struct_fields__
        if name not in ("max_tokens", "logprobs") and (value := getattr(request, name)) is not None
    }
    try:
        return SamplingParams(max_tokens=_max_tokens(request), logprobs=_logprobs(request), **given)
    except ValueError as error:
        first = str(error).split()[0]
        raise ApiError(
            400,
            str(error),
            first if first in SamplingParams.__struct_fields__ else "stop",
            "invalid_value",
        ) from None


def _max_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    newer = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    if newer is not None and request.max_tokens is not None and newer != request.max_tokens:
        message = f"max_tokens is {request.max_tokens} and max_completion_tokens {newer}; give one of them"
        raise ApiError(400, message, "max_completion_tokens")
    return request.max_tokens if newer is None else newer


def _logprobs(request: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    top = request.top_logprobs
    if top is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise ApiError(
            400, f"top_logprobs is {top}; it must be between 0 and {MAX_LOGPROBS}", "top_logprobs"
        )
    return (top or 0) if request.logprobs else None


def _cache_salt(request: CompletionRequest | ChatRequest) -> bytes:
    """Raises ``ApiError`` (400) for a salt that is empty or too long."""
    if request.cache_salt is None:
        return b""
    if not 0 < len(request.cache_salt) <= MAX_SALT_CHARS:
        raise ApiError(
            400,
            f"cache_salt has {len(request.cache_salt)} characters; 1 to {MAX_SALT_CHARS} are allowed",
            "cache_salt",
        )
    return request.cache_salt.encode()


def _priority(request: CompletionRequest | ChatRequest) -> int:
    """Raises ``ApiError`` (400) for a priority out of range."""
    value = request.priority or 0
    if not -MAX_PRIORITY <= value < MAX_PRIORITY:
        raise ApiError(
            400,
            f"priority is {value}; it must be between {-MAX_PRIORITY} and {MAX_PRIORITY - 1}",
            "priority",
        )
    return value


def _wants_usage(request: CompletionRequest | ChatRequest) -> bool:
    """Whether a stream ends with a usage chunk. Raises ``ApiError`` (400) where nothing is streamed."""
    if request.stream_options is None:
        return False
    if not request.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if request.stream_options.include_obfuscation:
        raise ApiError(
            400,
            "stream_options.include_obfuscation is not supported; leave it out (or false)",
            "stream_options",
        )
    return request.stream_options.include_usage
