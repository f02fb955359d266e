"""shoal: train models across many ranks, over any transport."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import (
        activations,
        checkpoint,
        comm,
        compression,
        elastic,
        errors,
        optim,
        sharding,
        strategies,
    )
    from shoal.api import as_distributed, init, load, run, sampler, save, verify, world

__version__ = "0.1.0.dev0"

_MODULES = (
    "activations",
    "checkpoint",
    "comm",
    "compression",
    "elastic",
    "errors",
    "optim",
    "sharding",
    "strategies",
)

__all__ = [
    "__version__",
    "activations",
    "as_distributed",
    "checkpoint",
    "comm",
    "compression",
    "elastic",
    "errors",
    "init",
    "load",
    "optim",
    "run",
    "sampler",
    "save",
    "sharding",
    "strategies",
    "verify",
    "world",
]


if not TYPE_CHECKING:  # type checkers would take any name for one that is here

    def __getattr__(name: str) -> Any:
        """Imports on first use: ``shoal --help`` need not wait for torch."""
        if name in _MODULES:
            return import_module(f"shoal.{name}")
        if name in __all__:
            found = globals()[name] = getattr(import_module("shoal.api"), name)
            return found
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What users may use, so that tab completion shows it before it was imported."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
