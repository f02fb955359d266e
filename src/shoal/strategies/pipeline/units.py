"""The units that a model is cut into, what they cost, and how they are shared out among chunks.

[Note: units]
A *unit* is a module that is never cut. Lists and sequences of modules are opened, and their members
are units; a module that contains such a list is opened too, and its own forward runs on every
rank, with stand-ins for the units of other ranks. The modules before the first list and after the
last (embeddings, norms, heads) are units as well. The members of lists form the *chain*, which is
cut into chunks where the user says, or so that the largest chunk is as small as possible.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shoal.strategies.training import call_module
from shoal.torch_internals.modules import buffers_of, is_persistent
from shoal.torch_internals.trees import tree_leaves

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that runs as a whole on one rank.

    Attributes:
        is_in_chain: Whether it belongs to the chain that is cut; others run where they are called.
    """

    name: str
    module: nn.Module
    is_in_chain: bool


def find_units(model: nn.Module, at_least: int) -> list[Unit]:
    """A model's units in the order of registration, ``at_least`` of them in the chain.

    Where there are too few, large units are opened, as far as they can be.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> [unit.name for unit in find_units(model, 2)]
        ['0', '1', '2']
    """
    units = _unique(_open(model, ""))
    if not any(unit.is_in_chain for unit in units):  # no list: the children form the chain
        units = _unique(_children(model, ""))
    chain = [index for index, unit in enumerate(units) if unit.is_in_chain]
    if chain:  # units registered between members of the chain join it
        first, last = chain[0], chain[-1]
        units[first:last] = [
            replace(unit, is_in_chain=_is_callable(unit.module)) for unit in units[first:last]
        ]
    return _opened_further(units, at_least)


def _open(module: nn.Module, name: str) -> Iterator[Unit]:
    """The units inside of a module."""
    if _is_chain(module):
        yield from _children(module, name)
    elif _is_container(module) or any(_is_chain(part) for part in module.modules()):
        for child_name, child in module.named_children():
            yield from _open(child, _join(name, child_name))
    elif _has_state(module):
        yield Unit(name, module, is_in_chain=False)


def _children(module: nn.Module, name: str) -> Iterator[Unit]:
    for child_name, child in module.named_children():
        if _is_container(child):
            yield from _children(child, _join(name, child_name))
        else:
            yield Unit(_join(name, child_name), child, is_in_chain=_is_callable(child))


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, _LISTS) and sum(map(_has_state, module.children())) > 1


def _is_container(module: nn.Module) -> bool:
    """Whether a module has no forward, only members that are called, as a `ModuleList`."""
    return not _is_callable(module) and any(True for _ in module.children())


def _is_callable(module: nn.Module) -> bool:
    """Whether a module has a forward: lists of modules and of parameters have none."""
    return type(module).forward is not nn.Module.forward


def _has_state(module: nn.Module) -> bool:
    """Whether a module has anything that is trained or saved; every rank runs those without."""
    if any(True for _ in module.parameters()):
        return True
    return any(
        is_persistent(part, name)
        for part in module.modules()
        for name, buffer in buffers_of(part).items()
        if buffer is not None
    )


def _unique(units: Iterator[Unit]) -> list[Unit]:
    """A module that is registered twice is one unit."""
    found: dict[nn.Module, Unit] = {}
    for unit in units:
        found.setdefault(unit.module, unit)
    return list(found.values())


def _opened_further(units: list[Unit], at_least: int) -> list[Unit]:
    """Opens the largest units until the chain has enough of them."""
    while sum(unit.is_in_chain for unit in units) < at_least:
        openable = [unit for unit in units if len(_parts(unit)) > 1]
        if not openable:
            break
        largest = max(openable, key=lambda unit: sum(p.numel() for p in unit.module.parameters()))
        parts = _parts(largest)
        known = {id(unit.module) for unit in units}
        index = units.index(largest)
        units[index : index + 1] = [unit for unit in parts if id(unit.module) not in known]
    return units


def _parts(unit: Unit) -> list[Unit]:
    """The units inside of a unit: those of the first module that has more than one."""
    parts = [part for part in _children(unit.module, unit.name) if _has_state(part.module)]
    return _parts(parts[0]) if len(parts) == 1 else parts


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


# Cutting ------------------------------------------------------------------------------------


def cut_chain(
    units: Sequence[Unit],
    num_chunks: int,
    cut: Sequence[str] | None = None,
    balance: Mapping[str, float] | None = None,
) -> dict[str, int]:
    """The chunk of each unit, by name; ``cut`` and ``balance`` as for `PipelineParallelModel`."""
    chain = [unit for unit in units if unit.is_in_chain]
    if len(chain) < num_chunks:
        raise _too_few(chain, num_chunks)
    if cut:
        firsts = _named_cuts(chain, num_chunks, cut)
    else:
        firsts = _balanced_cuts(_chain_weights(units, balance), num_chunks)
    chunks: dict[str, int] = {}
    chunk = num_seen = 0
    for unit in units:
        if unit.is_in_chain:
            chunk += num_seen in firsts
            num_seen += 1
        chunks[unit.name] = chunk
    return chunks


def _too_few(chain: Sequence[Unit], num_chunks: int) -> ValueError:
    needed = f"{num_chunks} are needed (stages times chunks)"
    if not chain:
        return ValueError(
            f"the model has no modules inside and cannot be cut into parts, of which {needed}: "
            "build it of modules, as in nn.Sequential or nn.ModuleList, or use a single stage"
        )
    names = ", ".join(unit.name for unit in chain)
    return ValueError(
        f"the model can be cut into {len(chain)} part{'s' * (len(chain) > 1)} ({names}), and "
        f"{needed}: use fewer stages, or build the model of more modules"
    )


def _named_cuts(chain: Sequence[Unit], num_chunks: int, cut: Sequence[str]) -> list[int]:
    names = [unit.name for unit in chain]
    unknown = [name for name in cut if name not in names]
    firsts = [names.index(name) for name in cut if name in names]
    if unknown or len(cut) != num_chunks - 1 or firsts != sorted(set(firsts)) or 0 in firsts:
        raise ValueError(
            f"cut must name the units that the {num_chunks - 1} later chunks begin with, in order; "
            f"got {list(cut)}. The units are {', '.join(names)}"
        )
    return firsts


def _balanced_cuts(weights: Sequence[float], num_chunks: int) -> list[int]:
    """Where later chunks begin, so that the largest is as small as possible."""
    count = len(weights)
    sums = [0.0, *accumulate(weights)]
    # best[k][i]: the largest of k chunks of the chain's first i units, and where the last begins
    best = [[(float("inf"), 0)] * (count + 1) for _ in range(num_chunks + 1)]
    best[0][0] = (0.0, 0)
    for chunks in range(1, num_chunks + 1):
        for end in range(chunks, count + 1):
            best[chunks][end] = min(
                (max(best[chunks - 1][begin][0], sums[end] - sums[begin]), begin)
                for begin in range(chunks - 1, end)
            )
    firsts, end = [], count
    for chunks in range(num_chunks, 1, -1):
        end = best[chunks][end][1]
        firsts.append(end)
    return firsts[::-1]


def _chain_weights(units: Sequence[Unit], balance: Mapping[str, float] | None) -> list[float]:
    """What each unit of the chain costs, with the others after it, and before the first."""
    weights = [0.0] * sum(unit.is_in_chain for unit in units)
    index, seen = -1, set[int]()
    for unit in units:
        index += unit.is_in_chain
        if balance is not None:
            cost = float(balance.get(unit.name, 0.0))
        else:
            fresh = [p for p in unit.module.parameters() if id(p) not in seen]
            seen.update(map(id, fresh))
            # One more, so that units without parameters are spread over the chunks as well.
            cost = 1.0 + sum(parameter.numel() for parameter in fresh)
        weights[max(index, 0)] += cost
    return weights


# Measuring ----------------------------------------------------------------------------------


@torch.enable_grad()
def measure_units(
    module: nn.Module, inputs: Any, stages: int = 2, repeats: int = 3
) -> dict[str, float]:
    """Seconds of forward and backward of each unit, for ``balance=``.

    Call it before the module is wrapped, on a machine that holds all of it; buffers and random
    numbers move on as in any forward.

    Args:
        module: The plain module.
        inputs: As for ``train_step``: one micro-batch.
        stages: How many units there must be at least.
        repeats: How many runs; the fastest counts.

    Example:
        >>> balance = measure_units(module, inputs, stages=4)
        >>> model = shoal.as_distributed(module, strategy="pipeline", balance=balance)
    """
    units = find_units(module, stages)
    best: dict[str, float] = {}
    for _ in range(repeats):
        watch = _Stopwatch(units)
        handles = [unit.module.register_forward_pre_hook(watch.begin) for unit in units]
        handles += [unit.module.register_forward_hook(watch.end) for unit in units]
        call_module(module, module, inputs)
        for handle in handles:
            handle.remove()
        for name, seconds in watch.seconds.items():
            best[name] = min(seconds, best.get(name, seconds))
    return best


class _Stopwatch:
    """Times the forward of each unit and, right after that, its backward."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._names = {unit.module: unit.name for unit in units}
        self._begun: dict[nn.Module, float] = {}
        self.seconds: dict[str, float] = defaultdict(float)

    def begin(self, part: nn.Module, _: Any) -> None:
        self._begun[part] = time.perf_counter()

    def end(self, part: nn.Module, args: Any, output: Any) -> None:
        name = self._names[part]
        forward = time.perf_counter() - self._begun.pop(part)
        self.seconds[name] += forward + _time_backward(part, args, output)


def _time_backward(part: nn.Module, args: Any, output: Any) -> float:
    """Seconds of the backward of this unit alone, to its inputs and parameters."""
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    inputs = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.requires_grad]
    wanted = [*inputs, *(p for p in part.parameters() if p.requires_grad)]
    if not tensors or not wanted:
        return 0.0
    gradients = [torch.ones_like(tensor) for tensor in tensors]
    begin = time.perf_counter()
    torch.autograd.grad(tensors, wanted, gradients, retain_graph=True, allow_unused=True)
    return time.perf_counter() - begin
