"""What a rank holds of a model that is spread over a pipeline: its parameters, under their names.

The modules of other ranks stay where they are, with their attributes, but without memory: each of
their parameters is an absent value. They come back for as long as somebody wants the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.strategies.pipeline.learning.absent_value import Source, absent_like
from shoal.strategies.pipeline.stages.units import Unit


@dataclass(frozen=True)
class Place:
    """Where a tensor is registered."""

    module: nn.Module
    attribute: str


class StageParameters:
    """The model's parameters and buffers: which rank has which, and where they are registered."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        chunks: Mapping[str, int],
        rank: int,
        stages: int,
    ) -> None:
        """Looks at the whole model; `release` frees what is not this rank's."""
        self._model, self._rank, self._stages = model, rank, stages
        self._units, self._chunks = units, chunks
        self.by_name: dict[str, nn.Parameter] = dict(model.named_parameters())
        """All of the model's, by their first name; those of others have no memory."""
        self.names: dict[int, str] = {id(p): name for name, p in self.by_name.items()}
        self._places = _places(model, self.names)
        self._orders = {module: list(module._parameters) for module in model.modules()}
        chunk_of = _module_chunks(model, units, chunks)
        self._chunk = {name: chunk_of[self._first_place(name).module] for name in self.by_name}
        self.buffers = {
            name: chunk_of[module]
            for prefix, module in model.named_modules()
            for name in (f"{prefix}.{own}" if prefix else own for own in module._buffers)
        }
        """The chunk that each buffer belongs to."""
        self.aliases = _aliases(model, self.names)
        """Every name that a parameter has, and its first one."""

    def _first_place(self, name: str) -> Place:
        return self._places[name][0]

    def rank_of(self, name: str) -> int:
        """Who has a parameter."""
        return self._chunk[name] % self._stages

    def names_in(self, chunk: int) -> list[str]:
        """The parameters of a chunk."""
        return [name for name, place in self._chunk.items() if place == chunk]

    def is_own(self, name: str) -> bool:
        """Whether this rank has a parameter."""
        return self.rank_of(name) == self._rank

    def own_names(self, module: nn.Module) -> list[str]:
        """The first names of a module's parameters, whoever has them."""
        parts = {id(part) for part in module.modules()}
        return [
            name
            for name, places in self._places.items()
            if any(id(place.module) in parts for place in places)
        ]

    def shown_in(self, module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
        """A module's own parameters in their order, with what is shown for those of others."""
        present = module._parameters
        order = self._orders.get(module, [])
        for key in (*order, *(key for key in present if key not in order)):
            yield key, present[key] if key in present else vars(module).get(key)

    # Going and coming -----------------------------------------------------------------------

    def release(self) -> None:
        """Frees what other ranks have."""
        for name in self.by_name:
            if not self.is_own(name):
                self._remove(name)
        for unit in self._units:
            if unit.is_link and self._chunks[unit.name] % self._stages != self._rank:
                _free_buffers(unit.module, unit.name)

    def _remove(self, name: str) -> None:
        parameter = self.by_name[name]
        for place in self._places[name]:
            place.module._parameters.pop(place.attribute, None)
        self.show_absent(name)
        # Whoever still computes with it gets no number.
        nothing = torch.full((), _nothing(parameter.dtype), dtype=parameter.dtype)
        parameter.data = nothing.to(parameter.device).expand(parameter.shape)
        parameter.grad = None

    def show_absent(self, name: str) -> None:
        """Lets a foreign parameter's places show an absent value."""
        parameter = self.by_name[name]
        source = Source(-1, 0, name)
        self.show(name, absent_like(parameter.shape, parameter.dtype, parameter.device, source))

    def show(self, name: str, value: Tensor) -> None:
        """Lets a foreign parameter's places show some value."""
        for place in self._places[name]:
            place.module.__dict__[place.attribute] = value

    def restore(self, name: str, value: Tensor) -> None:
        """Registers a foreign parameter again, with a value."""
        parameter = self.by_name[name]
        parameter.data = value
        for place in self._places[name]:
            place.module.__dict__.pop(place.attribute, None)
            place.module._parameters[place.attribute] = parameter
            order = [key for key in self._orders[place.module] if key in place.module._parameters]
            place.module._parameters = {key: place.module._parameters[key] for key in order}

    def remove_again(self, names: Sequence[str]) -> None:
        """Frees foreign parameters that were restored."""
        for name in names:
            self._remove(name)


def _places(model: nn.Module, names: Mapping[int, str]) -> dict[str, list[Place]]:
    places: dict[str, list[Place]] = {name: [] for name in names.values()}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append(Place(module, attribute))
    return places


def _aliases(model: nn.Module, names: Mapping[int, str]) -> dict[str, str]:
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[id(parameter)] for name, parameter in every}


def _module_chunks(
    model: nn.Module, units: Sequence[Unit], chunks: Mapping[str, int]
) -> dict[nn.Module, int]:
    """The chunk of every module: its unit's, or that of the first unit below it."""
    found: dict[nn.Module, int] = {}
    for unit in units:
        for part in unit.module.modules():
            found.setdefault(part, chunks[unit.name])
    return {module: _chunk_below(module, found) for module in model.modules()}


def _chunk_below(module: nn.Module, found: Mapping[nn.Module, int]) -> int:
    below: Iterator[int] = (found[part] for part in module.modules() if part in found)
    return next(below, 0)


def _free_buffers(module: nn.Module, unit: str) -> None:
    for part in module.modules():
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                del part._buffers[name]
                source = Source(-1, 0, f"{unit} ({name})")
                absent = absent_like(buffer.shape, buffer.dtype, buffer.device, source)
                part.__dict__[name] = absent


def _nothing(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max
