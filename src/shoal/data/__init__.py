"""Loaders that are divided over the ranks: the third line of a distributed script."""

from shoal.data.loader import DividedLoader, divide

__all__ = ["DividedLoader", "divide"]
