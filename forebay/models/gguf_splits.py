"""How byte-level vocabularies cut text into words, by the name that a GGUF file gives for it.

A Hugging Face tokenizer spells its pre-tokenizer out; a GGUF file has a name for it alone
(`tokenizer.ggml.pre`). The rules here are those of the tokenizers that llama.cpp took these names
from: each pattern cuts what the ones before it left whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # Radford et al.
)
_LLAMA3 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}"
_QWEN2 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_OTHERS}|{_SPACES}"
_DIGIT = r"\p{N}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    """Words that may begin with capitals and go on in small letters (GPT-4o, Tekken)."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


# Letters of alphabets that have capitals, as DeepSeek's first tokenizers list them.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    r"Ὀ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ"
    r"Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_ASIAN = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK3_ASIAN = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class Split:
    """`patterns`, one after the other. `whole_words`: a word that is a token is that token,
    whatever the merges say. `bos`: a text begins with the begin token where the file does not say.
    `composed`: text is brought into Unicode's normal form C first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False
    composed: bool = False


# What llama.cpp takes for a file that names none: older converters wrote files like that.
DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_LLAMA3_SPLIT = Split((_LLAMA3,), whole_words=True, bos=True)
_DIGITS_APART = Split((_DIGIT, _GPT2))
_DEEPSEEK_LLM = Split(
    (
        "[\r\n]",
        _DEEPSEEK_LETTERS,
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _DEEPSEEK_ASIAN,
        _DIGIT,
    )
)
_DEEPSEEK_CODER = Split(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN, _DIGIT))

SPLITS: Mapping[str, Split] = {
    "default": DEFAULT,
    "gpt-2": Split((_GPT2,)),
    "phi-2": Split((_GPT2,)),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "minerva-7b": _DIGITS_APART,
    "command-r": Split((_DIGIT, _GPT2), composed=True),
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "pixtral": _LLAMA3_SPLIT,
    "smaug-bpe": Split((_LLAMA3,)),
    "dbrx": Split((_LLAMA3,)),
    "qwen2": Split((_QWEN2,), composed=True),
    "deepseek-r1-qwen": Split((_QWEN2,)),
    "megrez": Split((_QWEN2,)),
    "stablelm2": Split((_QWEN2,)),
    "tekken": Split((_cased("", r"\p{N}"),), whole_words=True, bos=True),
    "gpt-4o": Split((_cased(f"{_SUFFIXES}?", r"\p{N}{1,3}"),)),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": Split((r"\p{N}{1,3}", _DEEPSEEK3_ASIAN, _DEEPSEEK3)),
}
