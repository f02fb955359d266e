"""Sequence parallelism: in a stack of blocks, each rank has some positions outside of the regions.

[Note: stacks]
A stack is a list of blocks that are called one after the other. What goes into the first is cut
along the positions and what comes out of the last is joined again; in between norms, dropout and
residual sums work on a part of the positions, so their activations take a part of the memory.
Blocks' regions gather what goes in and scatter what comes out, which costs as much as the sum it
stands for.
Parameters outside of the regions get gradients from some positions only, and they are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.comm import Backend
from shoal.comm import differentiable as collective
from shoal.comm.operation.partition import split_sizes
from shoal.errors import ShoalError
from shoal.strategies.tensor.layers.dropout import SequenceDropout, Undropped, during, has_rate
from shoal.strategies.tensor.layers.linear import sizes_of
from shoal.strategies.tensor.plan.proposals import describe
from shoal.strategies.tensor.plan.tensor_plan import Cut, Style, TensorPlan
from shoal.strategies.tensor.region import RegionEntry
from shoal.strategies.tensor.trial.trial_call import arguments, random_weights, unchanged
from shoal.torch_internals.trees import tree_flatten, tree_leaves, tree_map, tree_unflatten

_TOLERANCE = 1e-3
_PART = "_shoal_is_part"


@dataclass(frozen=True)
class Stack:
    """Blocks that are called one after the other; see [Note: stacks].

    Attributes:
        dim: The dimension that counts positions.
    """

    names: tuple[str, ...]
    dim: int

    def holds(self, name: str) -> bool:
        """Whether a module is in one of the blocks."""
        return any(name == own or name.startswith(f"{own}.") for own in self.names)


def find_stacks(module: nn.Module, plan: TensorPlan) -> list[Stack]:
    """Lists of blocks in each of which something is split; the outermost ones."""
    regions = [block.name for block in plan.blocks if not any(x.is_alone for x in block.layers)]
    stacks: list[Stack] = []
    for name, part in module.named_modules():  # parents come before their children
        if not isinstance(part, nn.ModuleList | nn.Sequential) or not len(part):
            continue
        names = tuple(f"{name}.{key}" if name else key for key, _ in part.named_children())
        is_inside = any(stack.holds(names[0]) for stack in stacks)
        if not is_inside and all(any(Stack((n,), 0).holds(r) for r in regions) for n in names):
            # Batches come first, but for torch's attention where it is not told so.
            attention: Any = getattr(part[0], "self_attn", None)
            is_torchs = isinstance(attention, nn.MultiheadAttention)
            stacks.append(Stack(names, 0 if is_torchs and not attention.batch_first else 1))
    return stacks


class _Run(NamedTuple):
    """What a block gave for some input, with some weights, before it was split."""

    name: str
    dim: int
    call: dict[str, Any]
    weights: dict[str, Tensor]
    output: Tensor


class SequenceTrial:
    """Blocks of stacks, run before anything is split, to be compared with afterwards.

    Attributes:
        drops: Whether any of them drops something in training.
    """

    def __init__(self, module: nn.Module, stacks: list[Stack], plan: TensorPlan) -> None:
        self._module, self._plan = module, plan
        self.drops = False
        self._runs: list[_Run] = []
        for stack in stacks:
            kinds: dict[str, str] = {}  # one block of each is run
            for name in stack.names:
                kinds.setdefault(describe(module.get_submodule(name)), name)
            self._runs += [self._run(stack, name) for name in kinds.values()]

    def _run(self, stack: Stack, name: str) -> _Run:
        block = self._module.get_submodule(name)
        parameter = next(block.parameters())
        length = 2 * self._plan.num_ranks + 1
        shape = (2, length) if stack.dim else (length, 2)
        width = self._width(stack)
        try:
            call = arguments(block, width, parameter.device, parameter.dtype, shape)
            weights = random_weights(block, parameter.dtype)
            output = _evaluated(block, weights, call)
            self.drops = self.drops or _drops(block, weights, call)
        except Exception as error:
            raise ShoalError(
                f"sequence_parallel=True needs blocks that can be tried with one tensor; "
                f"{name} cannot: {error}"
            ) from error
        return _Run(name, stack.dim, call, weights, output)

    def _width(self, stack: Stack) -> int:
        for layer in self._plan.layers:
            part = self._module.get_submodule(layer.name)
            if stack.holds(layer.name) and layer.style is Style.COLUMN:
                return sizes_of(part)[0]
            if stack.holds(layer.name) and isinstance(part, nn.MultiheadAttention):
                return int(part.embed_dim)
        raise AssertionError("a stack without a column")

    def check(self, splits: dict[str, Any], group: Backend) -> None:
        """Runs the same on all ranks, each with some positions, and compares."""
        for name, dim, call, weights, expected in self._runs:
            block = self._module.get_submodule(name)
            parts = {
                key: splits[f"{name}.{key}"].take(value.detach())
                if f"{name}.{key}" in splits
                else value
                for key, value in weights.items()
            }
            first = next(iter(call))
            own = {**call, first: collective.split(call[first], group, dim)}
            try:
                joined = collective.join(_evaluated(block, parts, own), group, dim)
                is_same = joined.shape == expected.shape and torch.allclose(
                    joined, expected, rtol=0, atol=_TOLERANCE * float(expected.abs().max())
                )
            except (RuntimeError, ValueError, TypeError, IndexError):
                is_same = False
            if not is_same:
                raise ShoalError(
                    f"{name} gives something else where each rank has some positions only: a part "
                    "of it that is not split looks at several positions. Leave sequence_parallel "
                    "off."
                )


@torch.no_grad()
def _evaluated(block: nn.Module, weights: dict[str, Tensor], call: dict[str, Any]) -> Tensor:
    """The first tensor that a block gives, with nothing dropped."""
    with unchanged(block):
        output = functional_call(block.eval(), weights, (), call)
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


@torch.no_grad()
def _drops(block: nn.Module, weights: dict[str, Tensor], call: dict[str, Any]) -> bool:
    """Whether a block drops something in training, wherever the rate is written."""
    undropped = Undropped(lambda: True)
    buffers = {name: buffer.clone() for name, buffer in block.named_buffers()}
    with unchanged(block), undropped:
        functional_call(block.train(), {**weights, **buffers}, (), call)
    return bool(undropped.shapes)


# Installing -----------------------------------------------------------------------------------


def install(module: nn.Module, stack: Stack, group: Backend, *, drops: bool) -> None:
    """Cuts what goes into the stack, and joins what comes out; ``drops``: blocks drop something."""
    parts = [module.get_submodule(name) for name in stack.names]
    length = _SequenceLength(stack.dim, group)
    # First of all, before a block that is itself a region gathers the positions again.
    parts[0].register_forward_pre_hook(length.begin, prepend=True, with_kwargs=True)
    for part in parts[1:]:
        part.register_forward_pre_hook(length.check, prepend=True, with_kwargs=True)
    if drops or any(map(has_rate, parts)):
        for part in parts:
            during(part, partial(length.dropout, part))
    parts[-1].register_forward_hook(length.end)


class _SequenceLength:
    """How many positions there are in the forward that is going on."""

    def __init__(self, dim: int, group: Backend) -> None:
        self.dim, self.group = dim, group
        self.whole = 0

    def begin(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = _main(args, kwargs)
        if hidden.dim() != 3:
            raise ShoalError(
                "sequence_parallel=True needs hidden states of three dimensions, a batch of "
                f"positions; got {tuple(hidden.shape)}"
            )
        self.whole = hidden.shape[self.dim]
        own = collective.split(hidden, self.group, self.dim)
        return (
            tuple(own if value is hidden else value for value in args),
            {key: own if value is hidden else value for key, value in kwargs.items()},
        )

    def check(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        own = split_sizes(self.whole, self.group.size)[self.group.rank]
        if _main(args, kwargs).shape[self.dim] != own:
            raise ShoalError(
                f"sequence_parallel=True needs blocks that are called one after the other; a "
                f"{type(module).__name__} got {_main(args, kwargs).shape[self.dim]} positions "
                f"instead of this rank's {own}"
            )

    def dropout(self, part: nn.Module) -> SequenceDropout:
        cut = Cut.of(self.whole)
        return SequenceDropout(self.group, lambda: part.training, self.dim, cut)

    def end(self, _: nn.Module, args: Any, output: Any) -> Any:
        leaves, structure = tree_flatten(output)
        index = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        leaves[index] = collective.join(leaves[index], self.group, self.dim)
        return tree_unflatten(leaves, structure)


def gather_main_input(block: nn.Module, entry: RegionEntry) -> None:
    """A region that begins where its block is called, with all positions of its first tensor.

    What the block does before its columns (a norm) gets partial gradients then, like the columns.
    What a region returns beside its result (T5's position biases, by heads) stays in parts, and
    goes into the next one as it is.
    """

    def begin(_: nn.Module, args: Any, kwargs: Any) -> Any:
        main = _main(args, kwargs)
        whole = entry.present(main)

        def enter(value: Any) -> Any:
            if value is main:
                return whole
            is_whole = isinstance(value, Tensor) and not hasattr(value, _PART)
            return entry.share(value) if is_whole else value

        return tree_map(enter, (args, kwargs))

    def end(_: nn.Module, args: Any, output: Any) -> None:
        _result, *others = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        for other in others:
            setattr(other, _PART, True)

    entry.is_at_block = True
    block.register_forward_pre_hook(begin, with_kwargs=True)
    block.register_forward_hook(end)


def _main(args: Any, kwargs: Any) -> Tensor:
    return next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
