"""Text as it is generated, without ever taking back a character.

A byte-level vocabulary (GPT-2, Llama 3, Qwen, SmolLM) gives each id's bytes, and a character is let out with its last
byte. Other vocabularies join text in their own ways (a leading space dropped, byte tokens fused), so there a short
window of ids is decoded again (the offset technique of Hugging Face TGI and vLLM):

    ids    ... [ context ][ pending | new ]       context: ids whose text is out, kept because the text of an id can
                 ^prefix    ^read                 depend on the one before it

The new text is `decode(ids[prefix:])` behind `decode(ids[prefix:read])`, held back while it ends in U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from forebay.models.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_PENDING_MAX = (
    8  # a character has at most 4 byte tokens; a longer wait means that the bytes are no text
)


class IncrementalDetokenizer:
    """The text of one growing sequence of ids.

    The concatenated answers equal `tokenizer.decode(all ids)`. The one exception: a sentencepiece run of byte tokens
    that turns out malformed after some of its characters are out; what is out stays.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._skip_special = skip_special
        self._bytes = (
            codecs.getincrementaldecoder("utf-8")(errors="replace")
            if tokenizer.is_byte_level
            else None
        )
        self._window: list[int] = []
        self._read = 0

    @property
    def hidden(self) -> Mapping[str, int]:
        """The special tokens that the text leaves out, by spelling."""
        return self._tokenizer.special_tokens if self._skip_special else {}

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; returns the text that they complete, "" while a character is unfinished."""
        kept = [token for token in ids if token not in self._skipped]
        if self._bytes is not None:
            return self._bytes.decode(
                b"".join(self._tokenizer.token_bytes(token) for token in kept)
            )
        return "".join(self._push_one(token) for token in kept)

    def finish(self) -> str:
        """The text that was held back, unfinished characters as U+FFFD. Nothing may be pushed after it."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._take(self._decode(self._window))

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._read < _PENDING_MAX:
            return ""
        return self._take(text)

    def _take(self, text: str) -> str:
        """Everything in the window is out now: what was new becomes the context of the next id."""
        new = text[len(self._decode(self._window[: self._read])) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)
