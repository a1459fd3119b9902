"""Tokens are spelled exactly: joined they are the text, and their bytes are its bytes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from forebay.core.messages import FinishReason, Output, TokenLogprobs
from forebay.core.sampling import SamplingParams
from forebay.frontend.responses import chat_logprobs, completion_logprobs
from forebay.frontend.sequence import Sequence
from forebay.models.detokenize import IncrementalDetokenizer
from forebay.models.spelling import Spelling
from forebay.models.tokenizer import Tokenizer
from tests.frontend.tiny_text import write_text_model

PIECES = ["\u2581", "t", "r", "u", "e", "true", "\u2581true", "\u65e5"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(path: Path) -> Tokenizer:
    """As converters write one: the space is U+2581, unknown characters fall back to bytes."""
    path.mkdir()
    vocabulary = {piece: index for index, piece in enumerate([*BYTES, *PIECES])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


@pytest.fixture(scope="module", params=["byte level", "sentencepiece"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    path = tmp_path_factory.mktemp("spelling")
    if request.param == "sentencepiece":
        return sentencepiece(path / "sp")
    return Tokenizer(write_text_model(path / "bytes"))


def positions(tokenizer: Tokenizer, tokens: list[int]) -> tuple[str, list[object]]:
    params = SamplingParams(max_tokens=len(tokens), logprobs=2)
    sequence = Sequence(IncrementalDetokenizer(tokenizer), params, ())
    text, found = "", []
    for index, token in enumerate(tokens):
        last = index == len(tokens) - 1
        top = TokenLogprobs(-0.5, (3, 4), (-1.0, -2.0))
        finish = FinishReason.LENGTH if last else None
        delta = sequence.push(Output("r", (token,), (top,), finish=finish))
        text += delta.text
        found += delta.positions
    return text, found


@given(st.data())
def test_joined_the_tokens_are_the_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    most = tokenizer.vocab_size - 1
    tokens = data.draw(st.lists(st.integers(0, most), min_size=1, max_size=12))
    text, found = positions(tokenizer, tokens)
    spelling = Spelling(tokenizer)
    told = completion_logprobs(found, spelling)
    assert "".join(told.tokens) == text
    assert len(told.tokens) == len(tokens)
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert text[offset : offset + len(token)] == token
    assert all(top is not None and len(top) >= 2 for top in told.top_logprobs)


@pytest.mark.parametrize("text", ["true true", "é", "日本 wägt", " true", "a\u0301", "🙂"])
def test_joined_the_bytes_are_the_texts(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special=False)
    shown, found = positions(tokenizer, tokens)
    told = chat_logprobs(found, Spelling(tokenizer))
    assert b"".join(bytes(entry.bytes or ()) for entry in told.content) == shown.encode()


def test_a_token_alone_keeps_its_space_and_half_a_character_its_bytes(tokenizer: Tokenizer) -> None:
    spelling = Spelling(tokenizer)
    spelled = [spelling.alone(token) for token in range(tokenizer.vocab_size)]
    assert len(set(spelled)) >= 256, "no two bytes read alike"
    half = next(token for token in range(256) if spelling.token_bytes(token) == b"\xc3")
    assert spelling.alone(half) == "bytes:\\xc3"
    if not tokenizer.is_byte_level:
        assert {"true", " true"} <= set(spelled)
