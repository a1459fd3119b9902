"""Bodies that the API takes: OpenAI's names plus a few of vLLM's, by what happens to them.

    used       typed fields: they decide the text or its form
    hints      `HINTS`: labels and wishes that cannot change the text; any value is taken
    refused    `NEUTRAL`: what Forebay does not do; only the values that ask for nothing are taken
    unknown    everything else is refused by name, so that no misspelt field is ignored

docs/HTTP.md lists every field; a test compares that table with these classes.
"""

from typing import Any, TypeVar

import msgspec

from forebay.frontend.errors import ApiError, bad_body

_NULL = msgspec.Raw(b"null")

HINTS = frozenset(
    {
        "annotations",
        "cache_control",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "provider_specific_fields",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "thinking_blocks",
        "user",
        "verbosity",
    }
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),  # of chat
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": ([], ["text"]),
    "prediction": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
    "image_url": (),
    "input_audio": (),
    "file": (),
}


class Whole(int):
    """A whole number, also where a JSON writer prints it as ``2.0``."""


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class StreamOptions(_Strict, kw_only=True):
    """``include_obfuscation`` pads events against readers on the way; without padding the text is the same."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(_Strict, kw_only=True):
    """The schema is kept to with and without ``strict``; ``name`` and ``description`` are labels."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(_Strict, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None
    regex: str | None = None


class _Taken(_Strict, kw_only=True):
    """Hints, and fields that only their neutral values may be given, of both endpoints."""

    allowed_token_ids: msgspec.Raw = _NULL
    bad_words: msgspec.Raw = _NULL
    best_of: msgspec.Raw = _NULL
    detokenize: msgspec.Raw = _NULL
    early_stopping: msgspec.Raw = _NULL
    include_stop_str_in_output: msgspec.Raw = _NULL
    length_penalty: msgspec.Raw = _NULL
    metadata: msgspec.Raw = _NULL
    prompt_cache_key: msgspec.Raw = _NULL
    prompt_cache_options: msgspec.Raw = _NULL
    prompt_cache_retention: msgspec.Raw = _NULL
    request_id: msgspec.Raw = _NULL
    return_token_ids: msgspec.Raw = _NULL
    return_tokens_as_token_ids: msgspec.Raw = _NULL
    safety_identifier: msgspec.Raw = _NULL
    service_tier: msgspec.Raw = _NULL
    spaces_between_special_tokens: msgspec.Raw = _NULL
    store: msgspec.Raw = _NULL
    truncate_prompt_tokens: msgspec.Raw = _NULL
    use_beam_search: msgspec.Raw = _NULL
    user: msgspec.Raw = _NULL
    verbosity: msgspec.Raw = _NULL


class _Sampling(_Taken, kw_only=True):
    """What both endpoints use. ``None`` = not given."""

    model: str
    cache_salt: str | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | int | None = None
    max_completion_tokens: Whole | None = None
    max_tokens: Whole | None = None
    min_p: float | None = None
    min_tokens: Whole | None = None
    n: Whole | None = None
    no_store: bool | None = None
    presence_penalty: float | None = None
    priority: Whole | None = None
    prompt_logprobs: Whole | None = None
    repetition_penalty: float | None = None
    response_format: ResponseFormat | None = None
    seed: Whole | None = None
    skip_special_tokens: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_logprobs: Whole | None = None
    top_p: float | None = None


class CompletionRequest(_Sampling, kw_only=True):
    prompt: str | list[str | int | list[int]]
    add_special_tokens: bool | None = None
    echo: bool | None = None
    suffix: msgspec.Raw = _NULL


class Part(_Strict, kw_only=True):
    """A part of a message's content: text, or what an assistant said instead of an answer."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: msgspec.Raw = _NULL
    cache_control: msgspec.Raw = _NULL
    file: msgspec.Raw = _NULL
    image_url: msgspec.Raw = _NULL
    input_audio: msgspec.Raw = _NULL


class ToolFunction(_Strict, kw_only=True):
    """``strict`` is how calls that are enforced are made anyway."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict, kw_only=True):
    type: str = "function"
    function: ToolFunction | None = None
    cache_control: msgspec.Raw = _NULL


class Function(msgspec.Struct, kw_only=True):
    """A call that an assistant made: ``arguments`` is JSON as text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """Also what else clients send back with a call (``index``, labels of other servers), which is not looked at."""

    function: Function
    id: str | None = None
    type: str | None = None


class Message(_Strict, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    function_call: Function | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    annotations: msgspec.Raw = _NULL
    audio: msgspec.Raw = _NULL
    cache_control: msgspec.Raw = _NULL
    provider_specific_fields: msgspec.Raw = _NULL
    thinking_blocks: msgspec.Raw = _NULL


class ChatRequest(_Sampling, kw_only=True):
    messages: list[Message]
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[Tool] | None = None
    audio: msgspec.Raw = _NULL
    echo: msgspec.Raw = _NULL
    function_call: msgspec.Raw = _NULL
    functions: msgspec.Raw = _NULL
    include_reasoning: msgspec.Raw = _NULL
    modalities: msgspec.Raw = _NULL
    prediction: msgspec.Raw = _NULL
    web_search_options: msgspec.Raw = _NULL


class TokenizeRequest(_Strict, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


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
        request = msgspec.json.decode(body, type=kind, dec_hook=_whole)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_body(error) from None
    refuse_unsupported(request)
    return request


def _whole(kind: type, value: object) -> Whole:
    assert kind is Whole
    if isinstance(value, int) and not isinstance(value, bool):
        return Whole(value)
    if isinstance(value, float) and value.is_integer():
        return Whole(int(value))
    got = {bool: "bool", str: "str", float: "float", list: "array", dict: "object"}
    raise ValueError(f"Expected `int`, got `{got[type(value)]}`")


def refuse_unsupported(value: object, where: str = "") -> None:
    """Raises ``ApiError`` (400) for a field of `NEUTRAL` that asks for something."""
    assert isinstance(value, msgspec.Struct)
    for name in value.__struct_fields__:
        raw = getattr(value, name)
        if not isinstance(raw, msgspec.Raw) or bytes(raw) == b"null":
            continue
        try:
            asked = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_body(error) from None
        neutral = NEUTRAL.get(name, ())
        if name not in HINTS and not any(
            asked == allowed and type(asked) is type(allowed) for allowed in neutral
        ):
            without = " or ".join(
                ["null", *(msgspec.json.encode(allowed).decode() for allowed in neutral)]
            )
            raise ApiError(
                400,
                f"{where}{name} is not supported; leave it out (or {without})",
                where + name,
                "unsupported_field",
            )
