"""Tokenizer files and chat templates, and text that comes out piece by piece."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from forebay.models.byte_alphabet import byte_alphabet
from forebay.models.detokenize import IncrementalDetokenizer
from forebay.models.errors import ModelError
from forebay.models.tokenizer import TemplateError, Tokenizer

SPECIAL = 256


def byte_level():
    """256 single bytes, one special token, a few merged pieces (some of them broken characters)."""
    spelling = byte_alphabet()
    vocab = {character: byte for byte, character in enumerate(spelling)}
    merges = []
    for piece in ("he", "llo", " wo", "é", "日"[:1], "🙂"):
        text = [spelling[byte] for byte in piece.encode()]
        for cut in range(2, len(text) + 1):
            merge = ("".join(text[: cut - 1]), text[cut - 1])
            if "".join(merge) not in vocab:
                vocab["".join(merge)] = len(vocab) + 1
                merges.append(merge)
    backend = Backend(BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return backend


def sentencepiece():
    """Whole words, a space marker, and byte tokens for the rest."""
    words = [
        "<unk>",
        "▁",
        "▁Hello",
        "▁world",
        "lo",
        "é",
        "!",
        *[f"<0x{byte:02X}>" for byte in range(256)],
    ]
    backend = Backend(
        BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return backend


def write(path, backend, **config):
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(path)


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tokenizer"), byte_level())


@pytest.fixture(scope="module")
def words_tokenizer(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tokenizer"), sentencepiece())


def stream(tokenizer, ids, skip_special=True, sizes=(1,)):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    pieces, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.finish()]


@given(
    ids=st.lists(st.integers(0, 275), max_size=60),
    sizes=st.lists(st.integers(1, 5), min_size=1),
    skip=st.booleans(),
)
def test_any_bytes_come_out_as_decoded_at_once(bytes_tokenizer, ids, sizes, skip):
    assert "".join(stream(bytes_tokenizer, ids, skip, sizes)) == bytes_tokenizer.decode(ids, skip)


@given(text=st.text(max_size=40))
def test_characters_come_out_whole(bytes_tokenizer, text):
    ids = list(text.encode())
    pieces = stream(bytes_tokenizer, ids)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert all(len(piece) <= 1 for piece in pieces)


@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
@settings(max_examples=50)
def test_the_demo_vocabulary(demo_tokenizer, ids, skip):
    assert "".join(stream(demo_tokenizer, ids, skip)) == demo_tokenizer.decode(ids, skip)


@pytest.fixture(scope="module")
def demo_tokenizer(demo):
    return Tokenizer(demo)


@given(parts=st.lists(st.one_of(st.integers(1, 6), st.text(min_size=1, max_size=2)), max_size=30))
def test_sentencepiece_words_and_whole_characters(words_tokenizer, parts):
    """Byte runs that are valid text; what the class says about malformed ones is below."""
    ids = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [7 + byte for byte in part.encode()]
    pieces = stream(words_tokenizer, ids)
    assert "".join(pieces) == words_tokenizer.decode(ids)


def test_sentencepiece_leading_space_is_dropped_once(words_tokenizer):
    assert stream(words_tokenizer, [2, 3, 3, 6]) == ["Hello", " world", " world", "!", ""]


def test_sentencepiece_malformed_bytes_come_out_and_text_goes_on(words_tokenizer):
    text = "".join(stream(words_tokenizer, [2, *[7 + 0x80] * 40, 3]))
    assert text.startswith("Hello\ufffd") and text.endswith(" world")


def test_cost_of_a_token_does_not_grow(bytes_tokenizer):
    """A stream of continuation bytes never forms a character; it must not be decoded again and again."""
    detokenizer = IncrementalDetokenizer(bytes_tokenizer)
    start = time.process_time()
    for _ in range(100_000):
        detokenizer.push([0x80])
    assert time.process_time() - start < 5  # quadratic work would take minutes


def test_special_tokens(bytes_tokenizer):
    end = bytes_tokenizer.token_to_id("<end>")
    assert bytes_tokenizer.special_ids == {end}
    assert "".join(stream(bytes_tokenizer, [104, end, 105])) == "hi"
    assert "".join(stream(bytes_tokenizer, [104, end, 105], skip_special=False)) == "h<end>i"
    assert bytes_tokenizer.encode("h<end>") == [104, end]


TEMPLATE = "{% for m in messages %}\n{{ bos_token }}{{ m.role }}: {{ m['content'] | tojson }}\n{% endfor %}"


def test_template_as_transformers_renders_it(tmp_path):
    tokenizer = write(
        tmp_path,
        byte_level(),
        chat_template=TEMPLATE,
        bos_token={"content": "<end>"},
        eos_token="<end>",
    )
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "<é>"}]) == '<end>user: "<é>"\n'
    )


def test_template_file_wins(tmp_path):
    write(tmp_path, byte_level(), chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new{% if add_generation_prompt %}!{% endif %}")
    assert Tokenizer(tmp_path).apply_chat_template([], add_generation_prompt=True) == "new!"


def test_template_that_refuses(tmp_path):
    tokenizer = write(
        tmp_path, byte_level(), chat_template="{{ raise_exception('roles must alternate') }}"
    )
    with pytest.raises(TemplateError, match="roles must alternate"):
        tokenizer.apply_chat_template([])


def test_template_stays_in_its_sandbox(tmp_path):
    tokenizer = write(tmp_path, byte_level(), chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(TemplateError):
        tokenizer.apply_chat_template([])


@pytest.mark.parametrize("template", [None, "{% for %}"])
def test_no_usable_template(tmp_path, template):
    with pytest.raises(TemplateError, match="template"):
        write(tmp_path, byte_level(), chat_template=template).apply_chat_template([])


@pytest.mark.parametrize("content", [None, "", "{", "{}"])
def test_damaged_tokenizer(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
