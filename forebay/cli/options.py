"""Command-line options out of the settings table, so that neither can drift from the other.

Every option is text here and is checked by `settings.resolve`, which words the errors of all three sources alike.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.frontend.later import LATER
from forebay.settings import Field, fields

# Options of `LATER` that take no value.
_SWITCHES = ("dynamic_chunking",)
CONFIG_HELP = "TOML file of settings; the environment (FOREBAY_PAGE_SIZE=32) and flags go before it"


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command(settings, config, ...)`` one option for each setting; they arrive as the dict ``settings``, as text.

    What is not available yet has a hidden option, so that it can be refused in a clear line (`frontend.later`).
    """
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != "settings"
    ]
    generated = [_parameter(field.name, _annotation(field)) for field in fields()]
    hidden = [
        _parameter(name, _later_annotation(name), False if name in _SWITCHES else None)
        for name in LATER
    ]
    names = {parameter.name for parameter in (*generated, *hidden)}

    def with_settings(**given: Any) -> None:
        settings = {
            name: value
            for name, value in given.items()
            if name in names and value not in (None, False)
        }
        command(
            settings=settings, **{name: value for name, value in given.items() if name not in names}
        )

    with_settings.__doc__ = command.__doc__
    with_settings.__name__ = command.__name__
    parameters = [*own, *generated, *hidden]
    with_settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_settings.__annotations__ = {
        parameter.name: parameter.annotation for parameter in parameters
    }
    return with_settings


ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help=CONFIG_HELP)]


def _annotation(field: Field) -> Any:
    default = "-" if field.default is None else field.default
    kind = "SIZE" if field.is_size else (field.setting.unit or field.name.split("_")[-1]).upper()
    text = f"{field.setting.why} [dim]\\[{default}][/dim]"
    if field.type is bool:
        return Annotated[bool | None, typer.Option(field.flag, *field.setting.aliases, help=text)]
    return Annotated[
        str | None, typer.Option(field.flag, *field.setting.aliases, metavar=kind, help=text)
    ]


def _later_annotation(name: str) -> Any:
    kind = bool if name in _SWITCHES else str | None
    return Annotated[kind, typer.Option("--" + name.replace("_", "-"), hidden=True)]


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
