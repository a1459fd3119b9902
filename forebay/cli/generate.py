"""`forebay generate`: one-shot generation with the engine in this process's hands."""

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from forebay.cli.errors import UserError
from forebay.core.sampling import SamplingParams
from forebay.frontend.later import refuse_later
from forebay.settings import resolve

if TYPE_CHECKING:
    from forebay.frontend.llm import RequestOutput

DEFAULT_TOKENS = 256


@dataclass(frozen=True)
class Asked:
    """``sampling`` and ``settings`` hold text as given on the command line."""

    model: str
    prompts: tuple[str, ...]
    sampling: Mapping[str, str]
    stop: tuple[str, ...]
    settings: Mapping[str, Any]
    config: Path | None
    as_json: bool
    as_chat: bool


def run_generate(asked: Asked) -> None:
    """Raises ``UserError`` and ``SettingsError``."""
    params = _params(asked)
    settings = resolve(refuse_later(asked.settings), asked.config)
    from forebay.frontend.engine import EngineDown
    from forebay.frontend.generation import GenerationError
    from forebay.frontend.llm import LLM
    from forebay.frontend.prompts import PromptError
    from forebay.models.errors import ModelError
    from forebay.models.tokenizer import TemplateError
    from forebay.runtime.start_error import StartError

    try:
        with Console(stderr=True).status(f"loading {asked.model}"):
            llm = LLM.from_settings(asked.model, settings)
        with llm:
            prompts = [
                llm.render_chat([{"role": "user", "content": text}]) if asked.as_chat else text
                for text in asked.prompts
            ]
            if asked.as_json:
                _print_document(llm.model_name, llm.generate(prompts, params))
            else:
                for prompt in prompts:
                    _print_stream(llm.stream(prompt, params))
    except (
        ModelError,
        StartError,
        EngineDown,
        PromptError,
        GenerationError,
        TemplateError,
    ) as error:
        raise UserError(str(error)) from error


def _params(asked: Asked) -> SamplingParams:
    """Raises ``UserError``, worded for the command line."""
    given = {"max_tokens": DEFAULT_TOKENS, "temperature": 0.0, **asked.sampling, "stop": asked.stop}
    try:
        return msgspec.convert(given, SamplingParams, strict=False)  # text becomes numbers
    except msgspec.ValidationError as error:
        if at := re.search(r"`\$\.(\w+)", str(error)):
            raise UserError(
                f"--{at[1].replace('_', '-')} is {given[at[1]]!r}; allowed: a number"
            ) from None
        raise UserError(str(error)) from None  # what SamplingParams itself refuses is worded well


def _print_stream(pieces: Iterator[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def _print_document(model: str, results: "list[RequestOutput]") -> None:
    document = {"model": model, "results": [dataclasses.asdict(result) for result in results]}
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    sys.stdout.buffer.flush()
