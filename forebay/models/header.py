"""What a safetensors file says that it holds, checked against its size. Needs no torch.

8 bytes: length of the header | header: JSON, tensor -> dtype, shape, place | the numbers
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.models.errors import ModelError

_HEADER_BYTES_MAX = 100 * 1000 * 1000  # the limit of the safetensors library itself
_LFS_POINTER = b"version https://git-lfs"
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32,
         "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor. ``dtype`` as the file spells it, ``F32`` say."""

    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, Entry]:
    """Raises ModelError when the file is damaged, cut off, or no safetensors file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            lead = stream.read(len(_LFS_POINTER))
            if lead == _LFS_POINTER:
                raise ModelError(
                    f"{file}: is a pointer of Git LFS and not the file itself; run git lfs pull"
                )
            length = struct.unpack("<Q", lead[:8])[0] if len(lead) >= 8 else -1
            if not 0 <= length <= min(size - 8, _HEADER_BYTES_MAX):
                raise _damaged(file, "bad header length")
            stream.seek(8)
            text = stream.read(length)
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file; fetch the model again") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); check the path") from None
    try:
        tensors = json.loads(text)
        tensors.pop("__metadata__", None)
        entries = {str(name): _entry(said) for name, said in tensors.items()}
        end = max((int(said["data_offsets"][1]) for said in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise _damaged(file, f"bad header: {type(error).__name__}") from None
    if 8 + length + end != size:
        raise _damaged(file, f"{size} bytes; its header says {8 + length + end}")
    return entries


def _entry(said: Any) -> Entry:
    """Raises an error of Python's own for what is no entry."""
    dtype, shape = str(said["dtype"]), tuple(int(size) for size in said["shape"])
    start, stop = said["data_offsets"]
    if dtype in _BITS and (stop - start) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError("a tensor's place does not fit its shape")
    return Entry(dtype, shape)


def _damaged(file: Path, why: str) -> ModelError:
    return ModelError(f"{file}: damaged or truncated ({why}); fetch the model again")
