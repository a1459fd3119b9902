"""Runs one scenario: commands in, each with the lines that say what came of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

INDENT = "    "
HERE = Path(__file__).parent


class Stage(Protocol):
    """What a scenario plays on."""

    def play(self, words: list[str]) -> list[str]:
        """Carry out one command; a line for each effect. Raises ``ScriptError``."""


class ScriptError(ValueError):
    """A command that means nothing."""


def scripts() -> list[Path]:
    return sorted(HERE.glob("*.txt"))


def rewrite(text: str, new_stage: Callable[[str], Stage]) -> str:
    """The script with the effects that its commands have now. The first command says what the scenario plays on."""
    stage: Stage | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(INDENT):
            continue
        lines.append(line.rstrip())
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            stage = stage or new_stage(words[0])
            lines += [INDENT + effect for effect in stage.play(words)]
        except (ScriptError, AssertionError, LookupError) as error:
            raise ScriptError(f"line {number}: {line.strip()}: {error!r}") from error
    return "\n".join(lines) + "\n"


def options(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Plain words, and those of the form ``name=value``."""
    plain = [word for word in words if "=" not in word]
    return plain, dict(word.split("=", 1) for word in words if "=" in word)


def tokens_of(text: str) -> list[int]:
    """``1..8`` (inclusive), ``5x3`` (5 three times), single tokens, joined by ``+``."""
    found: list[int] = []
    for part in text.split("+"):
        if ".." in part:
            first, last = map(int, part.split(".."))
            found += range(first, last + 1)
        elif "x" in part:
            token, count = map(int, part.split("x"))
            found += [token] * count
        else:
            found.append(int(part))
    return found


def listed(numbers: object) -> str:
    return " ".join(map(str, numbers))  # type: ignore[call-overload]
