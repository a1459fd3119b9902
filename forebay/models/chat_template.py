"""A model's chat template: where it stands, and how it is run.

A template is a stranger's program. It runs in jinja2's sandbox, with a deadline that every loop and
every call looks at, and with a limit on the text that it makes; what it raises is a TemplateError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay.models.errors import ModelError

DEADLINE_S = 5.0
OUTPUT_CHARS_MAX = 64 << 20
_MESSAGE_CHARS_MAX = 400
_TICK = "_forebay_tick"
_JOIN = "_forebay_join"
_DEFAULT = "default"

# When the template at work in this thread must be done.
_deadline: ContextVar[float] = ContextVar("deadline")


class TemplateError(Exception):
    """The chat template cannot make a prompt of these messages. One line, without any path."""


class TemplateTimeout(TemplateError):
    """It ran longer than it may."""


class _Stop(Exception):
    """Raised inside a template that is over a limit; the text says which."""


class ChatTemplate:
    """One template, compiled. Thread-safe."""

    def __init__(self, source: str) -> None:
        """Raises TemplateError for a text that is no template."""
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError, OverflowError) as error:
            raise TemplateError(f"the model's chat template is malformed: {_line(error)}") from None

    def render(self, variables: Mapping[str, Any], deadline_s: float = DEADLINE_S) -> str:
        """Raises TemplateError, and TemplateTimeout once `deadline_s` are over."""
        token = _deadline.set(time.monotonic() + deadline_s)
        try:
            pieces: list[str] = []
            size = 0
            for piece in self._template.generate(variables):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
            return "".join(pieces)
        except _Late:
            raise TemplateTimeout(
                f"the model's chat template is not done with these messages after {deadline_s:g} s"
            ) from None
        except Exception as error:  # a stranger's program may raise anything
            raise TemplateError(
                f"the chat template refuses these messages: {_line(error)}"
            ) from None
        finally:
            _deadline.reset(token)


class _Late(_Stop):
    """Over its time."""


def _line(error: BaseException) -> str:
    """What an error says, as one line of bounded length."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= _MESSAGE_CHARS_MAX else said[:_MESSAGE_CHARS_MAX] + "..."


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which loops, calls and the operators that can make much of little are
    counted."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _limited(super()._parse(source, name, filename))

    def call(self, context: Any, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        _tick()
        return super().call(context, callee, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_size(len(left) + len(right))
        elif operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(count, int):
                    _check_size(len(text) * max(count, 0))
        elif operator == "**" and isinstance(right, int | float) and abs(right) > 1024:
            raise _Stop(f"a power of {right} is more than it may compute")
        return super().call_binop(context, operator, left, right)


def _limited(template: nodes.Template) -> nodes.Template:
    """Every loop looks at the clock first, and `~` looks at what it makes."""
    for loop in template.find_all(nodes.For):
        tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        loop.body.insert(0, nodes.Output([tick], lineno=loop.lineno))
    for joined in list(template.find_all(nodes.Concat)):
        # In place, since nobody knows the node's parent.
        joined.nodes = [nodes.Call(nodes.Name(_JOIN, "load"), joined.nodes, [], None, None)]
        joined.set_lineno(joined.lineno)
    template.set_environment(template.environment)  # type: ignore[arg-type]
    return template


def _tick() -> str:
    if time.monotonic() > _deadline.get():
        raise _Late
    return ""


def _join(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int) -> None:
    if size > OUTPUT_CHARS_MAX:
        raise _Stop(f"it makes more than {OUTPUT_CHARS_MAX} characters")


def _environment() -> _Sandbox:
    """With the settings and helpers of Hugging Face's apply_chat_template."""
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals[_TICK] = _tick
    environment.globals[_JOIN] = _join
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja2 reads

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter this does not escape HTML, as templates expect."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def read_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The model's templates by name, `default` for the usual one.

    `settings` is tokenizer_config.json: one text, or a list of named ones. Files count before it:
    chat_template.jinja, else chat_template.json, and additional_chat_templates/NAME.jinja.
    Raises ModelError for a file that cannot be read.
    """
    found = _named(settings.get("chat_template"), path / "tokenizer_config.json")
    in_json = path / "chat_template.json"
    if in_json.is_file():
        try:
            said = json.loads(_read(in_json))
        except json.JSONDecodeError as error:
            raise ModelError(
                f"{in_json}: cannot be read as JSON ({error}); fetch the model again"
            ) from None
        found |= _named(said.get("chat_template") if isinstance(said, dict) else said, in_json)
    if (path / "chat_template.jinja").is_file():
        found[_DEFAULT] = _read(path / "chat_template.jinja")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = _read(file)
    return found


def _named(value: Any, where: Path) -> dict[str, str]:
    """Templates as a text, a list of `{"name", "template"}`, or a mapping from name to text."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    if isinstance(value, list):
        try:
            value = {each["name"]: each["template"] for each in value}
        except (TypeError, KeyError):
            value = None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ModelError(
            f"{where}: chat_template is neither a text nor a list of named texts; fetch the model again"
        )
    return {str(name): text for name, text in value.items()}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read ({error}); fetch the model again") from None
