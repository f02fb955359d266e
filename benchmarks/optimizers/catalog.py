"""Every optimizer class of torch, timm and pytorch_optimizer, by a short name."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType

from torch.optim import Optimizer

PACKAGES = {"torch": "torch.optim", "timm": "timm.optim", "po": "pytorch_optimizer"}
"""Where to look, by the prefix of the names."""


def find_classes() -> dict[str, type[Optimizer]]:
    """For example ``{"torch.SGD": torch.optim.SGD, ...}``; packages first, then names in order."""
    found: dict[str, type[Optimizer]] = {}
    # timm last: whoever asks whether it is installed must not find half of it.
    for prefix in sorted(PACKAGES, key=lambda prefix: prefix == "timm"):
        classes = {each for module in _modules(PACKAGES[prefix]) for each in _classes(module)}
        found |= {f"{prefix}.{each.__name__}": each for each in classes}
    order = list(PACKAGES)
    return dict(sorted(found.items(), key=lambda item: (order.index(_prefix(item[0])), item[0])))


def _prefix(name: str) -> str:
    return name.partition(".")[0]


def _modules(package: str) -> Iterator[ModuleType]:
    if package.startswith("timm"):
        _open_without_its_models(package)
    parent = importlib.import_module(package)
    yield parent
    for info in pkgutil.walk_packages(parent.__path__, f"{package}."):
        try:
            yield importlib.import_module(info.name)
        except ImportError:  # timm's functions that choose an optimizer for one of its models
            continue


def _open_without_its_models(package: str) -> None:
    """Makes the modules of a package importable, not the package itself.

    timm's own ``__init__`` imports all its models, and these torchvision. The optimizers need
    neither.
    """
    path: list[str] | None = None
    for name in (package.partition(".")[0], package):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            raise ModuleNotFoundError(f"{name} must be installed for the sweep: run `make sweep`")
        path = list(spec.submodule_search_locations or [])
        module = ModuleType(name)
        module.__spec__, module.__path__ = spec, path
        sys.modules[name] = module


def _classes(module: ModuleType) -> Iterator[type[Optimizer]]:
    """Those that the package of the module defines, and that a user may choose."""
    package = module.__name__.partition(".")[0]
    for each in vars(module).values():
        if not inspect.isclass(each) or not issubclass(each, Optimizer) or each is Optimizer:
            continue
        is_own = each.__module__.startswith(package) and "<locals>" not in each.__qualname__
        if is_own and not inspect.isabstract(each):
            yield each
