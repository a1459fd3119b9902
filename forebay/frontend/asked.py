"""What one caller asks for, checked and frozen: the same value whether it came as a body over HTTP or from a script.

body ---parse--> Asked ---prompts.encode--> Prompts ---assemble--> Work ---> Generation
LLM.generate() --'
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from forebay.core.sampling import SamplingParams


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


class UsageWish(Enum):
    """In which chunks of a stream the token counts come."""

    NONE = auto()
    LAST = auto()
    ALWAYS = auto()


@dataclass(frozen=True, slots=True)
class Asked:
    """``params.max_tokens`` is what was asked, None where nothing was; then ``default_tokens`` counts, and what fits without it.

    ``model``: the name that was asked for, None for whatever is there. ``streamed``, ``usage``: how the answer goes out.
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
