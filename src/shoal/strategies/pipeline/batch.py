"""A batch: its kind, whether all ranks have the same, its micro-batches and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm import Backend, ReduceOp
from shoal.comm.operation.partition import offsets, split_sizes
from shoal.errors import MismatchError
from shoal.strategies.pipeline.learning.absent_value import AbsentValue, absent_error
from shoal.strategies.pipeline.stage import Stage
from shoal.strategies.training import LossFunction, nothing
from shoal.system.rank_names import name_ranks
from shoal.torch_internals.trees import tree_flatten, tree_leaves, tree_map
from shoal.torch_support.fingerprint import fingerprint_number

# Enough to tell batches apart, few enough to cost nothing.
_MOST_SAMPLED = 4096
_DEVICES = ("cpu", "cuda")
_PLAIN = (bool, int, float, str, bytes, type(None))


class InputKind(NamedTuple):
    """What is known of inputs before they are used.

    Attributes:
        structure: Decides the route through the model.
        sizes: Decides the shapes of values on the route.
    """

    structure: str
    sizes: str


def kind_of(inputs: Any) -> InputKind:
    """Kinds depend on plain numbers, and not on the numbers in tensors."""
    leaves, spec = tree_flatten(inputs)
    structure = [str(spec)]
    sizes = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            structure.append(f"{leaf.dtype}[{leaf.dim()}]")
            sizes.append(str(tuple(leaf.shape)))
        else:
            structure.append(repr(leaf) if isinstance(leaf, _PLAIN) else str(type(leaf)))
    return InputKind(" ".join(structure), " ".join(sizes))


def mode_of(module: nn.Module) -> str:
    """Which parts train, in which precision, and whether there will be a backward."""
    training = "".join("t" if part.training else "e" for part in module.modules())
    # All devices: ranks may communicate on the CPU and compute on a GPU.
    autocast = {
        device: torch.get_autocast_dtype(device)
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    }
    return f"{fingerprint_number(training)} {torch.is_grad_enabled()} {autocast}"


def check_same_batch(stage: Stage, kinds: Sequence[InputKind], batch: Any) -> str:
    """Checks that all ranks have the same batch; one collective.

    Returns:
        A text that says which parameters of all ranks require gradients: part of what decides the
        route, and exchanged on the occasion.
    """
    group = stage.group
    trainable = "".join("1" if p.requires_grad else "0" for p in stage.parameters.own)
    form = "|".join(f"{kind.structure} {kind.sizes}" for kind in kinds)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    sample = fingerprint_number(tensors, _MOST_SAMPLED)
    own = [fingerprint_number(form), sample, fingerprint_number(trainable)]
    numbers = group.all_gather(torch.tensor([own], device=group.device)).tolist()
    odd = [rank for rank, number in enumerate(numbers) if number[:2] != numbers[0][:2]]
    if odd:
        shown = "; ".join(kind.sizes for kind in kinds)
        raise MismatchError(
            "the ranks of one pipeline must be given the same batch, inputs and targets; "
            f"{name_ranks(odd)} of it have other shapes or other values than rank 0 "
            f"(here, rank {group.rank}: {shown}). Take a sampler with world=model.data_group"
        )
    return "-".join(str(flags) for *_, flags in numbers)


# Micro-batches ------------------------------------------------------------------------------


class MicroBatch(NamedTuple):
    """Some rows of a batch, and their share of its items, from 0 to 1."""

    inputs: Any
    targets: Any
    share: float


def count_parts(num_rows: int, most: int, data: Backend) -> int:
    """How many micro-batches all pipelines make: no more than the smallest batch has rows.

    Pipelines side by side must do the same passes, since they gather sharded parameters in each of
    them. A pipeline whose batch is empty does as many as the others.
    """
    own = min(most, num_rows) or most
    if data.size == 1:
        return own
    return int(data.all_reduce(torch.tensor(own, device=data.device), ReduceOp.MIN))


def split(inputs: Any, targets: Any, num_rows: int, count: int) -> list[MicroBatch]:
    """Cuts every tensor that has the batch's rows.

    Example:
        >>> [part.inputs.tolist() for part in split(torch.arange(5), None, 5, 2)]
        [[0, 1, 2], [3, 4]]
    """

    def rows(tree: Any, begin: int, end: int) -> Any:
        def cut(leaf: Any) -> Any:
            has_rows = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == num_rows
            return leaf[begin:end] if has_rows else leaf

        return tree_map(cut, tree)

    return [
        MicroBatch(
            rows(inputs, begin, end),
            rows(targets, begin, end),
            (end - begin) / num_rows if num_rows else 1 / count,
        )
        for begin, end in _bounds(num_rows, count)
    ]


@lru_cache(maxsize=64)
def _bounds(num_rows: int, count: int) -> list[tuple[int, int]]:
    edges = offsets(split_sizes(num_rows, count))
    return list(pairwise(edges))


class Losses:
    """The losses of one batch's micro-batches on the last stage."""

    def __init__(
        self, batches: Sequence[MicroBatch], loss_fn: LossFunction, weight: float, data: Backend
    ) -> None:
        """``weight`` is the weight of this batch among those of the data axis."""
        self._batches, self._loss_fn, self._weight, self._data = batches, loss_fn, weight, data
        self._sum: Tensor | None = None
        self._total = weight
        if data.size > 1:
            weights = torch.tensor(weight, dtype=torch.float64, device=data.device)
            self._total = float(data.all_reduce(weights))

    def scaled(self, number: int, output: Any) -> Tensor:
        """A micro-batch's loss, scaled so that gradients are those of the global batch's mean.

        They are summed over micro-batches and averaged over the data axis.
        """
        batch = self._batches[number]
        loss = self._loss_fn(output, batch.targets)
        if isinstance(loss, AbsentValue):
            raise absent_error([loss])
        if not self._weight:
            self._add(torch.zeros_like(loss.detach()))
            return nothing(output)
        self._add(loss.detach() * batch.share)
        return loss * (batch.share * self._weight * self._data.size / self._total)

    def _add(self, part: Tensor) -> None:
        wide = part.double()
        self._sum = wide if self._sum is None else self._sum + wide
        self._dtype = part.dtype

    def mean(self, stage: Stage) -> Tensor:
        """The mean over the global batch, on every rank."""
        value = None
        if stage.is_last:
            assert self._sum is not None
            total = self._sum * self._weight
            if self._data.size > 1:
                total = self._data.all_reduce(total)
            value = (total / self._total if self._total else total).to(self._dtype)
        found: Tensor = stage.group.broadcast(value, root=stage.group.size - 1)
        return found
