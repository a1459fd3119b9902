"""Typed access to the keys of one config.json, with one line for a value that is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.models.errors import ModelError


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """An explicit null counts as absent, as in Hugging Face configs. `where` names the source."""

    raw: Mapping[str, Any]
    where: str

    def size(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"{self.where}: {key} is {value!r}; it must be a whole number above 0; check the file"
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ModelError(
                f"{self.where}: {key} is {value!r}; it must be a number above 0; check the file"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(
                f"{self.where}: {key} is {value!r}; it must be true or false; check the file"
            )
        return value
