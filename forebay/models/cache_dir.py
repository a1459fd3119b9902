"""Where this project keeps what it makes once for a user: FOREBAY_CACHE_DIR, else the platform's."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """The user's cache directory; it may not exist yet."""
    override = os.environ.get("FOREBAY_CACHE_DIR")
    return Path(override or platformdirs.user_cache_dir("forebay", appauthor=False))
