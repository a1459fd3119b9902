"""Text to token ids and back, and the chat template, from a model directory's tokenizer files."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram

from forebay.models.byte_alphabet import byte_alphabet
from forebay.models.chat_template import (
    DEADLINE_S,
    ChatTemplate,
    TemplateError,
    read_templates,
)
from forebay.models.control_tokens import ControlTokens
from forebay.models.end_tokens import END_TOKENS
from forebay.models.errors import ModelError
from forebay.models.special_tokens import SpecialTokens

__all__ = ["TemplateError", "Tokenizer"]

# The library remembers how it split words of up to 255 characters, by default 10,000 of them: tens of MiB where words are long, as in
# text without spaces, and no faster than these (docs/LOG.md).
CACHED_WORDS = 2000
_NONE: Mapping[str, Any] = MappingProxyType({})
_BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}


class Tokenizer:
    """`tokenizer.json` with the special tokens and chat template of `tokenizer_config.json`. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError when the directory `path` has no readable tokenizer."""
        self.path = Path(path)
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{file}: no such file; a model directory needs it; convert the tokenizer or check the path"
            )
        try:
            self._backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for every kind of damage
            raise ModelError(f"{file}: not a tokenizer ({error}); fetch the model again") from None
        if isinstance(self._backend.model, BPE | Unigram):
            self._backend.model._resize_cache(CACHED_WORDS)
        self._backend.no_padding()
        self._backend.no_truncation()
        settings = _read_settings(self.path / "tokenizer_config.json")
        self.warnings: tuple[str, ...] = tuple(map(str, settings.get("warnings") or ()))
        special_map = _read_settings(self.path / "special_tokens_map.json")
        special = SpecialTokens.read(settings, special_map)
        try:
            special.apply(self._backend)
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{self.path / 'tokenizer_config.json'}: its special tokens cannot be read "
                f"({error}); fetch the model again"
            ) from None
        self._names = special.named()
        self.bos_token = self._names.get("bos_token")
        self.eos_token = self._names.get("eos_token")
        self.chat_templates = read_templates(self.path, settings)
        self._compiled: dict[str, ChatTemplate] = {}
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        decoder = (
            json.loads(self._backend.to_str())["decoder"]
            if self._backend.decoder is not None
            else None
        )
        self._control = ControlTokens(self._backend)
        self.is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"

    @property
    def chat_template(self) -> str | None:
        """The usual template's text."""
        return self.chat_templates.get("default")

    @property
    def bos_id(self) -> int | None:
        return None if self.bos_token is None else self._backend.token_to_id(self.bos_token)

    @property
    def eos_id(self) -> int | None:
        return None if self.eos_token is None else self._backend.token_to_id(self.eos_token)

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """Special tokens that are known to end a turn and that the chat template writes. A model's
        configuration often declares the end of a text alone.
        """
        templates = "".join(self.chat_templates.values())
        return tuple(
            index
            for token, index in self.special_tokens.items()
            if token in END_TOKENS and token in templates
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; the model's output may be wider."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelled out in it count as such. `add_special` adds what the model starts with."""
        # The batch call releases the GIL, the single one does not: a long text must not stop a server's other threads.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of one id, None outside the vocabulary."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Id of a vocabulary entry, None when there is none."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id adds to the text of a byte-level tokenizer; empty outside the vocabulary."""
        assert self.is_byte_level
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token, spelled in plain text
            return token.encode()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] = _NONE,
        parse_special: bool = False,
        continue_final: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> tuple[str, list[int]]:
        """Text and ids of the prompt that the template makes of a conversation.

        Control tokens that a message or a variable spells are text, unless `parse_special`.
        `continue_final`: the prompt ends where the last message's content does. `variables` are the
        template's own (`tools`, ...). Raises TemplateError.
        """

        def render(protect: Callable[[Any], Any]) -> str:
            said = protect(messages)
            end = f" x{secrets.token_hex(8)}x "
            if continue_final:
                said = [*said[:-1], {**said[-1], "content": said[-1]["content"] + end}]
            text = self.apply_chat_template(
                said, add_generation_prompt, variables=protect(variables), deadline_s=deadline_s
            )
            text = _up_to(text, end) if continue_final else text
            _check_unicode(text)
            return text

        if not parse_special and self._control.are_in([*messages, variables]):
            return self._control.encode(render)
        text = render(lambda value: value)
        return text, self.encode(text, add_special=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] = _NONE,
        deadline_s: float = DEADLINE_S,
    ) -> str:
        """The prompt text of a conversation; `encode_chat` encodes it too.

        Raises TemplateError when the model has no chat template, or it makes no prompt of these
        messages in time.
        """
        template = self._template(bool(variables.get("tools")))
        values: dict[str, Any] = {
            **self._names,
            **variables,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        return template.render(values, deadline_s)

    def _template(self, with_tools: bool) -> ChatTemplate:
        name = "tool_use" if with_tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            named = ", ".join(map(repr, sorted(self.chat_templates)))
            raise TemplateError(
                f"the model has chat templates named {named} and none named 'default'"
                if named
                else "the model has no chat template; allowed: plain completions; use an instruct "
                "model for chat"
            )
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self.chat_templates[name])
        return self._compiled[name]


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateError(
            f"the conversation is no Unicode text (a lone surrogate at character {error.start})"
        ) from None


def _up_to(text: str, end: str) -> str:
    """`text` before `end`, which a template may have stripped with what it belongs to."""
    at = text.rfind(end)
    if at >= 0:
        return text[:at]
    at = text.rfind(end.strip())
    if at < 0:
        raise TemplateError(
            "the chat template leaves the last message out, so that nothing can go on from it"
        )
    return text[:at].rstrip()


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(
            f"{path}: cannot be read as JSON ({error}); fetch the model again"
        ) from None
    if not isinstance(settings, dict):
        raise ModelError(f"{path}: expected a JSON object; fetch the model again")
    return settings
