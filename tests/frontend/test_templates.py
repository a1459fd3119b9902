"""Chat templates over HTTP: what a message spells stays text, and what fails is one line without a path."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.frontend import prompts
from forebay.frontend.asked import Conversation
from forebay.frontend.model import load_served_model
from forebay.frontend.prompts import PromptEncoder
from forebay.models.chat_template import TemplateError, TemplateTimeout
from forebay.models.tokenizer import Tokenizer
from forebay.settings import MessageSpecialTokens, Settings
from tests.frontend.served import MODEL, Server, wait_ready
from tests.frontend.tiny_text import EOS, write_text_model


def tokens(server: Server, content: str) -> list[int]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    found: list[int] = server.http.post("/tokenize", json=body).json()["tokens"]
    return found


def test_a_message_that_spells_a_control_token(
    server: Server, start_server: Callable[..., Server]
) -> None:
    assert tokens(server, "a<end>b") == list(b"<user>a<end>b\n<assistant>")
    parsing = Settings(store="none", message_special_tokens=MessageSpecialTokens.PARSE)
    assert EOS in tokens(wait_ready(start_server(parsing)), "a<end>b")


@pytest.fixture
def encoder_of(tmp_path: Path) -> Callable[[str | None], PromptEncoder]:
    def make(template: str | None) -> PromptEncoder:
        path = write_text_model(tmp_path)
        said = {"eos_token": "<end>", "chat_template": template}
        (path / "tokenizer_config.json").write_text(json.dumps(said))
        return PromptEncoder(Tokenizer(path), 512, 300)

    return make


TALK = Conversation(({"role": "user", "content": "hi"},))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the model has no chat template"),
        ("{% for %}", "the model's chat template is malformed"),
        ("{{ 1 // 0 }}", "the chat template refuses these messages: integer division"),
        ("{{ messages[3]['role'] }}", "the chat template refuses these messages"),
    ],
)
def test_a_template_that_does_not_do(
    encoder_of: Callable[[str | None], PromptEncoder], template: str | None, message: str
) -> None:
    with pytest.raises(TemplateError, match=message) as caught:
        asyncio.run(encoder_of(template).from_conversation(TALK))
    assert "/" not in str(caught.value).replace("//", "") and "\n" not in str(caught.value)


def test_a_template_that_loops_leaves_the_event_loop_alone(
    encoder_of: Callable[[str | None], PromptEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "TEMPLATE_S", 0.4)
    encoder = encoder_of(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    gaps: list[float] = []

    async def ask() -> None:
        async def watch() -> None:
            clock = asyncio.get_running_loop().time
            while True:
                before = clock()
                await asyncio.sleep(0)
                gaps.append(clock() - before)

        for _ in range(2):
            watcher = asyncio.create_task(watch())
            with pytest.raises(TemplateTimeout, match=r"not done with these messages after 0\.4 s"):
                await encoder.from_conversation(TALK)
            watcher.cancel()

    asyncio.run(ask())
    encoder.close()
    assert len(gaps) > 4  # other work went on meanwhile


def test_ends_of_a_turn_that_the_template_writes(tmp_path: Path) -> None:
    """<|im_end|> ends a turn of this model, whatever its configuration declares."""
    path = write_text_model(tmp_path)
    said = json.loads((path / "tokenizer.json").read_text())
    end = {"id": 257, "content": "<|im_end|>", "special": True, "normalized": False}
    said["added_tokens"].append(end | {"single_word": False, "lstrip": False, "rstrip": False})
    (path / "tokenizer.json").write_text(json.dumps(said))
    for template, ends in (("{{ messages[0].content }}<|im_end|>", (EOS, 257)), ("plain", (EOS,))):
        config = {"eos_token": "<end>", "chat_template": template}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_served_model(path, "x", 512).eos == ends
