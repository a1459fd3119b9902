"""Which files hold a model's weights, and a short name for what they hold. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from forebay.models.config import load_config
from forebay.models.errors import ModelError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# What a KV page means also depends on how this code lays it out; raise this when that changes.
LAYOUT_VERSION = 1

_EDGE_BYTES = 64 * 1024
_HEADER_BYTES_MAX = 100 * 1000 * 1000  # the limit of the safetensors library itself


def weight_files(path: Path) -> list[Path]:
    """The weight files of a model directory, sorted by name. Raises ModelError when there are none, or one is missing."""
    path = Path(path)
    if (path / SINGLE_NAME).is_file():
        return [path / SINGLE_NAME]
    if not (path / INDEX_NAME).is_file():
        raise ModelError(
            f"{path}: has neither {SINGLE_NAME} nor {INDEX_NAME}; weights must be safetensors; convert them or check the path"
        )
    files = sorted(set(read_index(path).values()))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: no such file; {INDEX_NAME} names it; fetch the model again")
    return files


def fingerprint(path: Path) -> bytes:
    """32 bytes that name a model's KV: equal for equal models, different when anything that shapes the KV differs.

    SHA-256 over the canonical config, the layout version, and each weight file's name, size, header and first and
    last 64 KiB. Every part is length-framed. Raises ModelError when the model cannot be read.
    """
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)

    add(b"forebay-model-%d" % LAYOUT_VERSION)
    add(load_config(path).canonical())
    for file in weight_files(path):
        for part in _file_marks(file):
            add(part)
    return digest.digest()


def _file_marks(file: Path) -> tuple[bytes, ...]:
    """Name, size, header and both edges of one safetensors file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            lead = stream.read(8)
            header_bytes = struct.unpack("<Q", lead)[0] if len(lead) == 8 else -1
            if not 0 <= header_bytes <= min(size - 8, _HEADER_BYTES_MAX):
                raise ModelError(
                    f"{file}: damaged or truncated (bad header length); fetch the model again"
                )
            header = stream.read(header_bytes)
            first = stream.read(_EDGE_BYTES)
            stream.seek(max(8 + header_bytes, size - _EDGE_BYTES))
            last = stream.read(_EDGE_BYTES)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error}); fetch the model again") from None
    return file.name.encode(), struct.pack("<Q", size), header, first, last


def read_index(path: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index of a sharded checkpoint says."""
    index = path / INDEX_NAME
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (
        OSError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise ModelError(
            f"{index}: not a safetensors index ({error!r}); fetch the model again"
        ) from None
    for file in files.values():
        if Path(file).name != file:
            raise ModelError(
                f"{index}: names {file!r}, which is not a file in its own directory; fetch the model again"
            )
    if not files:
        raise ModelError(f"{index}: names no tensor; fetch the model again")
    return {name: path / file for name, file in files.items()}
