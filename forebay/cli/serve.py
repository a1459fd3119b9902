"""`forebay serve`: settings from all their sources, then the server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.cli.errors import UserError
from forebay.frontend.later import refuse_later
from forebay.settings import resolve


def run_server(model: str, flags: Mapping[str, Any], config: Path | None) -> int:
    """The server's exit status. Raises ``SettingsError`` and ``UserError``."""
    settings = resolve(refuse_later(flags), config)
    from forebay.frontend.server import ListenError, serve
    from forebay.models.errors import ModelError
    from forebay.runtime.start_error import StartError

    try:
        return serve(model, settings)
    except (ListenError, ModelError, StartError) as error:
        raise UserError(str(error)) from error
