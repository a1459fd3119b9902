"""Text to prompt tokens, with a bound before the work and off the event loop when the work is long.

What a prompt may cost is limited in two steps: characters first (a longer text cannot fit the context, so it is not even
tokenised), tokens afterwards. Long texts are encoded in threads of their own, which keeps the event loop free where the
tokenizer's core releases the GIL (its batch calls do, the single ones do not).
"""

import asyncio
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from forebay.frontend.asked import Conversation, Source, Texts, TokenLists
from forebay.models.chat_template import TemplateTimeout
from forebay.settings import MessageSpecialTokens

# No vocabulary in use has text tokens that are longer on average over a whole prompt; runs of blanks come closest.
MAX_CHARS_PER_TOKEN = 128
INLINE_CHARS = 8192
MESSAGE_CHARS = 32  # what a template puts around one, at least
THREADS = 2
TEMPLATE_S = 5.0
INLINE_TEMPLATE_S = 0.1  # that a template may hold up the event loop, once

T = TypeVar("T")


class Tokenizer(Protocol):
    """What the frontend needs of `models.tokenizer.Tokenizer`."""

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...
    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] = ...,
        parse_special: bool = False,
        continue_final: bool = False,
        deadline_s: float = ...,
    ) -> tuple[str, list[int]]: ...


class RequestError(ValueError):
    """A value that cannot be served; one line: what was given, what is allowed. ``field``: of the request that it came in."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class PromptError(RequestError):
    """A prompt that cannot be served."""

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message, field)


class PromptTooLong(PromptError):
    """More than the context holds."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is None where tokens were given."""

    tokens: list[int]
    text: str | None = None


class PromptEncoder:
    """``max_context`` in tokens, ``vocab_size`` bounds the ids that a caller may give."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_context: int,
        vocab_size: int,
        special_tokens: MessageSpecialTokens = MessageSpecialTokens.TEXT,
    ) -> None:
        self.tokenizer = tokenizer
        self._parse_special = special_tokens is MessageSpecialTokens.PARSE
        self._template_is_slow = False
        self.max_context = max_context
        self.vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    async def encode(self, source: Source) -> list[Prompt]:
        """Raises ``PromptError``, and whatever the chat template raises (`from_messages`)."""
        match source:
            case Conversation():
                return [await self.from_conversation(source)]
            case Texts(texts, add_special):
                return await self.from_texts(texts, add_special)
            case TokenLists(lists):
                return [self.from_tokens(tokens) for tokens in lists]

    async def from_text(self, text: str, add_special: bool = True) -> Prompt:
        """Raises ``PromptError``."""
        return (await self.from_texts([text], add_special))[0]

    async def from_texts(self, texts: Sequence[str], add_special: bool = True) -> list[Prompt]:
        """Raises ``PromptError`` for the first that cannot be served."""
        for text in texts:
            self._check_chars(len(text))
            if not text:
                raise PromptError("the prompt is empty; at least one character is needed")

        def encode() -> list[list[int]]:
            return [self.tokenizer.encode(text, add_special) for text in texts]

        encoded = await self._off_loop(sum(map(len, texts)), encode)
        return [self._checked(tokens, text) for tokens, text in zip(encoded, texts, strict=True)]

    async def from_conversation(self, talk: Conversation) -> Prompt:
        """Raises ``PromptError``, and whatever the chat template raises (`models.tokenizer.TemplateError`, `ModelError`)."""
        chars = sum(len(message["content"]) + MESSAGE_CHARS for message in talk.messages)
        chars += len(json.dumps(talk.variables.get("tools", [])))
        self._check_chars(chars, "messages")

        def encode(deadline_s: float) -> tuple[str, list[int]]:
            return self.tokenizer.encode_chat(
                talk.messages,
                talk.add_generation_prompt,
                variables=talk.variables,
                parse_special=self._parse_special,
                continue_final=talk.continue_final,
                deadline_s=deadline_s,
            )

        text, tokens = await self._rendered(chars, encode)
        return self._checked(tokens, text, "messages")

    def from_tokens(self, tokens: list[int]) -> Prompt:
        """Raises ``PromptError``."""
        return self._checked(tokens, None)

    def check_ids(self, tokens: Sequence[int], where: str, field: str = "prompt") -> None:
        """Raises ``PromptError`` if one is no token of the model."""
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            bad = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise PromptError(
                f"{where} has the token id {bad}; the model's ids are 0 to {self.vocab_size - 1}",
                field,
            )

    async def decode(self, tokens: Sequence[int]) -> str:
        """Raises ``PromptError`` for ids outside the vocabulary."""
        self.check_ids(tokens, "tokens", "tokens")
        return await self._off_loop(
            len(tokens), lambda: self.tokenizer.decode(tokens, skip_special=False)
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _rendered(
        self, chars: int, encode: Callable[[float], tuple[str, list[int]]]
    ) -> tuple[str, list[int]]:
        """By a template that may be slow, which nobody knows before it was once."""
        if chars <= INLINE_CHARS and not self._template_is_slow:
            try:
                return encode(INLINE_TEMPLATE_S)
            except TemplateTimeout:
                self._template_is_slow = True
        work = functools.partial(encode, TEMPLATE_S)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check_chars(self, chars: int, field: str = "prompt") -> None:
        if chars > self.max_context * MAX_CHARS_PER_TOKEN:
            limit = f"too many for a context of {self.max_context} tokens"
            raise PromptTooLong(f"the prompt has {chars} characters, {limit}; shorten it", field)

    def _checked(self, tokens: list[int], text: str | None, field: str = "prompt") -> Prompt:
        if not tokens:
            raise PromptError("the prompt is empty; at least one token is needed", field)
        if len(tokens) >= self.max_context:
            limit = f"the context holds {self.max_context}, output included"
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens and {limit}; shorten it", field
            )
        # Also for text: a tokenizer may know more tokens than the model has embeddings for.
        self.check_ids(tokens, "the prompt", field)
        return Prompt(tokens, text)
