"""A tokenizer.json from the vocabulary inside a GGUF file.

A GGUF states vocabulary, merges and special ids, and names its pre-tokenizer (`tokenizer.ggml.pre`)
where Hugging Face files spell it out (`gguf_splits`); an unknown name is refused. What the file
does not say is what llama.cpp takes for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from forebay.models.byte_alphabet import byte_alphabet
from forebay.models.end_tokens import END_TOKENS
from forebay.models.errors import ModelError
from forebay.models.gguf_splits import DEFAULT, SPLITS, Split
from forebay.models.special_tokens import COMPLETE

# Kinds of `tokenizer.ggml.token_type`; the rest is text.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6

# Said at every start on such a file.
_NO_PRE_TOKENIZER = (
    "the file does not name its pre-tokenizer (tokenizer.ggml.pre); 'default' is taken, and texts "
    "may be cut into other tokens than the model was trained on; fetch a newer conversion of it"
)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """`kinds`: one for each token."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    metadata: Mapping[str, Any]
    where: str

    def value(self, key: str, default: Any = None) -> Any:
        found = self.metadata.get(f"tokenizer.ggml.{key}")
        return default if found is None else found

    def merges(self) -> list[tuple[str, str]]:
        """As stated. A space may begin a token, so the one that divides is looked for behind it."""
        found = []
        if self.value("model") == "gpt2" and self.value("merges") is None:
            raise ModelError(
                f"{self.where}: its vocabulary has no merges; fetch it again or use another file"
            )
        for merge in self.value("merges", []):
            at = merge.find(" ", 1) if isinstance(merge, str) else -1
            if at < 0:
                raise ModelError(
                    f"{self.where}: its vocabulary and merges do not fit together (the merge "
                    f"{merge!r} is no pair); use another file"
                )
            found.append((merge[:at], merge[at + 1 :]))
        return found

    def token(self, name: str, default: int | None = None) -> str | None:
        """The spelling of the token that the file declares as `name`."""
        index = self.value(f"{name}_token_id", default)
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise ModelError(
                f"{self.where}: {name}_token_id is {index!r} and the vocabulary has "
                f"{len(self.tokens)} tokens; fetch the file again or use another"
            )
        return self.tokens[index]


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and the contents of tokenizer_config.json for a GGUF's metadata (keys as in the file).

    Raises ModelError, naming `where`, when the vocabulary is of a kind that cannot be rebuilt.
    """
    vocabulary = _read_vocabulary(metadata, where)
    kind = vocabulary.value("model")
    if kind == "gpt2":
        split = _split(vocabulary)
        tokenizer, adds_bos = _byte_level(vocabulary, split), split.bos
        defaults: tuple[int | None, ...] = (None, None, None)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(vocabulary), True
        defaults = (1, 2, 0)  # sentencepiece's own numbers of <s>, </s> and <unk>
    else:
        raise ModelError(
            f"{where}: tokenizer {kind!r} is not supported; allowed: gpt2, llama; use another file"
        )
    _add_tokens(tokenizer, vocabulary)
    settings: dict[str, Any] = {
        "add_bos_token": bool(vocabulary.value("add_bos_token", adds_bos)),
        "add_eos_token": bool(vocabulary.value("add_eos_token", False)),
        "chat_template": _chat_templates(metadata),
        "tokenizer_class": "PreTrainedTokenizerFast",
        COMPLETE: True,
    }
    if kind == "gpt2" and vocabulary.value("pre") is None:
        settings["warnings"] = [_NO_PRE_TOKENIZER]
    bos, eos, unknown = (
        default if default is not None and default < len(vocabulary.tokens) else None
        for default in defaults
    )
    for name, key, default in (
        ("bos", "bos", bos),
        ("eos", "eos", eos),
        ("unk", "unknown", unknown),
        ("pad", "padding", None),
    ):
        settings[f"{name}_token"] = vocabulary.token(key, default)
    tokenizer.post_processor = _post_processor(tokenizer, settings)
    return tokenizer, settings


def _chat_templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """As tokenizer_config.json has them: one text, or named ones where there are others too."""
    usual = metadata.get("tokenizer.chat_template")
    lead = "tokenizer.chat_template."
    others = {
        key.removeprefix(lead): text for key, text in metadata.items() if key.startswith(lead)
    }
    if not others:
        return usual
    named = others if usual is None else {"default": usual, **others}
    return [{"name": name, "template": text} for name, text in sorted(named.items())]


def end_ids(metadata: Mapping[str, Any], where: str) -> list[int]:
    """Ids that end a text: those that the file declares, and control tokens known to end a turn.

    A file often declares the end of a text alone, while its chat template ends turns by another.
    """
    vocabulary = _read_vocabulary(metadata, where)
    default = 2 if vocabulary.value("model") == "llama" and len(vocabulary.tokens) > 2 else None
    declared = [
        vocabulary.value("eos_token_id", default),
        vocabulary.value("eot_token_id"),
        vocabulary.value("eom_token_id"),
    ]
    for name in ("eos", "eot", "eom"):
        vocabulary.token(name)  # refuses what is no token
    known = [
        index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if token in END_TOKENS and kind in (_CONTROL, _USER_DEFINED)
    ]
    return list(dict.fromkeys([*(index for index in declared if index is not None), *known]))


def _read_vocabulary(metadata: Mapping[str, Any], where: str) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(
            f"{where}: holds no tokenizer; use a .gguf file with one, or a Hugging Face directory"
        )
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(
            f"{where}: has {len(tokens)} tokens and the kinds of {len(kinds)}; fetch it again or "
            "use another file"
        )
    return _Vocabulary(tokens, kinds, metadata, where)


def _split(vocabulary: _Vocabulary) -> Split:
    """By the file's name for it, or the default for a file without one."""
    name = vocabulary.value("pre")
    if name is None:
        return DEFAULT
    if name not in SPLITS:
        raise ModelError(
            f"{vocabulary.where}: pre-tokenizer {name!r} is not supported; allowed: "
            f"{', '.join(sorted(SPLITS))}; use a Hugging Face directory of this model"
        )
    return SPLITS[name]


def _byte_level(vocabulary: _Vocabulary, split: Split) -> Tokenizer:
    """Byte-level BPE.

    Tokens of text outside the byte alphabet are spelled into it, as the text itself will be.
    Control and user-defined tokens are looked for in the text as it is and keep their spelling,
    unless merges make them too.
    """
    spelling = byte_alphabet()
    alphabet = set(spelling)
    merges = vocabulary.merges()
    merged = {name for left, right in merges for name in (left, right, left + right)}
    vocab: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        spelled = token
        if not set(token) <= alphabet:
            spelled = "".join(spelling[byte] for byte in token.encode())
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) and spelled not in merged:
            spelled = token
        vocab.setdefault(spelled, index)
    tokenizer = _bpe(
        vocabulary.where,
        vocab=vocab,
        merges=merges,
        continuing_subword_prefix="",
        end_of_word_suffix="",
        ignore_merges=split.whole_words,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """Sentencepiece BPE; merges from the file, or recovered from the vocabulary's scores.

    A space goes before every piece of text between control tokens, as sentencepiece does it,
    unless the file says that none does. A character without a token becomes its bytes where all
    bytes have tokens, and the unknown token otherwise.
    """
    tokens = vocabulary.tokens
    vocab = {token: index for index, token in enumerate(tokens)}
    prefix = bool(vocabulary.value("add_space_prefix", True))
    unknown = vocabulary.token("unknown", 0)
    tokenizer = _bpe(
        vocabulary.where,
        vocab=vocab,
        merges=vocabulary.merges() or _merges_from_scores(vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=all(f"<0x{byte:02X}>" in vocab for byte in range(256)),
    )
    escape = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), escape]) if prefix else escape
    )
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        joined.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(joined)
    return tokenizer


def _bpe(where: str, **options: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE(**options))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(
            f"{where}: its vocabulary and merges do not fit together ({error}); use another file"
        ) from None


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to cut a token of text into two tokens of text, best score first.

    Control tokens are no text: were they made of pieces, a text could spell one.
    """
    scores = vocabulary.value("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise ModelError(
            f"{vocabulary.where}: its vocabulary has neither merges nor a score for each token; "
            "fetch it again or use another file"
        )
    vocab = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    }
    cuts: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        cuts.extend((scores[index], len(left), len(right), left, right) for left, right in pairs)
    cuts.sort(key=lambda cut: cut[:3], reverse=True)
    return [(left, right) for *_, left, right in cuts]


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens and the unknown one become special, user-defined ones plain added tokens; both
    are found whole in text. A known end of a turn is special whatever kind the file gives it.
    """
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    special, plain = [], []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if not token or vocab.get(token) != index:  # merges make it, or it is there twice
            continue
        if kind in (_CONTROL, _UNKNOWN) or (kind == _USER_DEFINED and token in END_TOKENS):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _post_processor(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> Any:
    """`bos $A eos`, with the special tokens that the file asks for."""
    bos = settings["bos_token"] if settings["add_bos_token"] else None
    eos = settings["eos_token"] if settings["add_eos_token"] else None
    single = [f"{bos}:0"] * (bos is not None) + ["$A:0"] + [f"{eos}:0"] * (eos is not None)
    pair = [*single, *[f"{bos}:1"] * (bos is not None), "$B:1", *[f"{eos}:1"] * (eos is not None)]
    used = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
