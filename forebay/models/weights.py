"""Safetensors directories: read the tensors, or the slices, that one shard needs, and nothing else.

A `Checkpoint` maps the files and copies out what is asked for, so a process never holds layers of another stage.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forebay.models.errors import ModelError
from forebay.models.fingerprint import (
    INDEX_NAME,
    SINGLE_NAME,
    read_index,
    weight_files,
)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """The weight files of one model directory, opened as they are needed. Use as a context manager.

    Raises ModelError when a file is missing, damaged, or lacks a tensor that the index promises.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._open: dict[Path, Any] = {}
        single = self.path / SINGLE_NAME
        self._single = single if single.is_file() else None
        if self._single is None and not (self.path / INDEX_NAME).is_file():
            weight_files(self.path)  # says what is missing
        # Files of the index are looked for when they are needed: a stage can do without those of other stages.
        self._file_of = {} if self._single is not None else read_index(self.path)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
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
                raise ModelError(
                    f"{path}: tensor {name} has shape {found}, config.json asks for {shape}; fetch the model again"
                )
            row = slice(rows.start, rows.stop) if rows is not None else slice(None)
            tensor = part[row] if columns is None else part[row, columns.start : columns.stop]
        except SafetensorError as error:
            raise ModelError(
                f"{path}: tensor {name} cannot be read ({error}); fetch the model again"
            ) from None
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{path}: tensor {name} is {tensor.dtype}; allowed: float32, bfloat16, float16; use an unquantised model"
            )
        result: Tensor = tensor.to(dtype).contiguous()
        if not _is_finite(result):
            raise ModelError(
                f"{path}: tensor {name} holds NaN or infinity in {str(dtype).removeprefix('torch.')}; "
                "fetch the model again"
                + ("" if dtype == torch.float32 else ", or use --dtype float32")
            )
        # A slice may alias the mapping; the copy is what lets the file be unmapped.
        return result.clone() if result.data_ptr() == tensor.data_ptr() else result

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        path = self._single or self._file_of.get(name)
        return path is not None and name in self._handle(path).keys()  # noqa: SIM118

    def _locate(self, name: str) -> Path:
        path = self._single or self._file_of.get(name)
        if path is None:
            raise ModelError(
                f"{self.path / INDEX_NAME}: no file for tensor {name}; fetch the model again"
            )
        if name not in self._handle(path).keys():  # noqa: SIM118 - the handle is no mapping
            raise ModelError(f"{path}: tensor {name} is missing; fetch the model again")
        return path

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError:
                raise ModelError(
                    f"{path}: no such file; {INDEX_NAME} names it; fetch the model again"
                ) from None
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path}: damaged or truncated ({error}); fetch the model again"
                ) from None
        return self._open[path]


def _is_finite(tensor: Tensor) -> bool:
    """One pass: the extremes of what holds a NaN are NaN."""
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
