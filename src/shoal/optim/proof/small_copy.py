"""Small copies of an optimizer, on tiny parameters, for a proof to train."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.torch_internals.trees import tree_leaves

_RATE = 0.01
_SIZES = (6, 4, 3, 2)
_PLAIN = (bool, int, float, str, type(None))
Make = Callable[[Sequence[nn.Parameter]], Optimizer]


def similar(
    optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[nn.Parameter], **changes: Any
) -> Optimizer:
    """A new optimizer of the same class, with a parameter group's settings."""
    known = inspect.signature(type(optimizer).__init__).parameters
    kept = {key: value for key, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
    settings = {
        key: value for key, value in (kept | group).items() if key in known and key != "params"
    }
    # A group may have keys of its own that no argument stands for. A count of steps begins anew.
    own = {
        key: copy.deepcopy(value)
        for key, value in group.items()
        if key not in known and key not in optimizer.defaults and key not in ("params", "step")
    }
    made = type(optimizer)([{**own, "params": list(parameters)}], **{**settings, **changes})
    # What the constructor takes under another name, or was set after it.
    vars(made).update(kept)
    wanted = {key: value for key, value in (group | changes).items() if key != "params"}
    for made_group in made.param_groups:
        known_to_it = {key: value for key, value in wanted.items() if key in made_group}
        made_group.update(copy.deepcopy(known_to_it))
    return made


def maker(optimizer: Optimizer, group: dict[str, Any]) -> Make:
    """Makes small copies with a parameter group's settings.

    They are on the CPU, whatever the model is on. With a rate of zero, as warm-up begins with, some
    would do nothing.
    """
    changes: dict[str, Any] = {"lr": _rate(group["lr"])} if "lr" in group else {}
    if group.get("capturable"):  # steps and the rate are on a GPU, and refused elsewhere
        changes = {"capturable": False, "lr": _RATE}
    return lambda parameters: similar(optimizer, group, parameters, **changes)


def _rate(given: Any) -> Any:
    return torch.full_like(given, _RATE, device="cpu") if isinstance(given, Tensor) else _RATE


@dataclass(frozen=True)
class SampleData:
    """Values to train with."""

    values: Sequence[Tensor]  # what the parameters begin with
    gradients: Sequence[Sequence[Tensor]]  # for each step those of all parameters

    @classmethod
    def drawn(
        cls, shapes: Sequence[Sequence[int]], dtype: torch.dtype, seed: int, scales: Sequence[float]
    ) -> SampleData:
        """Random ones; gradients have one scale for each step."""
        generator = torch.Generator().manual_seed(seed)

        def draw(scale: float) -> list[Tensor]:
            drawn = [torch.randn(tuple(shape), generator=generator) for shape in shapes]
            return [(scale * each).to(dtype) for each in drawn]

        return cls(draw(1.0), [draw(scale) for scale in scales])

    def only(self, which: int) -> SampleData:
        """Of one parameter."""
        return SampleData([self.values[which]], [[step[which]] for step in self.gradients])

    def repeated(self, num_steps: int) -> SampleData:
        """The same gradients again and again."""
        steps = [self.gradients[number % len(self.gradients)] for number in range(num_steps)]
        return SampleData(self.values, steps)

    def cut(self) -> SampleData:
        """All of them in one row, cut in places that are no borders between parameters."""
        return SampleData(_cut(self.values), [_cut(step) for step in self.gradients])

    def start(self) -> list[nn.Parameter]:
        """Parameters with these values."""
        return [nn.Parameter(value.clone(), requires_grad=True) for value in self.values]


def _cut(tensors: Sequence[Tensor]) -> list[Tensor]:
    row = torch.cat([each.reshape(-1) for each in tensors])
    first = min(5, row.numel())
    sizes = [first, (row.numel() - first) // 3]
    return [each.clone() for each in row.split([*sizes, row.numel() - sum(sizes)])]


def shapes_for(parameters: Sequence[nn.Parameter]) -> list[tuple[int, ...]]:
    """Tiny ones, of as many dimensions as the parameters have; two are the same."""
    dims = sorted({min(parameter.dim(), len(_SIZES)) for parameter in parameters}) or [1, 2]
    shapes = [_SIZES[:dim] for dim in dims]
    return [*shapes, shapes[-1]]


@dataclass
class Trained:
    """What training has led to."""

    parameters: list[Tensor]  # their values
    state: list[Any]  # the tensors and numbers of their state, parameter by parameter
    numbers: dict[str, Any]  # numbers among the optimizer's own attributes and hyperparameters

    @classmethod
    def of(cls, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Trained:
        """As it is now."""
        state = [leaf for each in parameters for leaf in tree_leaves(optimizer.state.get(each, {}))]
        return cls([each.detach() for each in parameters], state, dict(numbers_of(optimizer)))


def numbers_of(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """What an optimizer has besides the state of parameters, as far as it is plain."""
    options = {**optimizer.param_groups[0]}
    options.pop("params")
    for name, value in (*vars(optimizer).items(), *options.items()):
        plain = [leaf for leaf in tree_leaves(value) if isinstance(leaf, _PLAIN)]
        if plain:
            yield name, plain


def show(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    """Gives parameters their gradients."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
