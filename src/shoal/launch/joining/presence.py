"""A mark in the launcher's folder: this rank has joined a world."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shoal.launch.joining.environment import own_number


def leave_mark() -> None:
    """Notes that this rank has joined, if a launcher wants to know."""
    folder = os.environ.get("SHOAL_ERROR_DIR")
    if folder is not None:
        with contextlib.suppress(OSError):  # the launcher then knows a little less
            Path(folder, f"joined-{own_number()}").touch()


def has_mark(folder: Path, rank: int) -> bool:
    """Whether a rank left its mark there."""
    return (folder / f"joined-{rank}").exists()
