"""Git LFS pointers: the few lines that stand for a large file where a clone did not fetch it."""

from __future__ import annotations

from pathlib import Path

from forebay.models.errors import ModelError

_FIRST = b"version https://git-lfs.github.com/spec/"
_BYTES_MAX = 1024  # of a pointer, as its specification says


def refuse_pointers(path: Path) -> None:
    """Raises ModelError where the file, or one of the directory, is a pointer."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        pointers = [file for file in files if _is_pointer(file)]
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if pointers:
        more = f" (and {len(pointers) - 1} more beside it)" if len(pointers) > 1 else ""
        raise ModelError(
            f"{pointers[0]}: is a Git LFS pointer{more}, not the file itself; fetch it with "
            "`git lfs pull`, or download the model again"
        )


def _is_pointer(file: Path) -> bool:
    if not file.is_file() or not len(_FIRST) < file.stat().st_size <= _BYTES_MAX:
        return False
    with file.open("rb") as stream:
        return stream.read(len(_FIRST)) == _FIRST
