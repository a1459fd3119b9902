"""Bodies that the API takes: OpenAI's names plus a few of vLLM's. Strict: nothing is accepted and ignored.

A field that is not here is refused by name. A field that OpenAI has and Forebay does not do is in `_Unsupported`: it may carry
the value that asks for nothing (null, [], ...), so that clients which always send it work, and is refused otherwise.
"""

from typing import Any, TypeVar

import msgspec

from forebay.core.sampling import MAX_LOGPROBS, SamplingParams
from forebay.frontend.errors import ApiError, bad_body

MAX_SALT_CHARS = 256
MAX_PRIORITY = 1 << 31
DEFAULT_COMPLETION_TOKENS = 16
_NULL = msgspec.Raw(b"null")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "metadata": ({},),
    "modalities": ([], ["text"]),
    "parallel_tool_calls": (True, False),  # says something about tools, and there are none
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "name": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "refusal": (),
    "annotations": ([],),
}


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class StreamOptions(_Strict, kw_only=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Unsupported(_Strict, kw_only=True):
    """Fields of both endpoints that only their neutral values may be given."""

    best_of: msgspec.Raw = _NULL
    include_stop_str_in_output: msgspec.Raw = _NULL
    metadata: msgspec.Raw = _NULL
    prompt_logprobs: msgspec.Raw = _NULL
    response_format: msgspec.Raw = _NULL
    service_tier: msgspec.Raw = _NULL
    store: msgspec.Raw = _NULL
    use_beam_search: msgspec.Raw = _NULL


class _Sampling(_Unsupported, kw_only=True):
    """What both endpoints take. ``None`` = not given. ``user`` is a name for the caller's own records."""

    model: str
    cache_salt: str | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    n: int | None = None
    no_store: bool | None = None
    presence_penalty: float | None = None
    priority: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    user: str | None = None


class CompletionRequest(_Sampling, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: msgspec.Raw = _NULL
    suffix: msgspec.Raw = _NULL


class TextPart(_Strict, kw_only=True):
    type: str
    text: str = ""
    image_url: msgspec.Raw = _NULL
    input_audio: msgspec.Raw = _NULL
    file: msgspec.Raw = _NULL


class Message(_Strict, kw_only=True):
    role: str
    content: str | list[TextPart] | None = None
    annotations: msgspec.Raw = _NULL
    audio: msgspec.Raw = _NULL
    function_call: msgspec.Raw = _NULL
    name: msgspec.Raw = _NULL
    refusal: msgspec.Raw = _NULL
    tool_call_id: msgspec.Raw = _NULL
    tool_calls: msgspec.Raw = _NULL


class ChatRequest(_Sampling, kw_only=True):
    messages: list[Message]
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    top_logprobs: int | None = None
    audio: msgspec.Raw = _NULL
    function_call: msgspec.Raw = _NULL
    functions: msgspec.Raw = _NULL
    modalities: msgspec.Raw = _NULL
    parallel_tool_calls: msgspec.Raw = _NULL
    prediction: msgspec.Raw = _NULL
    reasoning_effort: msgspec.Raw = _NULL
    tool_choice: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL
    verbosity: msgspec.Raw = _NULL
    web_search_options: msgspec.Raw = _NULL


class TokenizeRequest(_Strict, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(_Strict, kw_only=True):
    tokens: list[int]
    model: str | None = None


class FlushRequest(_Strict, kw_only=True):
    tiers: list[str] = msgspec.field(default_factory=lambda: ["device", "host"])
    timeout_s: float = 30.0


T = TypeVar("T")


def decode_body(body: bytes, kind: type[T]) -> T:
    """The request in ``body``. Raises ``ApiError`` (400) naming the field, what was given and what is allowed."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_body(error) from None
    refuse_unsupported(request)
    return request


def refuse_unsupported(value: object, where: str = "") -> None:
    """Raises ``ApiError`` (400) for a field of `_NEUTRAL` that asks for something."""
    assert isinstance(value, msgspec.Struct)
    for name in value.__struct_fields__:
        raw = getattr(value, name)
        if not isinstance(raw, msgspec.Raw) or bytes(raw) == b"null":
            continue
        try:
            asked = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_body(error) from None
        neutral = _NEUTRAL.get(name, ())
        if not any(asked == allowed and type(asked) is type(allowed) for allowed in neutral):
            without = " or ".join(
                ["null", *(msgspec.json.encode(allowed).decode() for allowed in neutral)]
            )
            raise ApiError(
                400,
                f"{where}{name} is not supported; leave it out (or {without})",
                where + name,
                "unsupported_field",
            )


def chat_messages(messages: list[Message]) -> list[dict[str, str]]:
    """Messages as chat templates take them: role and text. Raises ``ApiError`` (400)."""
    if not messages:
        raise ApiError(400, "messages is empty; at least one message is needed", "messages")
    return [
        {"role": _role(message, index), "content": _content(message, index)}
        for index, message in enumerate(messages)
    ]


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


def sampling_params(request: CompletionRequest | ChatRequest) -> SamplingParams:
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


def cache_salt(request: CompletionRequest | ChatRequest) -> bytes:
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


def priority(request: CompletionRequest | ChatRequest) -> int:
    """Raises ``ApiError`` (400) for a priority out of range."""
    value = request.priority or 0
    if not -MAX_PRIORITY <= value < MAX_PRIORITY:
        raise ApiError(
            400,
            f"priority is {value}; it must be between {-MAX_PRIORITY} and {MAX_PRIORITY - 1}",
            "priority",
        )
    return value


def wants_usage(request: CompletionRequest | ChatRequest) -> bool:
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
