"""Safetensors directories: read the tensors, or the slices, that one shard needs, and nothing else.

A `Checkpoint` maps the files and copies out what is asked for, so a process never holds layers of another stage.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forebay.models.config import load_config
from forebay.models.errors import ModelError

# What a KV page means also depends on how this code lays it out; raise this when that changes (DESIGN 4.1).
LAYOUT_VERSION = 1

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_EDGE_BYTES = 64 * 1024
_HEADER_BYTES_MAX = 100 * 1000 * 1000  # the limit of the safetensors library itself
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """The weight files of one model directory, opened as they are needed. Use as a context manager.

    Raises ModelError when a file is missing, damaged, or lacks a tensor that the index promises.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file_of: Mapping[str, Path] | None = None
        self._open: dict[Path, Any] = {}
        files = weight_files(self.path)
        if files[0].name == _SINGLE and len(files) == 1:
            self._single: Path | None = files[0]
        else:
            self._single = None
            self._file_of = _read_index(self.path)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files; tensors already read stay valid."""
        self._open.clear()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """Copy one tensor, or its `rows` / `columns`, out of the files.

        `shape` is the whole tensor's; the answer has the slice's shape, in `dtype`, contiguous, on the CPU.
        Raises ModelError when the tensor is missing, has another shape or no floating point numbers, or its file is damaged.
        """
        path = self._locate(name)
        try:
            part = self._handle(path).get_slice(name)
            found = tuple(part.get_shape())
            if found != shape:
                raise ModelError(f"{path}: tensor {name} has shape {found}, config.json asks for {shape}; fetch the model again")
            row = slice(rows.start, rows.stop) if rows is not None else slice(None)
            tensor = part[row] if columns is None else part[row, columns.start : columns.stop]
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {name} cannot be read ({error}); fetch the model again") from None
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{path}: tensor {name} is {tensor.dtype}; allowed: float32, bfloat16, float16; use an unquantised model"
            )
        result: Tensor = tensor.to(dtype).contiguous()
        # A slice may alias the mapping; the copy is what lets the file be unmapped.
        return result.clone() if result.data_ptr() == tensor.data_ptr() else result

    def has(self, name: str) -> bool:
        """Whether the files hold a tensor of this name."""
        if self._file_of is not None:
            return name in self._file_of
        assert self._single is not None
        return name in self._handle(self._single).keys()  # noqa: SIM118 - the handle is no mapping

    def _locate(self, name: str) -> Path:
        if self._file_of is not None and name in self._file_of:
            path = self._file_of[name]
        elif self._file_of is None and self._single is not None:
            path = self._single
        else:
            raise ModelError(f"{self.path / _INDEX}: no file for tensor {name}; fetch the model again")
        if name not in self._handle(path).keys():  # noqa: SIM118 - the handle is no mapping
            raise ModelError(f"{path}: tensor {name} is missing; fetch the model again")
        return path

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError:
                raise ModelError(f"{path}: no such file; {_INDEX} names it; fetch the model again") from None
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: damaged or truncated ({error}); fetch the model again") from None
        return self._open[path]


def weight_files(path: Path) -> list[Path]:
    """The weight files of a model directory, sorted by name. Raises ModelError when there are none, or one is missing."""
    path = Path(path)
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if not (path / _INDEX).is_file():
        raise ModelError(
            f"{path}: has neither {_SINGLE} nor {_INDEX}; weights must be safetensors; convert the model or check the path"
        )
    files = sorted(set(_read_index(path).values()))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: no such file; {_INDEX} names it; fetch the model again")
    return files


def fingerprint(path: Path) -> bytes:
    """32 bytes that name a model's KV: equal for equal models, different when anything that shapes the KV differs.

    SHA-256 over the canonical config, the layout version, and each weight file's name, size, header and first and
    last 64 KiB (DESIGN 4.1). Every part is length-framed. Raises ModelError when the model cannot be read.
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
                raise ModelError(f"{file}: damaged or truncated (bad header length); fetch the model again")
            header = stream.read(header_bytes)
            first = stream.read(_EDGE_BYTES)
            stream.seek(max(8 + header_bytes, size - _EDGE_BYTES))
            last = stream.read(_EDGE_BYTES)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error}); fetch the model again") from None
    return file.name.encode(), struct.pack("<Q", size), header, first, last


def _read_index(path: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index of a sharded checkpoint says."""
    index = path / _INDEX
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a safetensors index ({error!r}); fetch the model again") from None
    for file in files.values():
        if Path(file).name != file:
            raise ModelError(f"{index}: names {file!r}, which is not a file in its own directory; fetch the model again")
    if not files:
        raise ModelError(f"{index}: names no tensor; fetch the model again")
    return {name: path / file for name, file in files.items()}
