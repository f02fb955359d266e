"""shoal: train models across many ranks, over any transport."""

from shoal.api import init, run, world

__version__ = "0.1.0"

__all__ = ["__version__", "init", "run", "world"]
