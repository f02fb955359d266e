"""What a parameter shows for a gradient of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.strategies.gradients.sharded.operations import perform
from shoal.strategies.gradients.sharded.part import PartTensor
from shoal.torch_internals.autograd import is_in_backward
from shoal.torch_internals.tensors import allow_in_foreach, no_torch_function
from shoal.torch_internals.trees import tree_leaves


class ShardedGradient(PartTensor):
    """A gradient of which this rank holds a part, for use like any other tensor.

    What works element by element works on the part, in place as well, and gives another of these.
    What gives one number of all elements (norms, sums, ``isfinite().all()``) is put together from
    what all ranks have. Everything else gathers the whole gradient. All but the first are
    collectives: every rank does the same. During backward it only collects.

    Example:
        >>> loss.backward()
        >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> log(model.head.weight.grad.norm())
    """

    # Results are what `perform` makes them.
    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Keeps what autograd accumulates, and computes everything else together."""
        if not is_in_backward():
            return perform(func, args, dict(kwargs or {}))
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], ShardedGradient):
            gradient, known = args[0], args[0].arrived
            gradient.arrived = args[1] if known is None else known + args[1]
            return gradient
        raise _in_backward(func, args)

    @property
    def data(self) -> Tensor:
        """The same gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """As ``parameter.grad = value``."""
        if value.shape != self.shape:
            raise RuntimeError(
                f"the gradient of {self.part.layout.name} has the shape {tuple(self.shape)}; got "
                f"one of shape {tuple(value.shape)}"
            )
        if isinstance(value, ShardedGradient) and value.replacement is not None:
            value = value.replacement
        is_itself = isinstance(value, ShardedGradient) and value.part is self.part
        self.replacement = None if is_itself else value

    def whole(self, what: str = "whole") -> Tensor:
        """The whole gradient as a plain tensor; every rank calls it."""
        if isinstance(self.replacement, ShardedGradient):
            return self.replacement.whole(what)
        return self.part.whole(what) if self.replacement is None else self.replacement

    def numpy(self, *, force: bool = False) -> Any:
        """The whole gradient; every rank calls it."""
        return self.whole("numpy()").numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        """The whole gradient; every rank calls it."""
        return self.whole("numpy()").__array__(dtype)

    def tolist(self) -> Any:
        """The whole gradient; every rank calls it."""
        return self.whole("tolist()").tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the whole gradient; every rank saves it."""
        return self.whole("save").clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Another with memory of its own."""
        return memo.setdefault(id(self), self.clone())

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """What this rank has; so any rank may print it alone."""
        layout, shape = self.part.layout, tuple(self.shape)
        if self.replacement is not None:
            return f"ShardedGradient({layout.name}, put in by hand: {self.replacement!r})"
        which = f"elements {layout.bounds.start} to {layout.bounds.stop} of {layout.cuts[-1]}"
        return f"ShardedGradient({layout.name}, shape={shape}, {which}: {self.part.values()!r})"


def _in_backward(func: Any, args: Sequence[Any]) -> ShoalError:
    names = [each.part.layout.name for each in tree_leaves(args) if isinstance(each, PartTensor)]
    if torch.is_grad_enabled():
        return ShoalError(
            f"backward(create_graph=True) cannot add to the gradient of {names[0]}, of which each "
            "rank holds a part: use torch.autograd.grad(loss, parameters, create_graph=True) "
            "instead"
        )
    return ShoalError(
        f"{func} was asked of the gradient of {names[0]} during backward. Until backward has ended "
        "it is not averaged over the ranks: call zero_grad() before this backward if a hook is to "
        "see the new gradient alone, or do it after backward"
    )


# Else torch would ask for the norm of each gradient by itself, one message each.
allow_in_foreach(ShardedGradient)
