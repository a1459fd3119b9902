"""The files of a GGUF model: one, or the parts that a large one was split into.

Parts are named `NAME-00001-of-00003.gguf` and so on; the first holds the metadata. Each says its
number and the count of all (`split.no`, `split.count`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.models.errors import ModelError

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_PARTS_MAX = 10_000


def model_name(file: Path) -> str:
    """The file's name without what names a part of it."""
    found = _PART.fullmatch(file.stem)
    return found["name"] if found else file.stem


def gguf_parts(file: Path) -> list[Path]:
    """All files of the model whose first, or only, file is `file`, in order.

    Raises ModelError for a part that is not the first, and for one that lacks another.
    """
    found = _PART.fullmatch(file.stem)
    count = int(found["count"]) if found else 1
    if found is None or not 1 < count <= _PARTS_MAX:
        return [file]
    parts = [
        file.with_name(f"{found['name']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    if int(found["number"]) != 1:
        raise ModelError(
            f"{file}: is part {int(found['number'])} of {count} of a split model; give its first "
            f"part, {parts[0].name}"
        )
    missing = [part.name for part in parts if not part.is_file()]
    if missing and file.is_file():
        raise ModelError(
            f"{file}: is a part of a split model, and {len(missing)} of its {count} parts are not "
            f"beside it ({missing[0]}{', ...' if len(missing) > 1 else ''}); fetch them all"
        )
    return parts


def check_part(part: Path, number: int, count: int, metadata: Mapping[str, Any]) -> None:
    """Raises ModelError where the part says another number or count than its place among `count`."""
    said_number, said_count = metadata.get("split.no", 0), metadata.get("split.count", 0) or 1
    if said_count != count and count == 1:
        raise ModelError(
            f"{part}: is part {int(said_number) + 1} of {said_count} of a split model, which its "
            f"name does not say; name the parts NAME-00001-of-{said_count:05}.gguf and so on"
        )
    if (said_number, said_count) != (number, count):
        raise ModelError(
            f"{part}: says that it is part {int(said_number) + 1} of {said_count} of a split model "
            f"and its name that it is part {number + 1} of {count}; fetch the parts again"
        )
