"""The user's cache directory: converted models, compiled code, the default store, flight records.

FOREBAY_CACHE_DIR names it; else it is the platform's (XDG_CACHE_HOME, or under HOME), if that is this
user's own: what another user may write is neither run nor filled. It may be read-only: what lies there
is used all the same, and each of its users says what it does without.
"""

import os
from pathlib import Path

import platformdirs

VARIABLE = "FOREBAY_CACHE_DIR"


class NoCache(OSError):
    """There is no cache directory. One line that says why and what to do."""


def cache_directory() -> Path:
    """It may have yet to be made. Raises ``NoCache``."""
    if override := os.environ.get(VARIABLE):
        return Path(override)
    try:
        directory = Path(platformdirs.user_cache_dir("forebay", appauthor=False))
    except RuntimeError:
        raise NoCache(f"this user has no home directory; set {VARIABLE}") from None
    there, owner = _nearest(directory)
    if owner not in (os.geteuid(), 0):
        raise NoCache(f"{there} is another user's (uid {owner}); set {VARIABLE}")
    return directory


def why_not_writable(directory: Path) -> str:
    """Why no file can be made in a directory that may have yet to be made itself; else empty."""
    there, _ = _nearest(directory)
    if not there.is_dir():
        return f"{there} is not a directory"
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        return f"{there} cannot be written by this user (uid {os.geteuid()})"
    return ""


def _nearest(path: Path) -> tuple[Path, int]:
    """The path, or what of it is there already; and whose that is."""
    path = path.absolute()
    for there in (path, *path.parents):
        try:
            return there, there.stat().st_uid
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            return there, os.geteuid()  # whoever's it is, access tells
    return Path("/"), 0
