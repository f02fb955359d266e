"""shoal: train models across many ranks, over any transport."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import comm, errors, sharding
    from shoal.api import init, run, world

__version__ = "0.1.0.dev0"

__all__ = ["__version__", "comm", "errors", "init", "run", "sharding", "world"]


def __getattr__(name: str) -> Any:
    """Imports on first use: ``shoal --help`` need not wait for torch."""
    if name in ("comm", "errors", "sharding"):
        return import_module(f"shoal.{name}")
    if name in __all__:
        return getattr(import_module("shoal.api"), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
