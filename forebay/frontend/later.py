"""Settings that Forebay will have and has not yet: refused by name, never accepted and ignored."""

from collections.abc import Mapping
from typing import Any

from forebay.settings import SettingsError

# Name -> the value that asks for nothing, where there is one.
LATER: dict[str, str | None] = {
    "dp": "1",
    "nnodes": "1",
    "node_rank": "0",
    "dist_init_addr": None,
    "role": "unified",
    "dynamic_chunking": None,
}


def refuse_later(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` without names of `LATER` that ask for nothing. Raises ``SettingsError`` for those that ask for something."""
    kept: dict[str, Any] = {}
    for name, value in given.items():
        if name not in LATER:
            kept[name] = value
        elif value is not None and str(value) != LATER[name]:
            neutral = LATER[name]
            hint = "leave it out" if neutral is None else f"leave it out or say {neutral}"
            raise SettingsError(f"not available yet: --{name.replace('_', '-')} {value}; {hint}")
    return kept
