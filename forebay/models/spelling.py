"""How single tokens are written: their bytes, and their text where they are whole characters.

A token's text does not always stand alone: it may be a part of a character, and sentencepiece drops a leading space where
a text begins. So a token of a text is spelled by what it adds to that text, one that was not chosen by its own bytes.
"""

from __future__ import annotations

import re

from forebay.models.tokenizer import Tokenizer

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def token_bytes(self, token: int) -> bytes:
        """What a token is worth anywhere but at the very beginning; empty outside the vocabulary."""
        if self._tokenizer.is_byte_level:
            return self._tokenizer.token_bytes(token)
        piece = self._tokenizer.id_to_token(token) or ""
        text = self._tokenizer.decode([token], skip_special=False)
        if (byte := _BYTE.fullmatch(piece)) and text != piece:
            return bytes([int(byte[1], 16)])
        if _SPACE in piece and _SPACE not in text:
            return piece.replace(_SPACE, " ").encode()
        return text.encode()

    def alone(self, token: int) -> str:
        """A token as such. What is no text is spelled byte by byte, as OpenAI does."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes_in(self, token: int, text: str) -> bytes:
        """The bytes of a token that added ``text`` to its text; joined, they are the text's."""
        raw = self.token_bytes(token)
        try:
            own = raw.decode()
        except UnicodeDecodeError:
            return raw  # a part of a character, whose text came with another token
        return text.encode() if text.strip() in own or not text else raw
