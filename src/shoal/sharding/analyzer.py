"""`ParameterAnalyzer`: which parameters travel together."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

MIN_GROUP_BYTES = 1 << 20
# More groups than this cost more in latency than they save in memory.
_MOST_GROUPS = 48

_Kind = tuple[torch.dtype, torch.device, str]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are gathered, used and freed together."""

    names: tuple[str, ...]  # full names, in registration order; a tied parameter has its first
    parameters: tuple[nn.Parameter, ...]  # the parameters of these names

    @property
    def dtype(self) -> torch.dtype:
        """The one dtype of all of them."""
        return self.parameters[0].dtype

    @property
    def num_elements(self) -> int:
        """Elements of all of them."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return self.num_elements * self.dtype.itemsize


class ParameterAnalyzer:
    """Groups a model's layers so that many small ones do not mean many messages.

    A group closes when it has reached ``max(min_group_bytes, total / 48)``; a layer larger
    than that is a group of its own. Only dtype and device separate groups. A parameter that
    layers of several groups use (a tied embedding) is a group of its own.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(1000)))
        >>> len(ParameterAnalyzer(model).groups) <= 50
        True
    """

    def __init__(
        self,
        model: nn.Module,
        min_group_bytes: int = MIN_GROUP_BYTES,
        apart: Mapping[int, str] | None = None,
    ) -> None:
        """Looks at the model's registration order only, so every rank finds the same groups.

        Args:
            model: Whose parameters to group.
            min_group_bytes: When a group may close.
            apart: Parameters, by id, that are held in a way of their own; only those of the same
                way share groups.
        """
        if min_group_bytes < 0:
            raise ValueError(f"min_group_bytes must not be negative; got {min_group_bytes}")
        self._apart = apart or {}
        layers = list(_layers(model, self._kind))
        self.total_bytes = sum(layer.num_bytes for layer in _without_repeats(layers))
        self.threshold_bytes = max(min_group_bytes, -(-self.total_bytes // _MOST_GROUPS))
        self.groups = self._closed(layers)

    def _closed(self, layers: list[ParameterGroup]) -> list[ParameterGroup]:
        tentative = self._collect(_without_repeats(layers))
        shared = _used_by_several(layers, tentative)
        if not shared:
            return tentative
        unshared = [_without(layer, shared) for layer in _without_repeats(layers)]
        own = [ParameterGroup((name,), (parameter,)) for name, parameter in shared.items()]
        groups = self._collect([layer for layer in unshared if layer.parameters])
        return sorted(groups + own, key=_position(layers))

    def _collect(self, layers: list[ParameterGroup]) -> list[ParameterGroup]:
        groups: list[ParameterGroup] = []
        open_groups: dict[_Kind, list[ParameterGroup]] = {}
        for layer in layers:
            kind = self._kind(layer.parameters[0])
            if layer.num_bytes > self.threshold_bytes:
                groups.append(layer)
                continue
            members = open_groups.setdefault(kind, [])
            members.append(layer)
            if sum(member.num_bytes for member in members) >= self.threshold_bytes:
                groups.append(_merged(open_groups.pop(kind)))
        groups += [_merged(members) for members in open_groups.values()]
        return sorted(groups, key=_position(layers))

    def _kind(self, parameter: nn.Parameter) -> _Kind:
        return parameter.dtype, parameter.device, self._apart.get(id(parameter), "")

    def __str__(self) -> str:
        """A table: a line for each group."""
        lines = [
            f"{len(self.groups)} groups, {_sized(self.total_bytes)} in all, "
            f"closed at {_sized(self.threshold_bytes)}"
        ]
        for number, group in enumerate(self.groups):
            span = group.names[0]
            if len(group.names) > 1:
                span += f" ... {group.names[-1]}"
            dtype = str(group.dtype).removeprefix("torch.")
            lines.append(
                f"{number:4}  {_sized(group.num_bytes):>10}  {len(group.names):5} parameters  "
                f"{dtype:9}  {span}"
            )
        return "\n".join(lines)


def _layers(model: nn.Module, kind_of: Callable[[nn.Parameter], _Kind]) -> Iterator[ParameterGroup]:
    """Each module's own parameters, by kind; a tied one in each module that has it."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        kinds: dict[_Kind, list[nn.Parameter]] = {}
        for parameter in module.parameters(recurse=False):
            kinds.setdefault(kind_of(parameter), []).append(parameter)
        for parameters in kinds.values():
            names = tuple(canonical[id(parameter)] for parameter in parameters)
            yield ParameterGroup(names, tuple(parameters))


def _without_repeats(layers: list[ParameterGroup]) -> list[ParameterGroup]:
    seen: set[str] = set()
    unique = []
    for layer in layers:
        fresh = _without(layer, seen)
        seen.update(layer.names)
        if fresh.parameters:
            unique.append(fresh)
    return unique


def _without(layer: ParameterGroup, names: Container[str]) -> ParameterGroup:
    kept = [
        (name, parameter)
        for name, parameter in zip(layer.names, layer.parameters, strict=True)
        if name not in names
    ]
    return ParameterGroup(tuple(name for name, _ in kept), tuple(p for _, p in kept))


def _used_by_several(
    layers: list[ParameterGroup], groups: list[ParameterGroup]
) -> dict[str, nn.Parameter]:
    """Parameters that occur in layers of more than one group."""
    group_of = {name: number for number, group in enumerate(groups) for name in group.names}
    counts: dict[str, int] = {}
    users: dict[str, nn.Parameter] = {}
    for layer in layers:
        for name, parameter in zip(layer.names, layer.parameters, strict=True):
            counts[name] = counts.get(name, 0) + 1
            if counts[name] > 1 and len(groups[group_of[name]].names) > 1:
                users[name] = parameter
    return users


def _merged(layers: list[ParameterGroup]) -> ParameterGroup:
    names = tuple(name for layer in layers for name in layer.names)
    return ParameterGroup(names, tuple(p for layer in layers for p in layer.parameters))


def _position(layers: list[ParameterGroup]) -> Callable[[ParameterGroup], int]:
    order: dict[str, int] = {}
    for layer in layers:
        for name in layer.names:
            order.setdefault(name, len(order))
    return lambda group: order[group.names[0]]


def _sized(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
