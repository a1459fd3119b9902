"""A tokenizer.json from the vocabulary inside a GGUF file.

A GGUF states vocabulary, merges and special ids, and names its pre-tokenizer (`tokenizer.ggml.pre`) where Hugging Face
files spell it out. The pipelines here are those that transformers builds for the same names; an unknown name is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from forebay.models.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# None is the plain byte-level split of GPT-2. For `smollm` that is transformers' reading; llama.cpp splits off single
# digits first, which differs only where several spaces stand before a digit, as no merge of this family joins digits.
_SPLITS: Mapping[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
# Whose text is composed (Unicode normalisation form C) before it is split, as the Hugging Face tokenizers of these models do it.
_NORMALISED = ("qwen2",)


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and the contents of tokenizer_config.json for a GGUF's metadata (keys as in the file).

    Raises ModelError, naming `where`, when the vocabulary is of a kind that cannot be rebuilt.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(
            f"{where}: holds no tokenizer; use a .gguf file with one, or a Hugging Face directory"
        )
    if kind == "gpt2":
        tokenizer = _byte_level(tokens, metadata, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(tokens, metadata, where)
    else:
        raise ModelError(
            f"{where}: tokenizer {kind!r} is not supported; allowed: gpt2, llama; use another file"
        )
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type") or [], kind)
    settings: dict[str, Any] = {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "chat_template": metadata.get("tokenizer.chat_template"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        settings[f"{name}_token"] = None if token_id is None else tokens[token_id]
    tokenizer.post_processor = _post_processor(tokenizer, settings)
    return tokenizer, settings


def _byte_level(tokens: Sequence[str], metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Byte-level BPE. Tokens outside the byte alphabet are spelled into it, as the split text will be."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise ModelError(
            f"{where}: pre-tokenizer {name!r} is not supported; allowed: {', '.join(sorted(_SPLITS))}; "
            "use a Hugging Face directory of this model"
        )
    spelling = byte_alphabet()
    alphabet = set(spelling)
    vocab = {
        token
        if set(token) <= alphabet
        else "".join(spelling[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges") or []]
    tokenizer = _bpe(
        where, vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix=""
    )
    split = _SPLITS[name]
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if name in _NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: Sequence[str], metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Sentencepiece BPE with byte fallback; merges from the file, or recovered from the vocabulary's scores."""
    vocab = {token: index for index, token in enumerate(tokens)}
    stated = metadata.get("tokenizer.ggml.merges")
    merges = (
        [tuple(merge.split(" ")) for merge in stated]
        if stated
        else _merges_from_scores(vocab, metadata["tokenizer.ggml.scores"])
    )
    tokenizer = _bpe(where, vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="always", split=False
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def _bpe(where: str, **options: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE(**options))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(
            f"{where}: its vocabulary and merges do not fit together ({error}); use another file"
        ) from None


def _merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to cut a token into two tokens, best score first."""
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


def _add_tokens(
    tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int], kind: str
) -> None:
    """Control tokens become special, user-defined ones plain added tokens; both are found whole in text.

    A byte-level control token outside the byte alphabet is a mislabelled one (llama.cpp does that) and is left out.
    """
    alphabet = set(byte_alphabet())
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    for token, token_kind in zip(tokens, kinds, strict=False):
        if token_kind == _CONTROL and (kind != "gpt2" or set(token) <= alphabet):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_kind == _USER_DEFINED and token in vocab:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])


def _post_processor(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> Any:
    """`bos $A eos`, with the special tokens that the file asks for."""
    bos = settings["bos_token"] if settings["add_bos_token"] else None
    eos = settings["eos_token"] if settings["add_eos_token"] else None
    single = [f"{bos}:0"] * (bos is not None) + ["$A:0"] + [f"{eos}:0"] * (eos is not None)
    pair = [*single, *[f"{bos}:1"] * (bos is not None), "$B:1", *[f"{eos}:1"] * (eos is not None)]
    used = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
