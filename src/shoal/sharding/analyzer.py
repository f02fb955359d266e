"""`ParameterAnalyzer`: which parameters travel together."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

MIN_GROUP_BYTES = 1 << 20
# More groups than this cost more in latency than they save in memory.
_MOST_GROUPS = 48
# A message of this size takes far longer than to begin one: twice as many cost nothing.
_LARGE_BYTES = 16 << 20

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
    than that is a group of its own. A module that fits into a group is not torn apart, for what it
    has is used together; so a group may close at half of that size, or reach one and a half of it.
    If that makes many small groups, more than 48 and one for each kind, the size is raised, to
    twice as much at most. Only dtype and device separate groups. A parameter that layers of
    several groups use (a tied embedding) is a group of its own.

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
        self._layers_of = _layers(model, self._kind)
        layers = [layer for members in self._layers_of.values() for layer in members]
        self.total_bytes = sum(layer.num_bytes for layer in _without_repeats(layers))
        num_kinds = len({self._kind(layer.parameters[0]) for layer in layers})
        least_bytes = max(min_group_bytes, -(-self.total_bytes // _MOST_GROUPS))
        for quarters in range(4, 9):
            self.threshold_bytes = least_bytes * quarters // 4
            self._pieces = list(_pieces(model, self.threshold_bytes, set()))
            joined, alone = self._closed(layers)
            is_few = len(joined) <= _MOST_GROUPS + num_kinds  # of each kind something is left over
            if is_few or least_bytes >= _LARGE_BYTES:
                break
        self.groups = sorted(joined + alone, key=_position(layers))

    def _closed(
        self, layers: list[ParameterGroup]
    ) -> tuple[list[ParameterGroup], list[ParameterGroup]]:
        """Groups of layers, and those of single parameters that several of the former use."""
        tentative = sorted(self._collect(()), key=_position(layers))
        shared = _used_by_several(layers, tentative)
        if not shared:
            return tentative, []
        alone = [ParameterGroup((name,), (parameter,)) for name, parameter in shared.items()]
        return self._collect(shared), alone

    def _collect(self, left_out: Iterable[str]) -> list[ParameterGroup]:
        """Groups of all parameters but some."""
        collectors: dict[_Kind, _Collector] = {}
        seen = set(left_out)
        for piece in self._pieces:
            if isinstance(piece, _Edge):
                for collector in collectors.values():
                    collector.pass_edge(piece)
                continue
            layers = [layer for module in piece for layer in self._layers_of[module]]
            for kind, layer in self._by_kind(_without_repeats(layers, seen)).items():
                collector = collectors.setdefault(kind, _Collector(self.threshold_bytes))
                collector.add(layer)
        return [group for collector in collectors.values() for group in collector.all()]

    def _by_kind(self, layers: list[ParameterGroup]) -> dict[_Kind, ParameterGroup]:
        kinds: dict[_Kind, list[ParameterGroup]] = {}
        for layer in layers:
            kinds.setdefault(self._kind(layer.parameters[0]), []).append(layer)
        return {kind: _merged(members) for kind, members in kinds.items()}

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


class _Edge(Enum):
    """Where a module begins or ends that is larger than a group."""

    BEGIN = "begin"
    END = "end"


def _pieces(
    module: nn.Module, limit: int, seen: set[nn.Module]
) -> Iterator[list[nn.Module] | _Edge]:
    """Modules whose parameters belong together, in registration order.

    One that is larger than the limit is taken apart: between its edges come what it has itself, and
    the pieces of its children. One that several others have belongs to the first.
    """
    if module in seen:
        return
    seen.add(module)
    if sum(parameter.nbytes for parameter in module.parameters()) <= limit:
        yield list(module.modules())
        return
    yield _Edge.BEGIN
    yield [module]
    for child in module.children():
        yield from _pieces(child, limit, seen)
    yield _Edge.END


class _Collector:
    """Joins pieces of one kind to groups, in their order."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._groups: list[ParameterGroup] = []
        self._open: list[ParameterGroup] = []
        self._open_bytes = 0
        # How many groups there were where each module began that is taken apart.
        self._begins: list[int] = []
        self._may_join = False  # the last group, which has no layer of its own behind it

    def add(self, piece: ParameterGroup) -> None:
        """The next one."""
        if piece.num_bytes > self._threshold:  # a single layer
            self._groups.append(piece)
            self._may_join = False
            return
        together = self._open_bytes + piece.num_bytes
        if self._is_half_full and together > self._threshold + self._threshold // 4:
            self._close()
        self._open.append(piece)
        self._open_bytes += piece.num_bytes
        if self._open_bytes >= self._threshold:
            self._close()

    def pass_edge(self, edge: _Edge) -> None:
        """At its end a large module closes its group: what comes next is not used with it."""
        if edge is _Edge.BEGIN:
            self._begins.append(len(self._groups))
            return
        begin = self._begins.pop() if self._begins else 0
        if self._is_half_full:
            self._close()
        elif self._open and self._may_join and len(self._groups) > begin:
            together = self._groups[-1].num_bytes + self._open_bytes
            if together <= self._threshold + self._threshold // 2:
                self._open.insert(0, self._groups.pop())
                self._close()

    def all(self) -> list[ParameterGroup]:
        """The groups, once there are no more pieces."""
        if self._open:
            self._close()
        return self._groups

    @property
    def _is_half_full(self) -> bool:
        return bool(self._open) and 2 * self._open_bytes >= self._threshold

    def _close(self) -> None:
        self._groups.append(_merged(self._open))
        self._open, self._open_bytes = [], 0
        self._may_join = True


def _layers(
    model: nn.Module, kind_of: Callable[[nn.Parameter], _Kind]
) -> dict[nn.Module, list[ParameterGroup]]:
    """Each module's own parameters, by kind; a tied one in each module that has it."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    layers: dict[nn.Module, list[ParameterGroup]] = {}
    for module in model.modules():
        kinds: dict[_Kind, list[nn.Parameter]] = {}
        for parameter in module.parameters(recurse=False):
            kinds.setdefault(kind_of(parameter), []).append(parameter)
        layers[module] = [
            ParameterGroup(tuple(canonical[id(each)] for each in members), tuple(members))
            for members in kinds.values()
        ]
    return layers


def _without_repeats(
    layers: list[ParameterGroup], seen: set[str] | None = None
) -> list[ParameterGroup]:
    """Without the names that were seen, to which it adds."""
    seen = set() if seen is None else seen
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
