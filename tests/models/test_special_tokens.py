"""Token ids of Hugging Face directories as transformers reads the same files."""

from __future__ import annotations

import json

import pytest
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from forebay.models.errors import ModelError
from forebay.models.tokenizer import Tokenizer
from tests.models.test_gguf_tokenizer import CORPUS, LLAMA3

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
TEXTS = [*CORPUS, "a</s>b <|im_end|> <pad><s>", " x", "", "<|im_end|>\n<extra> <think>ok</think>"]


def byte_level():
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, BpeTrainer(
        vocab_size=1000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def sentencepiece():
    backend = Backend(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    return backend, BpeTrainer(vocab_size=1000, special_tokens=special, show_progress=False)


def unigram():
    backend = Backend(Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return backend, UnigramTrainer(
        vocab_size=1500, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )


@pytest.fixture(scope="module", params=[byte_level, sentencepiece, unigram])
def file(request):
    """A tokenizer.json in which only <unk> and <s> are listed as special."""
    backend, trainer = request.param()
    backend.train_from_iterator([*CORPUS, "<s> </s> <|im_end|> <pad>"] * 2, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    said = json.loads(backend.to_str())
    said["added_tokens"] = [each for each in said["added_tokens"] if each["id"] < 2]
    return json.dumps(said)


def listed(content, **flags):
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, **plain, "special": True, **flags}


SETTINGS = {
    "nothing": {},
    "named": {"eos_token": "</s>", "bos_token": "<s>"},
    "as objects": {
        "eos_token": listed("<|im_end|>", rstrip=True) | {"__type": "AddedToken"},
        "unk_token": "<unk>",
    },
    "listed": {
        "added_tokens_decoder": {"2": listed("</s>"), "3": listed("<|im_end|>", lstrip=True)},
        "eos_token": "<|im_end|>",
    },
    "other flags": {"added_tokens_decoder": {"1": listed("<s>", lstrip=True, rstrip=True)}},
    "new": {"pad_token": "<pad>", "additional_special_tokens": ["<extra>", "</s>"]},
    "extra": {"extra_special_tokens": ["<extra>"]},
    "no begin": {"add_bos_token": False, "bos_token": "<s>"},
    "both ends": {
        "add_bos_token": True,
        "add_eos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
    },
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("special_map", [{}, {"eos_token": "</s>", "pad_token": "<|im_end|>"}])
@pytest.mark.parametrize("has_ends", [True, False])
def test_ids_are_those_of_transformers(tmp_path, file, name, special_map, has_ends):
    from transformers import PreTrainedTokenizerFast

    said = json.loads(file)
    if not has_ends:
        said["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SETTINGS[name]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if special_map:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_map))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(str(tmp_path)), Tokenizer(tmp_path)
    for text in TEXTS if has_ends else TEXTS[-4:]:
        for add in (True, False):
            wanted = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add) == wanted, text
        for skip in (True, False):
            said = theirs.decode(
                wanted, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(wanted, skip) == said
    assert (ours.eos_token, ours.bos_token) == (theirs.eos_token, theirs.bos_token)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize(
    "said", [{"added_tokens_decoder": {"x": "</s>"}}, {"eos_token": 7, "extra_special_tokens": [3]}]
)
def test_special_tokens_that_are_none(tmp_path, file, said):
    (tmp_path / "tokenizer.json").write_text(file)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: its special tokens"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("said", "first", "last"),
    [({}, 1, 0), ({"add_bos_token": False}, 0, 0), ({"add_eos_token": True}, 1, 2)],
)
def test_llama_tokenizers_begin_and_end_as_their_settings_say(tmp_path, file, said, first, last):
    """Also those of other models that were published under that class, byte-level ones among them."""
    (tmp_path / "tokenizer.json").write_text(file)
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | said))
    ours = Tokenizer(tmp_path)
    ids, plain = ours.encode("the lazy dogs"), ours.encode("the lazy dogs", add_special=False)
    assert ids == [first] * bool(first) + plain + [last] * bool(last)
