"""Text to token ids and back, and the chat template, from a model directory's tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram

from forebay.models.byte_alphabet import byte_alphabet
from forebay.models.errors import ModelError

# The library remembers how it split words of up to 255 characters, by default 10,000 of them: tens of MiB where words are long, as in
# text without spaces, and no faster than these (docs/LOG.md).
CACHED_WORDS = 2000
_BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}


class TemplateError(Exception):
    """The chat template refused these messages; the text is the template's own."""


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
        self.bos_token = _special(settings, "bos_token")
        self.eos_token = _special(settings, "eos_token")
        self._names = {
            name: _special(settings, name)
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        self.chat_template = _chat_template(self.path, settings)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        decoder = (
            json.loads(self._backend.to_str())["decoder"]
            if self._backend.decoder is not None
            else None
        )
        self.is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"

    @property
    def bos_id(self) -> int | None:
        return None if self.bos_token is None else self._backend.token_to_id(self.bos_token)

    @property
    def eos_id(self) -> int | None:
        return None if self.eos_token is None else self._backend.token_to_id(self.eos_token)

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

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special=False`.

        Raises ModelError when the model has no chat template, TemplateError when the template refuses the messages.
        """
        template = self._template
        values = {
            name: token for name, token in self._names.items() if token is not None
        } | variables
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from None

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.chat_template is None:
            raise ModelError(
                f"{self.path}: the model has no chat template; allowed: plain completions; use an instruct model for chat"
            )
        # The settings of Hugging Face's apply_chat_template. A template is a stranger's code, hence the sandbox.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self.chat_template)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"{self.path}: the chat template is malformed ({error}); fetch the model again"
            ) from None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja2 reads

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter this does not escape HTML, as templates expect."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


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


def _special(settings: Mapping[str, Any], name: str) -> str | None:
    """A special token, given as text or as an added-token object."""
    value = settings.get(name)
    return value.get("content") if isinstance(value, dict) else value


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """From `chat_template.jinja`, which wins, or the settings: one text, or a list of which `default` counts."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        return next((entry["template"] for entry in value if entry.get("name") == "default"), None)
    return value
