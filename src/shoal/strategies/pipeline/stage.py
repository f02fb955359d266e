"""One rank's part of a pipeline, and which rank has which parameter.

The modules of other ranks stay in the model, with their attributes, but without memory: each of
their parameters is an absent value. The parameters come back while the whole model is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.strategies.pipeline.learning.absent_value import absent_like
from shoal.strategies.pipeline.learning.chunk_forward import CallInterceptor
from shoal.strategies.pipeline.learning.route import ValueId
from shoal.strategies.pipeline.units import Unit
from shoal.torch_internals.modules import buffers_of, parameters_of


class Stage:
    """One rank's part of a pipeline.

    Attributes:
        module: The user's module, of which this rank has some units.
        group: The ranks of the pipeline, in order.
        num_chunks: The chunks of the model, over all ranks.
        is_last: Whether this rank has the last chunk, and so the model's output.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Backend,
        num_chunks: int,
        units: list[Unit],
        chunk_of_unit: Mapping[str, int],
    ) -> None:
        """Intercepts the calls of the units; ``parameters.release()`` frees what others have."""
        self.module, self.group, self.rank = module, group, group.rank
        self.num_chunks, self.chunk_of_unit = num_chunks, chunk_of_unit
        self.rank_of_chunk = [chunk % group.size for chunk in range(num_chunks)]
        self.is_last = self.rank_of_chunk[-1] == self.rank
        self.parameters = StageParameters(module, units, chunk_of_unit, group.rank, group.size)
        self.interceptor = CallInterceptor(module, units, self.parameters.listed_in)


# Where a parameter is registered: a module and its attribute.
_Registration = tuple[nn.Module, str]


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
        self._rank, self._stages = rank, stages
        self._units, self._chunk_of_unit = units, chunk_of_unit
        self.by_name: dict[str, nn.Parameter] = dict(model.named_parameters())
        """All of the model's, by their first name; those of other ranks have no memory."""
        self.names = {id(parameter): name for name, parameter in self.by_name.items()}
        """The first name of each parameter, by its identity."""
        self._registrations = _registrations(model, self.names)
        self._orders = {module: list(parameters_of(module)) for module in model.modules()}
        chunk_of = _module_chunks(model, units, chunk_of_unit)
        self._chunk = {n: chunk_of[self._registrations[n][0][0]] for n in self.by_name}
        self._buffer_chunk = {
            name: chunk_of[module]
            for prefix, module in model.named_modules()
            for name in (f"{prefix}.{own}" if prefix else own for own in buffers_of(module))
        }
        every = model.named_parameters(remove_duplicate=False)
        self._first_name = {name: self.names[id(parameter)] for name, parameter in every}
        self.foreign = [name for name in self.by_name if not self.is_own(name)]
        """The names of the parameters that other ranks have."""
        self.own = [parameter for name, parameter in self.by_name.items() if self.is_own(name)]

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

    def listed_in(self, module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
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
                found[names[id(parameter)]].append((module, attribute))
    return found


def _module_chunks(
    model: nn.Module, units: Sequence[Unit], chunk_of_unit: Mapping[str, int]
) -> dict[nn.Module, int]:
    """The chunk of every module: its unit's, or that of the first unit inside of it."""
    found: dict[nn.Module, int] = {}
    for unit in units:
        for part in unit.module.modules():
            found.setdefault(part, chunk_of_unit[unit.name])
    return {
        module: next((found[part] for part in module.modules() if part in found), 0)
        for module in model.modules()
    }


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
