"""Bodies that the API takes: OpenAI's names plus a few of vLLM's. Strict: nothing is accepted and ignored.

A field that is not here is refused by name. A field that OpenAI has and Forebay does not do is in `_Unsupported`: it may carry
the value that asks for nothing (null, [], ...), so that clients which always send it work, and is refused otherwise.
"""

from typing import Any, TypeVar

import msgspec

from forebay.frontend.errors import ApiError, bad_body

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
