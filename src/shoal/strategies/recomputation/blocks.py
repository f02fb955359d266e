"""The blocks of a model: found as members of its lists of modules, or by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from shoal.strategies.recomputation.policy import Policy
from shoal.torch_internals.modules import uncompiled

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module, policy: Policy) -> dict[str, nn.Module]:
    """The blocks of a model by name: those that were named, or the members of its lists.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> list(find_blocks(nn.Sequential(block(), block(), nn.Linear(2, 1)), Policy()))
        ['0', '1']
    """
    if policy.blocks is not None:
        return _named_blocks(model, policy.blocks)
    found = {module: name for name, module in _members(model, "")}  # each once
    if not found:
        raise ValueError(
            f"no blocks were found in {type(model).__name__}: its lists of modules have no members "
            "that consist of several layers. Name the blocks whose activations are to be computed "
            'again: activations=shoal.activations.Policy("full", blocks=["encoder", "decoder.*"])'
        )
    return {name: module for module, name in found.items()}


def blocks_within(model: nn.Module, policy: Policy, units: Sequence[str]) -> Policy:
    """The policy with blocks that are no larger than these parts of the model, which a rank has.

    Blocks that the user has named stay as they are.
    """
    if policy.blocks is not None:
        return policy
    found: list[str] = []
    for block in find_blocks(model, policy):
        inside = [name for name in units if name.startswith(f"{block}.")]
        parts = [name for name in inside if _is_composed(model.get_submodule(name))]
        found += parts or [block]
    return replace(policy, blocks=tuple(found))


def _members(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The members of a model's lists that consist of several layers, the outermost ones."""
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        inside = list(_members(child, full_name)) if isinstance(child, _LISTS) else []
        if isinstance(module, _LISTS) and not inside and _is_composed(child):
            yield full_name, child
        else:
            yield from inside or _members(child, full_name)


def _is_composed(module: nn.Module) -> bool:
    module = uncompiled(module)
    is_callable = type(module).forward is not nn.Module.forward
    has_weights = any(True for _ in module.parameters())
    return is_callable and has_weights and any(True for _ in module.children())


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matches = {name: each for name, each in modules.items() if fnmatchcase(name, pattern)}
        # "layers.*" means the layers, not also what is in them.
        depth = min((name.count(".") for name in matches), default=0)
        matches = {name: each for name, each in matches.items() if name.count(".") == depth}
        if not matches:
            some = ", ".join(list(modules)[:8])
            raise ValueError(
                f"activations: no part of the model is called {pattern!r}; there are {some}, ..."
            )
        found |= matches
    for name in found:
        outer = next((each for each in found if name.startswith(f"{each}.")), None)
        if outer is not None:
            raise ValueError(
                f"activations: block {name!r} is inside of block {outer!r}, and would be computed "
                "twice again; name one of them"
            )
    return found
