"""What each rank of a tensor group has of a model's parameters, and how to put them together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy

import torch
from torch import Tensor, nn

from shoal.sharding.split import Split
from shoal.strategies.settings import Ownership
from shoal.strategies.tensor.plan.tensor_plan import TensorPlan
from shoal.strategies.tensor.region import TensorGroup


class TensorParts:
    """The parameters of one model that are split, and who has which part.

    Attributes:
        group: The ranks that share the layers.
        splits: This rank's part of each parameter that is split, by its first name.

    Example:
        >>> parts = parallelize(module, mesh.group("tensor"))
        >>> with parts.whole():
        ...     torch.save(module.state_dict(), "whole.pt")
    """

    def __init__(
        self,
        module: nn.Module,
        group: TensorGroup,
        plan: TensorPlan,
        splits: Mapping[str, tuple[Split, ...]],
    ) -> None:
        """``splits``: every rank's part of each parameter."""
        self._group, self.group, self.plan = group, group.backend, plan
        self._all_splits = dict(splits)
        self._by_name = {name: module.get_parameter(name) for name in splits}
        self._names = {id(parameter): name for name, parameter in self._by_name.items()}
        self._whole_names = [n for n, p in module.named_parameters() if id(p) not in self._names]

    @property
    def splits(self) -> dict[str, Split]:
        """This rank's part of each parameter that is split."""
        return {name: splits[self.group.rank] for name, splits in self._all_splits.items()}

    @property
    def ownership(self) -> Ownership:
        """For norms: what is split counts everywhere, what everybody has counts once."""
        return Ownership((self.group,), dict.fromkeys(self._whole_names, self.group.size))

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of a parameter that is split; None for one that is not."""
        return self._names.get(id(parameter))

    def is_even(self, name: str) -> bool:
        """Whether all ranks have as much of a parameter."""
        return len({split.local_shape for split in self._all_splits[name]}) == 1

    def shape_of(self, name: str) -> torch.Size:
        """The shape of the whole."""
        return self._all_splits[name][0].shape

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that is laid out like a parameter."""
        return self._all_splits[name][self.group.rank].take(whole)

    def join(self, name: str, part: Tensor) -> Tensor:
        """The whole of which each rank has a part; all ranks of the group call it."""
        splits = self._all_splits[name]
        flat: Tensor = self.group.all_gather(part.detach().reshape(-1))
        whole = torch.empty(splits[0].shape, dtype=part.dtype, device=part.device)
        pieces = flat.split([split.local_shape.numel() for split in splits])
        for split, piece in zip(splits, pieces, strict=True):
            split.put(piece.view(split.local_shape), whole)
        return whole

    def among(self, names: Collection[str]) -> TensorParts:
        """Only some of the parameters: a stage of a pipeline has those of its layers."""
        some = copy(self)
        some._all_splits = {n: each for n, each in self._all_splits.items() if n in names}
        some._by_name = {n: p for n, p in self._by_name.items() if n in names}
        some._names = {id(parameter): name for name, parameter in some._by_name.items()}
        return some

    def joined(
        self, gradients: Iterable[tuple[str, Tensor | None]]
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Parts of gradients, by name, become wholes; all ranks of the group call it."""
        for name, gradient in gradients:
            if gradient is None or name not in self._all_splits:
                yield name, gradient
            else:
                yield name, self.join(name, gradient)

    @contextmanager
    def whole(self, *, keep_changes: bool = True) -> Iterator[None]:
        """Inside, parameters are whole on every rank of the group; what is changed is kept."""
        if self._group.is_whole:
            yield
            return
        own = {name: parameter.data for name, parameter in self._by_name.items()}
        for name, part in own.items():
            self._by_name[name].data = self.join(name, part)
        self._group.is_whole = True
        try:
            yield
        finally:
            self._group.is_whole = False
            for name, part in own.items():
                parameter = self._by_name[name]
                if keep_changes:
                    part.copy_(self.take(name, parameter.data))
                parameter.data = part
