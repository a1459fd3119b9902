"""What one caller asks for, checked and frozen: the same value whether it came as a body over HTTP or from a script.

body ---parse--> Asked ---prompts.encode--> Prompts ---assemble--> Work ---> Generation
LLM.generate() --'
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any

from forebay.core.sampling import Grammar, SamplingParams


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as chat templates take them, and how the template is to be filled in. ``continue_final``: the text goes on from the
    last message; ``variables``: what the caller says to the template by name."""

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Texts:
    """Plain text, one for each prompt."""

    texts: tuple[str, ...]
    add_special: bool = True


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Token ids, one list for each prompt."""

    lists: tuple[list[int], ...]


Source = Conversation | Texts | TokenLists


class ToolChoice(StrEnum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tools:
    """``functions`` in OpenAI's form, at least one. ``forced``: the one that must be called; then
    ``choice`` is REQUIRED. ``parallel``: an answer may have several calls."""

    functions: tuple[Mapping[str, Any], ...]
    choice: ToolChoice
    forced: str | None
    parallel: bool


class UsageWish(Enum):
    """In which chunks of a stream the token counts come."""

    NONE = auto()
    LAST = auto()
    ALWAYS = auto()


@dataclass(frozen=True, slots=True)
class PromptWish:
    """What of the prompt comes back. ``echo``: its text before the output's; ``scores``: what was thought of its tokens;
    ``alone``: nothing is to be generated."""

    echo: bool = False
    scores: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """``params.max_tokens`` is what was asked, None where nothing was; then ``default_tokens`` counts, and what fits without it.

    ``model``: the name that was asked for, None for whatever is there. ``streamed``, ``usage``: how the answer goes out.
    ``form``: what an answer that is no call must be.
    """

    source: Source
    params: SamplingParams
    model: str | None = None
    default_tokens: int | None = None
    salt: bytes = b""
    no_store: bool = False
    priority: int = 0
    streamed: bool = False
    usage: UsageWish = UsageWish.NONE
    tools: Tools | None = None
    form: Grammar | None = None
    prompt: PromptWish = field(default_factory=PromptWish)
