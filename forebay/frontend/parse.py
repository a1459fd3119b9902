"""A body, once, to the checked and frozen value of what it asks for (`asked.Asked`)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from forebay.core.sampling import MAX_LOGPROBS, SamplingParams
from forebay.frontend.asked import (
    Asked,
    Conversation,
    PromptWish,
    Source,
    Texts,
    TokenLists,
    UsageWish,
)
from forebay.frontend.errors import ApiError
from forebay.frontend.limits import MAX_PROMPTS
from forebay.frontend.messages import template_messages
from forebay.frontend.parse_tools import parse_form, parse_tools
from forebay.frontend.protocol import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    Whole,
    decode_body,
)

MAX_SALT_CHARS = 256
MAX_PRIORITY = 1 << 31
MAX_TOKENS = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
# What a chat template is given anyway.
TEMPLATE_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})

T = TypeVar("T")
_NONE: Mapping[str, float] = MappingProxyType({})


def parse_completion(body: bytes, defaults: Mapping[str, float] = _NONE) -> Asked:
    """``defaults``: sampling fields of a request that does not have them. Raises ``ApiError`` (400)."""
    request = decode_body(body, CompletionRequest)
    source = _prompts(request.prompt, request.add_special_tokens is not False)
    return _asked(request, source, DEFAULT_COMPLETION_TOKENS, defaults)


def parse_chat(body: bytes, defaults: Mapping[str, float] = _NONE) -> Asked:
    """As `parse_completion`. Raises ``ApiError`` (400)."""
    request = decode_body(body, ChatRequest)
    return _asked(request, _conversation(request), None, defaults)


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
        return _conversation(request)
    assert request.prompt is not None
    for name, value in (
        ("add_generation_prompt", request.add_generation_prompt),
        ("chat_template_kwargs", request.chat_template_kwargs),
        ("continue_final_message", request.continue_final_message),
    ):
        if value is not None:
            raise ApiError(400, f"{name} goes with messages", name)
    return Texts((request.prompt,), request.add_special_tokens is not False)


def _conversation(request: ChatRequest | TokenizeRequest) -> Conversation:
    messages = template_messages(request.messages or [])
    variables = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort if isinstance(request, ChatRequest) else None
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    for name in TEMPLATE_NAMES & variables.keys():
        field = f"chat_template_kwargs.{name}"
        raise ApiError(400, f"{field} is not the caller's to set; remove it", field)
    continues = bool(request.continue_final_message)
    asked = request.add_generation_prompt
    generates = not continues if asked is None else asked
    if continues and generates:
        message = "continue_final_message goes without add_generation_prompt; give one of them"
        raise ApiError(400, message, "continue_final_message")
    if continues and messages[-1]["role"] != "assistant":
        message = "continue_final_message needs a last message of the assistant"
        raise ApiError(400, message, "continue_final_message")
    return Conversation(messages, generates, continues, variables)


def _asked(
    request: CompletionRequest | ChatRequest,
    source: Source,
    default_tokens: int | None,
    defaults: Mapping[str, float],
) -> Asked:
    return Asked(
        source=source,
        params=_sampling_params(request, defaults),
        model=request.model,
        default_tokens=default_tokens,
        salt=_cache_salt(request),
        no_store=bool(request.no_store),
        priority=_priority(request),
        streamed=bool(request.stream),
        usage=_usage_wish(request),
        tools=parse_tools(request) if isinstance(request, ChatRequest) else None,
        form=parse_form(request),
        prompt=_prompt_wish(request),
    )


def _prompts(prompt: str | list[str | int | list[int]], add_special: bool) -> Source:
    """Text, texts, tokens or lists of tokens. Raises ``ApiError`` for a mixture, none or too many."""
    if isinstance(prompt, str):
        return Texts((prompt,), add_special)
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
        return Texts(tuple(texts), add_special)
    if lists := _all_of(prompt, list):
        return TokenLists(tuple(lists))
    raise ApiError(400, "prompt mixes texts and token ids; allowed: one kind of them", "prompt")


def _all_of(items: Sequence[object], kind: type[T]) -> list[T]:
    found = [item for item in items if isinstance(item, kind)]
    return found if len(found) == len(items) else []


def _sampling_params(
    request: CompletionRequest | ChatRequest, defaults: Mapping[str, float]
) -> SamplingParams:
    """Raises ``ApiError`` (400) for a value out of range. ``max_tokens`` is what was asked, or None."""
    given: dict[str, Any] = dict(defaults) | {
        name: _plain(value)
        for name in SamplingParams.__struct_fields__
        if name not in ("max_tokens", "logprobs", "prompt_logprobs", "grammar")
        and (value := getattr(request, name)) is not None
    }
    try:
        return SamplingParams(
            max_tokens=_max_tokens(request),
            logprobs=_logprobs(request),
            prompt_logprobs=_prompt_logprobs(request),
            **given,
        )
    except ValueError as error:
        first = str(error).split()[0]
        raise ApiError(
            400,
            str(error),
            first if first in SamplingParams.__struct_fields__ else "stop",
            "invalid_value",
        ) from None


def _plain(value: Any) -> Any:
    """Without `Whole`, which ends here."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return int(value) if isinstance(value, Whole) else value


def _max_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    """Either spelling on either endpoint. A cap above what a number can be here is a cap all the same."""
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        message = f"max_tokens is {older} and max_completion_tokens {newer}; give one of them"
        raise ApiError(400, message, "max_completion_tokens")
    asked = older if newer is None else newer
    if _asks_for_nothing(request):
        return 1  # which is not shown
    return None if asked is None else int(min(asked, MAX_TOKENS))


def _logprobs(request: CompletionRequest | ChatRequest) -> int | None:
    """Alternatives beside each token's own log-probability; None for none. Either endpoint's spelling: a number, or true with
    ``top_logprobs``."""
    asked, top = request.logprobs, request.top_logprobs
    if asked is None or asked is False:
        if top:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        return None
    if asked is not True:
        return asked if top is None else max(asked, int(top))
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise ApiError(
            400, f"top_logprobs is {top}; it must be between 0 and {MAX_LOGPROBS}", "top_logprobs"
        )
    return int(top or 0)


def _prompt_logprobs(request: CompletionRequest | ChatRequest) -> int | None:
    """What must be known of the prompt's tokens: what was asked by name, and with an echo what is asked of the output's."""
    asked = None if request.prompt_logprobs is None else int(request.prompt_logprobs)
    echoed = _logprobs(request) if _echoes(request) else None
    wanted = [count for count in (asked, echoed) if count is not None]
    return min(wanted) if min(wanted, default=0) < 0 else max(wanted, default=None)


def _prompt_wish(request: CompletionRequest | ChatRequest) -> PromptWish:
    """Raises ``ApiError`` (400) for a stream that would have to begin with scores."""
    echo, scores = _echoes(request), request.prompt_logprobs is not None
    wants_scores = "prompt_logprobs" if scores else "logprobs with echo"
    if request.stream and (scores or (echo and _logprobs(request) is not None)):
        message = f"{wants_scores} cannot be streamed; leave out one of them"
        raise ApiError(400, message, "prompt_logprobs" if scores else "echo")
    alone = _asks_for_nothing(request)
    if request.stream and alone:
        raise ApiError(400, "max_tokens is 0, so there is nothing to stream", "stream")
    return PromptWish(echo, scores, alone)


def _echoes(request: CompletionRequest | ChatRequest) -> bool:
    return isinstance(request, CompletionRequest) and bool(request.echo)


def _asks_for_nothing(request: CompletionRequest | ChatRequest) -> bool:
    """``max_tokens: 0``: the prompt alone is of interest, where it comes back."""
    caps = (request.max_tokens, request.max_completion_tokens)
    shows_prompt = _echoes(request) or request.prompt_logprobs is not None
    return shows_prompt and 0 in caps


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
    value = int(request.priority or 0)
    if not -MAX_PRIORITY <= value < MAX_PRIORITY:
        raise ApiError(
            400,
            f"priority is {value}; it must be between {-MAX_PRIORITY} and {MAX_PRIORITY - 1}",
            "priority",
        )
    return value


def _usage_wish(request: CompletionRequest | ChatRequest) -> UsageWish:
    """Raises ``ApiError`` (400) where nothing is streamed."""
    options = request.stream_options
    if options is None:
        return UsageWish.NONE
    if not request.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if options.continuous_usage_stats and options.include_usage is not False:
        return UsageWish.ALWAYS
    return UsageWish.LAST if options.include_usage else UsageWish.NONE
