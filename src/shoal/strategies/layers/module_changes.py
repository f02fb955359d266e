"""What a strategy changes about a module in place, so that it can be undone.

Layers are split, units are intercepted and parameters are freed in the user's own modules. Where
ranks come and go a module becomes what it was, without values, and is then changed for the new
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.torch_internals.modules import buffers_of, parameters_of
from shoal.torch_internals.tensors import hooks_after_gradient, hooks_before_gradient

_OF_TORCH = vars(nn.Module()).keys()
_MISSING: Any = object()


class _ModuleLook(NamedTuple):
    """One module: its class, its attributes, and what its dicts have, by attribute."""

    kind: type[nn.Module]
    own: Mapping[str, Any]
    contents: Mapping[str, Mapping[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> _ModuleLook:
        own = dict(vars(module))
        # The user's own dicts are the user's: what code keeps in them is no change of a strategy.
        dicts = {key: own[key] for key in _OF_TORCH & own.keys() if isinstance(own[key], dict)}
        return cls(type(module), own, {key: dict(value) for key, value in dicts.items()})


class _ParameterLook(NamedTuple):
    """One parameter: its class, and what it takes to give it memory."""

    kind: type[Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _ParameterLook:
        return cls(type(parameter), parameter.shape, parameter.dtype, parameter.device)


class ModuleChanges:
    """Takes note of what is changed about a module and all modules in it; can undo that.

    What else has become of them since stays: modes, attributes and hooks that the user has set.
    Buffers that a strategy frees are kept, for a rank that is to have them later.

    Example:
        >>> changes = ModuleChanges(module)
        >>> with changes.noted():
        ...     parallelize(module, group)
        >>> changes.undo()
    """

    def __init__(self, module: nn.Module) -> None:
        """Nothing is changed yet."""
        self._module = module
        self._before: dict[nn.Module, _ModuleLook] = {}
        self._after: dict[nn.Module, _ModuleLook] = {}
        self._memory: dict[nn.Parameter, _ParameterLook] = {}
        self._new_hooks: dict[nn.Parameter, set[int]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around all changes, also those that end in an error."""
        self._memory = {each: _ParameterLook.of(each) for each in self._module.parameters()}
        hooks = {each: _hooks(each) for each in self._memory}
        self._before = self._look()
        try:
            yield
        finally:
            self._after = self._look()
            self._new_hooks = {each: _hooks(each) - known for each, known in hooks.items()}

    def _look(self) -> dict[nn.Module, _ModuleLook]:
        return {module: _ModuleLook.of(module) for module in self._module.modules()}

    def undo(self) -> None:
        """The module is what it was; parameters are whole, and zero.

        They are so again by a second call, should somebody have given them other memory since.
        """
        for module, before in self._before.items():
            _undo(module, before, self._after.get(module, before))
        for parameter, memory in self._memory.items():
            parameter.__class__ = memory.kind  # type: ignore[assignment]
            parameter.grad = None
            parameter.data = torch.zeros(memory.shape, dtype=memory.dtype, device=memory.device)
            for hooks in (hooks_before_gradient(parameter), hooks_after_gradient(parameter)):
                for key in hooks.keys() & self._new_hooks[parameter]:
                    del hooks[key]
        self._before, self._after = {}, {}


def _undo(module: nn.Module, before: _ModuleLook, after: _ModuleLook) -> None:
    if before.kind is not after.kind:
        module.__class__ = before.kind
    attributes = vars(module)
    for key in before.own.keys() | after.own.keys():
        old, new = before.own.get(key, _MISSING), after.own.get(key, _MISSING)
        if old is _MISSING and new is not _MISSING:
            attributes.pop(key, None)
        elif old is not new:
            attributes[key] = old
    for key, content in before.contents.items():
        _undo_dict(attributes[key], content, after.contents[key])
    for own in (parameters_of(module), buffers_of(module)):
        for name in own:
            attributes.pop(name, None)  # what stood for one that another rank has


def _undo_dict(
    now: MutableMapping[Any, Any], before: Mapping[Any, Any], after: Mapping[Any, Any]
) -> None:
    """Takes out what was put in, and puts in what was taken out, where it was."""
    kept = dict(now)
    now.clear()
    for key, value in before.items():
        if key in kept:
            is_changed = kept[key] is after.get(key)
            now[key] = value if is_changed else kept[key]
        elif key not in after:
            now[key] = value
    now.update({key: value for key, value in kept.items() if key not in {**before, **after}})


def _hooks(parameter: Tensor) -> set[int]:
    return {*hooks_before_gradient(parameter), *hooks_after_gradient(parameter)}
