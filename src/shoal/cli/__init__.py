"""The `shoal` command."""

from __future__ import annotations

from shoal.cli.main import main

__all__ = ["main"]
