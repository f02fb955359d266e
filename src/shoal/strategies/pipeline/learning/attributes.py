"""What units leave in attributes of their modules: losses on the side, attention maps.

Whoever reads them later in forward may be on another rank. So they count as part of what a unit
returns: ranks that leave the unit out find them where it would have put them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn


def tensors_in(module: nn.Module) -> dict[str, Tensor]:
    """The tensors in attributes of a module and those below it; no parameters, no buffers.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 2))
        >>> module[0].loss = torch.zeros(())
        >>> list(tensors_in(module))
        ['0.loss']
    """
    return {
        f"{path}.{name}": value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    }


def left_since(module: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in attributes that are others than before."""
    now = tensors_in(module)
    return {name: value for name, value in now.items() if before.get(name) is not value}


def read(module: nn.Module, names: Collection[str]) -> dict[str, Any]:
    """What is in some attributes now."""
    return {name: vars(part).get(attribute) for name, part, attribute in _places(module, names)}


def write(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Puts tensors into attributes."""
    for name, part, attribute in _places(module, values):
        vars(part)[attribute] = values[name]


def _places(module: nn.Module, names: Collection[str]) -> list[tuple[str, nn.Module, str]]:
    split = [(name, *name.rpartition(".")[::2]) for name in names]
    return [(name, module.get_submodule(path), attribute) for name, path, attribute in split]
