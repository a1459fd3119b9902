"""Special tokens of a Hugging Face directory that its tokenizer.json does not list as such.

They stand in tokenizer_config.json (`added_tokens_decoder`, `eos_token`, ...) and, in older ones,
in special_tokens_map.json. transformers adds them when it loads the tokenizer, and so does this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OWN_ENDS = ("LlamaTokenizer", "LlamaTokenizerFast")
COMPLETE = "added_tokens_are_complete"  # said by our own converter


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """`settings`: of tokenizer_config.json, with what special_tokens_map.json says."""

    settings: Mapping[str, Any]

    @classmethod
    def read(cls, config: Mapping[str, Any], special_map: Mapping[str, Any]) -> SpecialTokens:
        """The map counts where the configuration is too old to list its added tokens."""
        return cls(dict(config) if "added_tokens_decoder" in config else {**config, **special_map})

    def named(self) -> dict[str, str]:
        """`bos_token` and so on, as templates use them."""
        found = {name: _content(self.settings.get(name)) for name in _NAMED}
        return {name: token for name, token in found.items() if token is not None}

    def apply(self, backend: Tokenizer) -> None:
        """Add what `backend` lacks, and let it begin and end texts as the settings say."""
        if self.settings.get(COMPLETE):
            return
        there = list(backend.get_added_tokens_decoder().values())
        known = {repr(token) for token in there}
        new = [token for token in self._listed() if repr(token) not in known]
        spelled = {token.content for token in [*there, *new]}
        for token in self._declared():
            if token.content not in spelled:
                new.append(token)
                spelled.add(token.content)
        named = set(self.named().values())
        for token in new:
            token.special = token.special or token.content in named
        backend.add_tokens(new)
        self._set_ends(backend)

    def _listed(self) -> Iterator[AddedToken]:
        listed = self.settings.get("added_tokens_decoder") or {}
        for _, said in sorted(listed.items(), key=lambda entry: int(entry[0])):
            yield _added(said)

    def _declared(self) -> Iterator[AddedToken]:
        for name in _NAMED:
            if self.settings.get(name) is not None:
                yield _added(self.settings[name], special=True)
        for name in _LISTED:
            listed = self.settings.get(name) or []
            for said in listed.values() if isinstance(listed, dict) else listed:
                yield _added(said, special=True)

    def _set_ends(self, backend: Tokenizer) -> None:
        """For classes that make their own post-processor, `add_bos_token` and `add_eos_token` count
        before what tokenizer.json says; for others they say nothing.
        """
        flags = {"add_bos_token", "add_eos_token"} & self.settings.keys()
        if not flags or self.settings.get("tokenizer_class") not in _OWN_ENDS:
            return
        named = self.named()
        bos = named.get("bos_token") if self.settings.get("add_bos_token", True) else None
        eos = named.get("eos_token") if self.settings.get("add_eos_token") else None
        single = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
        pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
        used = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=used
        )


def _content(value: Any) -> str | None:
    """A token is written as its text, or as an object with flags."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _added(value: Any, special: bool = False) -> AddedToken:
    content = _content(value)
    if content is None:
        raise ValueError(f"{value!r} is no token")
    flags = (
        {name: bool(value[name]) for name in _FLAGS if name in value}
        if isinstance(value, dict)
        else {}
    )
    if special:
        flags["special"] = True
    return AddedToken(content, **flags)
