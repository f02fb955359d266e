"""Which rank of a pipeline has which parameter, and what the modules of other ranks show instead.

The modules of other ranks stay in the model, with their attributes, but without memory: each of
their parameters is an absent value. The parameters come back while the whole model is wanted.

[Note: listed parameters]
While the model's own forward or a loss runs, ``parameters()`` lists those of all ranks: a penalty
over all weights, or a look at the dtype of the first, means the whole model. Optimizers, clipping
and states ask at other times, and mean this rank's. Parameters of other ranks are absent values, or
borrowed if their numbers were used when the route was learned. Losses are not learned: a loss that
uses parameters of other ranks ends in an error, and not in the sum over one rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.strategies.pipeline.learning.absent_value import absent_like
from shoal.strategies.pipeline.learning.route import ValueId
from shoal.strategies.pipeline.stages.units import Unit
from shoal.torch_internals.modules import buffers_of, named_members, parameters_of


class _Registration(NamedTuple):
    """Where a tensor is registered."""

    module: nn.Module
    attribute: str


class StageParameters:
    """The model's parameters and buffers: which rank has which, and where they are registered."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        chunk_of_unit: Mapping[str, int],
        rank: int,
        stages: int,
    ) -> None:
        """Looks at the whole model; `release` frees what other ranks have."""
        self._model, self._rank, self._stages = model, rank, stages
        self._units, self._chunk_of_unit = units, chunk_of_unit
        self.by_name: dict[str, nn.Parameter] = dict(model.named_parameters())
        """All of the model's, by their first name; those of other ranks have no memory."""
        self.names: dict[int, str] = {id(p): name for name, p in self.by_name.items()}
        """The first name of each parameter, by its identity."""
        self._registrations = _registrations(model, self.names)
        self._orders = {module: list(parameters_of(module)) for module in model.modules()}
        chunk_of = _module_chunks(model, units, chunk_of_unit)
        self._chunk = {n: chunk_of[self._registrations[n][0].module] for n in self.by_name}
        self._buffer_chunk = {
            name: chunk_of[module]
            for prefix, module in model.named_modules()
            for name in (f"{prefix}.{own}" if prefix else own for own in buffers_of(module))
        }
        every = model.named_parameters(remove_duplicate=False)
        self._first_name = {name: self.names[id(parameter)] for name, parameter in every}
        self.foreign = [name for name in self.by_name if not self.is_own(name)]
        """The names of the parameters that other ranks have."""

    def rank_of(self, name: str) -> int:
        """The rank that has a parameter."""
        return self._chunk[name] % self._stages

    def is_own(self, name: str) -> bool:
        """Whether this rank has a parameter."""
        return self.rank_of(name) == self._rank

    def first_name(self, key: str) -> str:
        """The first name of an entry of the model's state: tied parameters have several."""
        return self._first_name.get(key, key)

    def rank_of_key(self, key: str) -> int:
        """The rank that has an entry of the model's state."""
        name = self.first_name(key)
        if name in self.by_name:
            return self.rank_of(name)
        return self._buffer_chunk.get(name, 0) % self._stages

    def names_in(self, chunk: int) -> list[str]:
        """The parameters of a chunk."""
        return [name for name, its_chunk in self._chunk.items() if its_chunk == chunk]

    def names_of(self, module: nn.Module) -> list[str]:
        """The first names of a module's parameters, on whichever rank they are."""
        parts = {id(part) for part in module.modules()}
        return [
            name
            for name, registrations in self._registrations.items()
            if any(id(module) in parts for module, _ in registrations)
        ]

    # Removing and restoring -----------------------------------------------------------------

    def release(self) -> None:
        """Frees what other ranks have."""
        self.remove_foreign()
        for unit in self._units:
            if unit.is_in_chain and self._chunk_of_unit[unit.name] % self._stages != self._rank:
                _free_buffers(unit.module, unit.name)

    def remove_foreign(self) -> None:
        """Frees the parameters of other ranks, at first and after they were restored."""
        for name in self.foreign:
            parameter = self.by_name[name]
            for module, attribute in self._registrations[name]:
                parameters_of(module).pop(attribute, None)
            self.show_absent(name)
            # Code that kept the parameter and computes with it gets no number.
            invalid = torch.full((), _invalid(parameter.dtype), dtype=parameter.dtype)
            parameter.data = invalid.to(parameter.device).expand(parameter.shape)
            parameter.grad = None

    def show_absent(self, name: str) -> None:
        """Lets modules show an absent value for a parameter of another rank."""
        parameter = self.by_name[name]
        source = ValueId.of_parameter(name)
        self.show(name, absent_like(parameter.shape, parameter.dtype, parameter.device, source))

    def show(self, name: str, value: Tensor) -> None:
        """Lets modules show some value for a parameter of another rank."""
        for module, attribute in self._registrations[name]:
            module.__dict__[attribute] = value

    def restore(self, name: str, value: Tensor) -> None:
        """Registers a parameter of another rank again, with a value."""
        parameter = self.by_name[name]
        parameter.data = value
        for module, attribute in self._registrations[name]:
            module.__dict__.pop(attribute, None)
            parameters_of(module)[attribute] = parameter
            own = parameters_of(module)
            for key in self._orders[module]:  # each to the end: the order that the module had
                if key in own:
                    own[key] = own.pop(key)

    # Listing --------------------------------------------------------------------------------

    def list_all_while(self, is_in_users_code: Callable[[], bool]) -> None:
        """Lets modules list all parameters in the user's code; see [Note: listed parameters]."""

        def named_parameters(
            module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, Any]]:
            if is_in_users_code():
                yield from named_members(module, self._listed_in, prefix, recurse, remove_duplicate)
            else:
                yield from type(module).named_parameters(module, prefix, recurse, remove_duplicate)

        for part in self._model.modules():
            # A method, not a function that knows the module: copies of a part list their own.
            vars(part)["named_parameters"] = MethodType(named_parameters, part)

    def _listed_in(self, module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
        """A module's own parameters in their order, with what is shown for those of other ranks."""
        present = parameters_of(module)
        order = self._orders.get(module, [])
        for key in (*order, *(key for key in present if key not in order)):
            yield key, present[key] if key in present else vars(module).get(key)


def _registrations(model: nn.Module, names: Mapping[int, str]) -> dict[str, list[_Registration]]:
    found: dict[str, list[_Registration]] = {name: [] for name in names.values()}
    for module in model.modules():
        for attribute, parameter in parameters_of(module).items():
            if parameter is not None:
                found[names[id(parameter)]].append(_Registration(module, attribute))
    return found


def _module_chunks(
    model: nn.Module, units: Sequence[Unit], chunk_of_unit: Mapping[str, int]
) -> dict[nn.Module, int]:
    """The chunk of every module: its unit's, or that of the first unit inside of it."""
    found: dict[nn.Module, int] = {}
    for unit in units:
        for part in unit.module.modules():
            found.setdefault(part, chunk_of_unit[unit.name])
    return {module: _chunk_below(module, found) for module in model.modules()}


def _chunk_below(module: nn.Module, found: Mapping[nn.Module, int]) -> int:
    below: Iterator[int] = (found[part] for part in module.modules() if part in found)
    return next(below, 0)


def _free_buffers(module: nn.Module, unit: str) -> None:
    for part in module.modules():
        for name, buffer in list(buffers_of(part).items()):
            if buffer is not None:
                del buffers_of(part)[name]
                source = ValueId.of_parameter(f"{unit} ({name})")
                part.__dict__[name] = absent_like(buffer.shape, buffer.dtype, buffer.device, source)


def _invalid(dtype: torch.dtype) -> float | int | bool:
    """NaN, or the value that is easiest to notice in a dtype without NaN."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max
