"""Token ids of a vocabulary out of a GGUF file against the tokenizer that it was made from.

Each reference is spelled as the model's own tokenizer.json spells it, trained on the corpus, and
written as the metadata that llama.cpp's converter writes; what is built from that must cut every
text in the same way.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from forebay.models.errors import ModelError
from forebay.models.gguf_tokenizer import build_tokenizer, end_ids

CORPUS: list[str] = json.loads((Path(__file__).parents[1] / "data" / "corpus.json").read_text())
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜end▁of▁sentence｜>"]
CONTROL_ID, USER_ID, NORMAL_ID, UNKNOWN_ID, BYTE_ID = 3, 4, 1, 2, 6

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by_pattern(*patterns):
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), "isolated") for each in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def digits_then_words():
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


# Name in the file -> pre-tokenizer, whether text is composed, whether whole words are looked up.
FAMILIES = {
    "gpt-2": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), False, False),
    "smollm": (digits_then_words, False, False),
    "starcoder": (digits_then_words, False, False),
    "command-r": (digits_then_words, True, False),
    "llama-bpe": (lambda: by_pattern(LLAMA3), False, True),
    "qwen2": (lambda: by_pattern(QWEN2), True, False),
    "deepseek-r1-qwen": (lambda: by_pattern(QWEN2), False, False),
    "tekken": (lambda: by_pattern(TEKKEN), False, True),
    "deepseek-coder": (
        lambda: pre_tokenizers.Sequence(
            [
                *(
                    pre_tokenizers.Split(Regex(each), "isolated")
                    for each in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
                ),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        False,
        False,
    ),
}


def trained(split, composed, whole_words):
    tokenizer = Tokenizer(BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer = split()
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 2,
        BpeTrainer(
            vocab_size=1200,
            initial_alphabet=alphabet,
            special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL],
            show_progress=False,
        ),
    )
    if whole_words:  # a word that no merge makes
        said = json.loads(tokenizer.to_str())
        at = len(said["model"]["vocab"])
        said["model"]["vocab"] |= {"Ġsyllabification": at, "zyzzyva": at + 1}
        tokenizer = Tokenizer.from_str(json.dumps(said))
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def metadata(tokenizer, pre, **more):
    """As `convert_hf_to_gguf.py` writes a byte-level tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    kinds = [
        NORMAL_ID if index not in added else CONTROL_ID if added[index].special else USER_ID
        for index in range(len(tokens))
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eos_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


TEXTS = [
    *CORPUS,
    *CONTROL,
    "<|im_start|>user\nhi<think>a</think><|im_end|>\n",
    "a<｜end▁of▁sentence｜>b",
    "zyzzyva syllabification zyzzyvas",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_of_byte_level_families(name):
    theirs = trained(*FAMILIES[name])
    ours, _ = build_tokenizer(metadata(theirs, name), "x.gguf")
    for text in TEXTS:
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == wanted, text
        assert ours.decode(wanted, skip_special_tokens=False) == theirs.decode(
            wanted, skip_special_tokens=False
        )


def test_families_cut_texts_differently():
    """Were one rule taken for all of them, the test above would pass none the wiser."""
    ids = {}
    for name in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "deepseek-coder"):
        said = metadata(trained(*FAMILIES["gpt-2"]), name)
        ours, _ = build_tokenizer(said, "x.gguf")
        ids[name] = tuple(tuple(ours.encode(text).ids) for text in CORPUS)
    assert len(set(ids.values())) == len(ids)


def test_begin_token_where_the_file_does_not_say():
    said = metadata(trained(*FAMILIES["gpt-2"]), "llama-bpe", bos_token_id=1)
    del said["tokenizer.ggml.add_bos_token"]
    assert build_tokenizer(said, "x.gguf")[0].encode("x").ids[0] == 1
    said["tokenizer.ggml.pre"] = "qwen2"
    assert build_tokenizer(said, "x.gguf")[0].encode("x").ids[0] != 1


def test_no_name_is_the_default_and_is_said():
    said = metadata(trained(*FAMILIES["gpt-2"]), "default")
    named, plain = build_tokenizer(said, "x.gguf")
    del said["tokenizer.ggml.pre"]
    unnamed, warned = build_tokenizer(said, "x.gguf")
    assert [unnamed.encode(t).ids for t in CORPUS] == [named.encode(t).ids for t in CORPUS]
    assert "warnings" not in plain and "tokenizer.ggml.pre" in warned["warnings"][0]
    assert len(named.encode("((a+b)=12345)").tokens) >= len("((a+b)=") - 2


# Sentencepiece: the space is U+2581, what has no token becomes bytes or the unknown token.


def sentencepiece(byte_fallback, prefix):
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] * prefix)])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256) if byte_fallback)]
    tokenizer.train_from_iterator(
        CORPUS[:18] * 2, BpeTrainer(vocab_size=1100, special_tokens=special, show_progress=False)
    )
    said = json.loads(tokenizer.to_str())
    said["added_tokens"] = [each for each in said["added_tokens"] if each["id"] < 3]
    return Tokenizer.from_str(json.dumps(said))


def spm_metadata(tokenizer, prefix, merges=False, **more):
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    rank = {"".join(merge): -float(at) for at, merge in reversed(list(enumerate(model["merges"])))}
    said = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [rank.get(token, -1e4) for token in tokens],
        "tokenizer.ggml.token_type": [
            {0: UNKNOWN_ID, 1: CONTROL_ID, 2: CONTROL_ID}.get(
                at, BYTE_ID if token.startswith("<0x") else NORMAL_ID
            )
            for at, token in enumerate(tokens)
        ],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    if merges:
        said["tokenizer.ggml.merges"] = [" ".join(merge) for merge in model["merges"]]
    if not prefix:
        said["tokenizer.ggml.add_space_prefix"] = False
    return said | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("byte_fallback", [False, True])
def test_ids_of_sentencepiece(byte_fallback, prefix, merges):
    theirs = sentencepiece(byte_fallback, prefix)
    ours, settings = build_tokenizer(spm_metadata(theirs, prefix, merges), "x.gguf")
    for text in [*CORPUS, " a", "  a", "a</s> b", "<unk>", ""]:
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == wanted, text
        assert ours.decode(wanted) == theirs.decode(wanted)
    assert ours.encode("x").ids[0] == 1  # <s>, which no key names
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")


def test_text_cannot_spell_a_control_token_by_its_pieces():
    """With control tokens among the scores, "</" and "s>" would merge to the end of the text."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "<", "/", "s", ">", "</", "s>", "a"]
    said = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 3 + [-float(at) for at in range(len(tokens) - 3)],
        "tokenizer.ggml.token_type": [UNKNOWN_ID, CONTROL_ID, CONTROL_ID] + [NORMAL_ID] * 8,
        "tokenizer.ggml.add_space_prefix": False,
    }
    ours, _ = build_tokenizer(said, "x.gguf")
    ours.encode_special_tokens = True
    assert ours.encode("</s>", add_special_tokens=False).tokens == ["</", "s>"]


def test_ends_of_a_turn():
    said = metadata(trained(*FAMILIES["gpt-2"]), "gpt-2", eos_token_id=0)
    assert end_ids(said, "x.gguf") == [0, 2, 3]  # and <|im_end|>, DeepSeek's: control tokens
    assert end_ids(said | {"tokenizer.ggml.eot_token_id": 5}, "x.gguf") == [0, 5, 2, 3]
    assert end_ids(said | {"tokenizer.ggml.eom_token_id": 7}, "x.gguf") == [0, 7, 2, 3]
    said["tokenizer.ggml.token_type"][2] = NORMAL_ID  # a text that looks like one
    assert end_ids(said, "x.gguf") == [0, 3]


def test_chat_templates():
    said = metadata(trained(*FAMILIES["gpt-2"]), "gpt-2")
    assert build_tokenizer(said, "x.gguf")[1]["chat_template"] is None
    said["tokenizer.chat_template"] = "one"
    assert build_tokenizer(said, "x.gguf")[1]["chat_template"] == "one"
    said |= {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
    }
    assert build_tokenizer(said, "x.gguf")[1]["chat_template"] == [
        {"name": "default", "template": "one"},
        {"name": "tool_use", "template": "tools"},
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "klingon"}, "pre-tokenizer 'klingon' is not supported; allowed: .*command-r"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000 and the vocabulary has"),
        ({"merges": ["ab"]}, "is no pair"),
        ({"merges": [1, 2]}, "the merge 1 is no pair"),
        ({"merges": None}, "its vocabulary has no merges"),
        ({"merges": ["zz qq"]}, "vocabulary and merges do not fit"),
        ({"token_type": [1]}, "the kinds of 1"),
        ({"model": "t5"}, "tokenizer 't5' is not supported; allowed: gpt2, llama"),
        ({"tokens": []}, "holds no tokenizer"),
        ({"model": "llama", "merges": None, "scores": None}, "neither merges nor a score"),
    ],
)
def test_refused(changes, message):
    said = metadata(trained(*FAMILIES["gpt-2"]), "gpt-2")
    said |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError, match=message) as caught:
        build_tokenizer(said, "x.gguf")
    assert "\n" not in str(caught.value)
