"""From what was asked to what the engine is told: the one place that fits a request to its model and its server.

Used by the server and the offline `LLM` alike. Sans-IO.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.core.messages import Snapshot
from forebay.core.sampling import SamplingParams
from forebay.frontend.asked import Asked
from forebay.frontend.prompts import Prompt, PromptTooLong, RequestError
from forebay.settings import Settings


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may have. ``context``: prompt and output in tokens; ``room``: tokens that all of L1 holds, or the context
    where that is less; ``places``: sequences that can run or wait; ``strict``: ``max_tokens`` that do not fit are an error."""

    context: int
    vocab_size: int
    room: int
    places: int
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """What one API request asks of the engine, every default filled in. ``max_tokens``: one for each prompt."""

    request_id: str
    prompts: tuple[Prompt, ...]
    max_tokens: tuple[int, ...]
    params: SamplingParams
    salt: bytes = b""
    no_store: bool = False
    priority: int = 0


def bounds(context: int, vocab_size: int, snapshot: Snapshot | None, settings: Settings) -> Bounds:
    pages = snapshot.device.capacity if snapshot is not None else 0
    room = min(context, pages * settings.page_size) if pages else context
    places = settings.max_running + settings.max_waiting
    return Bounds(context, vocab_size, room, places, settings.strict_max_tokens)


def assemble(asked: Asked, prompts: Sequence[Prompt], bounds: Bounds, prefix: str) -> Work:
    """``prefix``: what request ids of this caller begin with.

    Raises ``PromptTooLong``, and ``RequestError`` for a value that this model or server cannot serve.
    """
    params = asked.params
    check_token_ids(params, bounds.vocab_size)
    limits = tuple(_fit_max_tokens(asked, len(prompt.tokens), bounds) for prompt in prompts)
    if params.min_tokens > min(limits):
        message = (
            f"min_tokens is {params.min_tokens}; at most {min(limits)} tokens are generated here"
        )
        raise RequestError(message, "min_tokens")
    check_sequences(len(prompts), params.n, bounds.places)
    return Work(
        request_id=f"{prefix}-{secrets.token_hex(12)}",
        prompts=tuple(prompts),
        max_tokens=limits,
        params=params,
        salt=asked.salt,
        no_store=asked.no_store,
        priority=asked.priority,
    )


def check_sequences(prompts: int, n: int, places: int) -> None:
    """Raises ``RequestError`` for more sequences at once than there can ever be room for."""
    if prompts * n > places:
        message = (
            f"{prompts} prompt(s) with n = {n} are {prompts * n} sequences; "
            f"at most {places} can run or wait"
        )
        raise RequestError(message, "n")


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises ``RequestError`` for a stop token or bias outside the vocabulary."""
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(params.logit_bias)),
    ):
        for bad in (token for token in ids if not 0 <= token < vocab_size):
            message = f"{name} has the token id {bad}; the model's ids are 0 to {vocab_size - 1}"
            raise RequestError(message, name)


def _fit_max_tokens(asked: Asked, prompt_tokens: int, bounds: Bounds) -> int:
    """``max_tokens`` for a prompt: what was asked, else the default, or all that fits; a cap, so it is cut to the room there is.

    Raises ``PromptTooLong`` if the prompt leaves no room, or, where bounds are strict, less than was asked.
    """
    wanted, room = asked.params.max_tokens, bounds.room
    if bounds.strict and wanted is not None and prompt_tokens + wanted > room:
        raise PromptTooLong(
            f"prompt ({prompt_tokens} tokens) and max_tokens ({wanted}) are "
            f"{prompt_tokens + wanted} tokens together; at most {room} fit; "
            "shorten the prompt or lower max_tokens"
        )
    if prompt_tokens >= room:
        raise PromptTooLong(
            f"the prompt has {prompt_tokens} tokens; at most {room - 1} fit; shorten it"
        )
    cap = asked.default_tokens if wanted is None else wanted
    return room - prompt_tokens if cap is None else min(cap, room - prompt_tokens)
