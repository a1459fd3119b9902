"""Cache directories of tests, in which what is compiled for this machine is there already.

A library's name says what it was made of (sources, compiler, flags, CPU), so the user's own are as good
as new ones; compiling them anew for each module's servers took most of their start.
"""

from pathlib import Path

from forebay.cache import cache_directory

_NATIVE = cache_directory() / "native"  # before any test sets another directory


def warm_cache(path: Path) -> Path:
    """``path``, made if need be."""
    path.mkdir(parents=True, exist_ok=True)
    _NATIVE.mkdir(parents=True, exist_ok=True)
    link = path / "native"
    if not link.is_symlink():
        link.symlink_to(_NATIVE)
    return path
