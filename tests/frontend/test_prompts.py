"""What becomes a prompt, and what is refused before it can reach the engine."""

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from forebay.frontend.asked import Conversation
from forebay.frontend.prompts import PromptEncoder, PromptError


class Wide:
    """A tokenizer that knows one token more than the model has embeddings for, as fine-tunes with an added pad token do."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [256 if character == "#" else ord(character) % 256 for character in text]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(map(chr, ids))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] = MappingProxyType({}),
        parse_special: bool = False,
        continue_final: bool = False,
        deadline_s: float = 0,
    ) -> tuple[str, list[int]]:
        text = "".join(str(message["content"]) for message in messages)
        return text, self.encode(text)


@pytest.fixture
def encoder() -> PromptEncoder:
    return PromptEncoder(Wide(), max_context=32, vocab_size=256)


def test_a_token_that_the_model_has_no_embedding_for_is_refused_however_it_comes(
    encoder: PromptEncoder,
) -> None:
    with pytest.raises(PromptError, match="token id 256; the model's ids are 0 to 255"):
        asyncio.run(encoder.from_text("hi #"))
    with pytest.raises(PromptError, match="token id 256"):
        asyncio.run(encoder.encode(Conversation(({"role": "user", "content": "#"},))))
    with pytest.raises(PromptError, match="token id 256"):
        encoder.from_tokens([1, 256])
    assert asyncio.run(encoder.from_text("hi")).tokens == [104, 105]
