"""The interface of what is compared: a model that is trained on global batches, step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.operation.partition import offsets, split_sizes
from shoal.optim.optimizer import needs_closure
from shoal.strategies import ShardedModel
from shoal.strategies.training import count_items
from shoal.torch_internals.trees import tree_map

Batch = tuple[Any, Any]
Build = Callable[[], tuple[nn.Module, Any, Iterable[Any], Callable[[Any, Any], Tensor]]]


class Observed(NamedTuple):
    """One thing to compare: the loss, or a gradient or parameter of some name."""

    kind: str
    name: str
    value: Tensor | None
    scale: float = 1.0
    """What counts as large: an absolute error is measured against it."""


@dataclass
class Setup:
    """What a user's ``build`` returns, checked."""

    model: nn.Module
    optimizers: list[Optimizer]
    batches: list[Batch]
    loss_fn: Callable[[Any, Any], Tensor]

    @classmethod
    def build(cls, build: Build, num_steps: int) -> Setup:
        """Calls ``build``; as many batches as there are steps are taken from what it returns."""
        built: Any = build()
        if not isinstance(built, tuple | list) or len(built) != 4:
            raise TypeError(
                "build() must return (model, optimizer, batches, loss_fn); got "
                f"{type(built).__name__}"
            )
        model, optimizer, batches, loss_fn = built
        if isinstance(model, ShardedModel) or not isinstance(model, nn.Module):
            raise TypeError(f"build() must return a plain module; got a {type(model).__name__}")
        optimizers = list(optimizer) if isinstance(optimizer, tuple | list) else [optimizer]
        return cls(model, optimizers, take(batches, num_steps), loss_fn)


class Trainer(ABC):
    """Trains step by step, and shows what there is to compare."""

    setup: Setup

    @abstractmethod
    def compute(self, step: int) -> Tensor:
        """Forward and backward of a step's global batch; returns its mean loss."""

    @abstractmethod
    def gradients(self) -> Iterator[Observed]:
        """Whole gradients by name, in the order of the model's parameters."""

    @abstractmethod
    def parameters(self) -> Iterator[Observed]:
        """Whole parameters by name, in the order of the model's."""

    def observe(self, step: int) -> Iterator[Observed]:
        """One step of training, as a stream of everything that can be compared."""
        yield Observed("loss", "", self.compute(step))
        yield from self.gradients()
        self.update(step)
        yield from self.parameters()
        self.forget()

    def update(self, step: int) -> None:
        """The optimizers' step; some want to compute the loss themselves, and again."""

        def closure() -> Tensor:
            self.forget()
            return self.compute(step)

        for optimizer in self.setup.optimizers:
            with self.stepping(optimizer):
                if needs_closure(optimizer):
                    optimizer.step(closure)  # type: ignore[arg-type]
                else:
                    optimizer.step()

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Around one optimizer's step."""
        return nullcontext()

    def forget(self) -> None:
        """No gradients any more."""
        for optimizer in self.setup.optimizers:
            optimizer.zero_grad()
        self.setup.model.zero_grad()


# Global batches ---------------------------------------------------------------------------


def take(batches: Iterable[Any], count: int) -> list[Batch]:
    """The first ``count`` batches, from the beginning again where there are fewer."""
    taken = [_pair(batch) for batch in islice(batches, count)]
    if not taken:
        raise ValueError("build() must return at least one batch to train on; got none")
    return [taken[index % len(taken)] for index in range(count)]


def _pair(batch: Any) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            f"a batch must be a pair (inputs, targets); got {type(batch).__name__}"
            + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        )
    return batch[0], batch[1]


def share(batch: Batch, rank: int, num_ranks: int) -> Batch:
    """A rank's contiguous rows of every tensor that has the batch's; other things whole.

    Example:
        >>> share((torch.arange(5), torch.arange(5)), 0, 2)
        (tensor([0, 1, 2]), tensor([0, 1, 2]))
    """
    num_rows = count_items(batch[0])
    low, high = offsets(split_sizes(num_rows, num_ranks))[rank : rank + 2]

    def cut(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == num_rows
        return leaf[low:high] if has_rows else leaf

    return tree_map(cut, batch[0]), tree_map(cut, batch[1])
