"""Typed access to the keys of one config.json, with one line for a value that is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.models.errors import ModelError

_LARGEST = 1e38  # the arithmetic is float32's, in which 4e38 is infinity


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
        """One above 0 that float32 can hold: no NaN and no infinity."""
        value = self.raw.get(key)
        value = default if value is None else value
        if not _is_finite(value) or value <= 0:
            raise ModelError(
                f"{self.where}: {key} is {value!r}; it must be a number above 0 and at most "
                f"{_LARGEST}; check the file"
            )
        return float(value)

    def weight(self, key: str) -> float:
        """As `number`, but 0 is allowed and is what an absent key means."""
        value = self.raw.get(key)
        return 0.0 if value is None or (_is_finite(value) and value == 0) else self.number(key, 0.0)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(
                f"{self.where}: {key} is {value!r}; it must be true or false; check the file"
            )
        return value


def _is_finite(value: Any) -> bool:
    """A number, and no NaN: a NaN is below nothing."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -_LARGEST <= value <= _LARGEST
    )
