"""Conversations in which a message spells control tokens: there they are text, and nothing else.

    messages     "hi<|im_end|>"      ->  "hi" + mark          a word nobody can guess
    template     "<|im_start|>user\\nhi" + mark + "<|im_end|>"  its own control tokens are real
    encoded      [start] "user\\nhi<|im_end|>" [end]           by a tokenizer that knows none

Only such conversations take this way; all others are encoded as they always were.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend


class ControlTokens:
    """The special tokens of one tokenizer. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        special = [token for token in added.values() if token.special]
        self._ids = {index: token.content for index, token in added.items() if token.special}
        self._stand_in = f"\ue000{secrets.token_hex(8)}\ue001"
        self.spellings = sorted({token.content for token in special}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.spellings)) or r"(?!)")
        # Two characters tell most texts apart from all that spell one, and are found much faster.
        self._leads = {token[:2] for token in self.spellings}
        # Such tokens are looked for in normalised text, which other characters may become.
        self._normalises = backend.normalizer is not None and any(
            token.normalized for token in special
        )

    def are_in(self, value: Any) -> bool:
        """Whether some text in a JSON-like value spells one."""
        if isinstance(value, str):
            return self._spells(value) or self._spells(self._normal(value))
        if isinstance(value, Mapping):
            return any(self.are_in(key) or self.are_in(part) for key, part in value.items())
        return isinstance(value, list | tuple) and any(self.are_in(part) for part in value)

    def _spells(self, text: str) -> bool:
        return any(lead in text for lead in self._leads) and bool(self._pattern.search(text))

    def encode(self, render: Callable[[Callable[[Any], Any]], str]) -> tuple[str, list[int]]:
        """Text and ids of a prompt that `render(protect)` makes; `protect` is to be applied to all
        that comes from a caller.
        """
        marks = _Marks(self._pattern)
        rendered = render(marks.put)
        encoding = self._backend.encode(rendered, add_special_tokens=False)
        text, at, real = "", 0, []
        for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if index in self._ids and self._ids[index] == rendered[start:end].strip():
                text += marks.take(rendered[at:start]) + self._stand_in
                real.append(index)
                at = end
        text += marks.take(rendered[at:])
        stand_in = self._blind.token_to_id(self._stand_in)
        ids = iter(real)
        encoded = self._blind.encode(text, add_special_tokens=False).ids
        return marks.take(rendered), [next(ids) if i == stand_in else i for i in encoded]

    @cached_property
    def _blind(self) -> Backend:
        """The same tokenizer, to which control tokens are text. One added token stands for a real
        one, so that what is beside it is encoded as it is beside a control token.
        """
        blind = Backend.from_str(self._backend.to_str())
        blind.encode_special_tokens = True
        blind.add_tokens([AddedToken(self._stand_in, normalized=False)])
        return blind

    def _normal(self, text: str) -> str:
        if not self._normalises:
            return ""
        assert self._backend.normalizer is not None
        return str(self._backend.normalizer.normalize_str(text))


class _Marks:
    """Words of letters and digits that stand for what a message spells."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._nonce = secrets.token_hex(8)
        self._spelled: list[str] = []
        self._mark = re.compile(rf"x{self._nonce}n(\d+)x")

    def put(self, value: Any) -> Any:
        """A copy of a JSON-like value with a mark for each spelling in its texts."""
        if isinstance(value, str):
            return self._pattern.sub(self._replace, value)
        if isinstance(value, Mapping):
            return {self.put(key): self.put(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.put(part) for part in value]
        return value

    def take(self, text: str) -> str:
        return self._mark.sub(lambda found: self._spelled[int(found[1])], text)

    def _replace(self, found: re.Match[str]) -> str:
        self._spelled.append(found[0])
        return f"x{self._nonce}n{len(self._spelled) - 1}x"
