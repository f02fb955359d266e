"""What modules keep, to be put back after they were called for a trial.

Code that caches (tables of rotary embeddings, masks), counts or collects would otherwise go on with
what a trial left there: of other lengths, in another precision.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from shoal.torch_internals.modules import buffers_of, parameters_of
from shoal.torch_internals.trees import tree_leaves

_OF_TORCH = vars(nn.Module()).keys() - {"training"}
_CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)


class Attributes:
    """The attributes of a module and all modules in it, and what is in those that are containers.

    Example:
        >>> before = Attributes(block)
        >>> block(torch.zeros(2, 3, 8))
        >>> before.restore()
    """

    def __init__(self, module: nn.Module) -> None:
        """Takes them."""
        self.parts = [(each, _own(each)) for each in module.modules()]
        self._contents = [
            (value, value.copy())
            for _, own in self.parts
            for value in own.values()
            if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        """Everything is as it was."""
        for value, content in self._contents:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(content)
        for module, own in self.parts:
            for key in _own(module).keys() - own.keys():
                del vars(module)[key]
            vars(module).update(own)


class Snapshot(Attributes):
    """The attributes, buffers and parameters of a module and all modules in it.

    The parameters are the objects, not their values: `functional_call` leaves others behind in a
    module that has several names.

    Example:
        >>> before = Snapshot(block)
        >>> block(torch.zeros(2, 3, 8))
        >>> before.restore()
    """

    def __init__(self, module: nn.Module) -> None:
        """Takes it."""
        super().__init__(module)
        self._registered = [_registered(each) for each, _ in self.parts]
        self._tensors = [leaf for _, own in self.parts for leaf in _tensors(own)]

    def restore(self) -> None:
        """Everything is as it was."""
        super().restore()
        for registered in self._registered:
            for now, before in registered:
                now.clear()
                now.update(before)

    def new_tensors(self) -> list[Tensor]:
        """Tensors that modules keep now and did not before."""
        known = set(map(id, self._tensors))
        return [
            leaf
            for module, _ in self.parts
            for leaf in _tensors(_own(module))
            if id(leaf) not in known
        ]


def _registered(module: nn.Module) -> list[tuple[Any, dict[str, Any]]]:
    """Where a module has its buffers and its parameters, and which."""
    return [(each, dict(each)) for each in (buffers_of(module), parameters_of(module))]


def _own(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _OF_TORCH}


def _tensors(own: dict[str, Any]) -> Iterator[Tensor]:
    yield from (leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor))
