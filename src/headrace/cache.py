"""Where Headrace keeps what can be made again: one directory below the user's cache. Knows nothing of what is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(name: str) -> Path:
    """Where one kind of thing is, in a directory or a file of this name; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "headrace" / name
