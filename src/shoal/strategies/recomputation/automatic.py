"""What each block does is chosen by measuring, to fit into the memory that a user names.

[Note: automatic activations]
Until the optimizer's first step everything is computed again, and each block is called a few times
more where it is first called: what it keeps is counted, and what a second call takes is timed.
After the step it is known what parameters, gradients and optimizer state take. The ranks put their
figures together, the largest count, and all choose from the same figures. An input that is larger
than what was measured is computed again whatever was chosen.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.comm.accounting import Watermark
from shoal.strategies.layers.module_snapshot import Snapshot
from shoal.strategies.recomputation.choice import Cost, choose
from shoal.strategies.recomputation.kept_products import KeepingProducts, ReusingProducts
from shoal.strategies.recomputation.replay import BlockReplay
from shoal.strategies.recomputation.stores.store import Counting
from shoal.torch_internals.autograd import is_in_backward
from shoal.torch_internals.modules import compiled_call
from shoal.torch_internals.tensors import storage_bytes, storage_id
from shoal.torch_internals.trees import tree_leaves, tree_map
from shoal.torch_support.random_state import RandomState

_TIMES = 3
"""How often a call is timed; the shortest counts."""


@dataclass
class Surroundings:
    """What a rank has besides its blocks' activations.

    Attributes:
        ranks: All that train the model; a lane of them.
        others: Counts parameters, gradients and state.
        num_steps: How many steps the optimizers have made.
        in_flight: How many forwards of a block there are at most before the backward of the first.
        part: Ranks with the same number have the same blocks.
    """

    ranks: Backend
    others: Watermark
    num_steps: Callable[[], int]
    in_flight: int = 1
    part: int = 0


@dataclass
class _Figures:
    """What was measured of one block."""

    input_bytes: int
    costs: dict[str, Cost] = field(default_factory=dict)


class Automatic:
    """Measures blocks and chooses; see [Note: automatic activations]."""

    def __init__(self, module: nn.Module, memory: int) -> None:
        """``memory``: bytes of the whole rank."""
        self._memory, self._figures = memory, dict[str, _Figures]()
        self.surroundings: Surroundings | None = None
        self.chosen: dict[str, str] | None = None
        """What each block does, once that is settled."""
        self.own: Collection[int] = ()
        """Where parameters and buffers lie."""
        self._outside = 0
        self._counting: list[Counting] = []
        self._handles = [
            module.register_forward_pre_hook(self._begin_counting),
            module.register_forward_hook(self._end_counting, prepend=True, always_call=True),
        ]

    def describe(self) -> str:
        """What was chosen, in words."""
        if self.chosen is None:
            return "everything is computed again in backward until the optimizer's first step"
        ways = list(self.chosen.values())
        counts = ", ".join(f"{way}: {ways.count(way)}" for way in ("none", "selective", "full"))
        return f"chosen for {self._memory:,} bytes; blocks by what is computed again: {counts}"

    def way_of(self, trial: BlockTrial) -> str:
        """What a block does in this call."""
        known = self._figures.get(trial.name)
        is_larger = known is None or trial.input_bytes > known.input_bytes
        if self.chosen is not None:
            return "full" if is_larger else self.chosen[trial.name]
        for counting in self._counting:
            counting.leave_out(trial.activations)  # they are the block's
        if is_larger:
            with self._not_counting():
                self._figures[trial.name] = _Figures(trial.input_bytes, trial.measure())
        return "full"

    # Outside of blocks ------------------------------------------------------------------------

    def _begin_counting(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not is_in_backward():
            self._counting.append(Counting(self.own))
            self._counting[-1].__enter__()

    def _end_counting(self, *_: Any) -> None:
        if self._counting and not is_in_backward():
            counting = self._counting.pop()
            counting.__exit__(None, None, None)
            self._outside = max(self._outside, counting.num_bytes)

    @contextlib.contextmanager
    def _not_counting(self) -> Iterator[None]:
        for counting in self._counting:
            counting.is_paused = True
        try:
            yield
        finally:
            for counting in self._counting:
                counting.is_paused = False

    # Choosing ---------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Chooses, if the time has come; all ranks begin a forward in training."""
        around = self.surroundings
        if self.chosen is None and around is not None and around.num_steps() > 0:
            self._stop_counting()
            self._agree(around)

    def _stop_counting(self) -> None:
        for handle in self._handles:
            handle.remove()

    def move_to(self, ranks: Backend) -> None:
        """These train the model from now on, and all call it; what was chosen before holds."""
        self.surroundings = None
        sizes = {name: each.input_bytes for name, each in self._figures.items()}
        own = None if self.chosen is None else [self.chosen, sizes]
        known = [each for each in ranks.all_gather_object(own) if each is not None]
        if known and self.chosen is None:
            self._stop_counting()
            self.chosen, sizes = known[0]
            self._figures = {name: _Figures(size) for name, size in sizes.items()}

    def _agree(self, around: Surroundings) -> None:
        taken = around.others.peak + self._outside * around.in_flight
        own = {name: each.costs for name, each in self._figures.items()}
        everybody = around.ranks.all_gather_object([around.part, taken, own])
        alike = [each for each in everybody if each[0] == around.part]
        taken = max(each[1] for each in alike)
        measured = [each[2] for each in alike]
        names = {name: None for each in measured for name in each}
        blocks = _pooled(
            {name: [each[name] for each in measured if name in each] for name in names}
        )
        chosen = choose(blocks, self._memory - taken, around.in_flight)
        failed = around.ranks.all_gather_object(chosen is None)
        if any(failed):
            least = around.in_flight * sum(min(each.values()).num_bytes for each in blocks.values())
            raise ValueError(
                f"memory={self._memory:,} bytes do not suffice on rank {failed.index(True)} of "
                f"the model: here parameters, gradients, optimizer state and what is kept outside "
                f"of blocks take {taken:,}, and blocks at least {least:,} if all are computed "
                "again, besides one that is. Use more ranks, a strategy that shards more, or a "
                "smaller batch"
            )
        self.chosen = chosen


def _pooled(measured: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Cost]]:
    """Of all ranks' figures the largest number of bytes, and the shortest time.

    What disturbs a rank makes times longer. Blocks that keep as much are taken for the same.
    """
    found: dict[str, dict[str, Cost]] = {}
    times: dict[tuple[tuple[str, int], ...], dict[str, float]] = {}
    for name, figures in measured.items():
        sizes = {way: max(each[way][0] for each in figures) for way in figures[0]}
        least = times.setdefault(tuple(sizes.items()), dict.fromkeys(sizes, math.inf))
        for way in sizes:
            least[way] = min(least[way], *(each[way][1] for each in figures))
        found[name] = {way: Cost(size, 0.0) for way, size in sizes.items()}
    for costs in found.values():
        least = times[tuple((way, cost.num_bytes) for way, cost in costs.items())]
        costs |= {way: Cost(cost.num_bytes, least[way]) for way, cost in costs.items()}
    return found


class BlockTrial:
    """Calls of a block that leave nothing behind, to see what it keeps and how long it takes."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        forward: Callable[..., Any],
        inputs: Any,
        own: Collection[int],
    ) -> None:
        """``inputs``: positional and keyword arguments; ``own``: memory that does not count."""
        self.name, self._block, self._forward, self._inputs = name, block, forward, inputs
        self._own, self.activations = own, _activations(inputs)

    @property
    def input_bytes(self) -> int:
        """What the block keeps where everything is computed again."""
        return _bytes_of(self.activations)

    def measure(self) -> dict[str, Cost]:
        """By what is computed again."""
        with self._sandbox():
            counting = Counting(self._own)
            self._call(counting)
            seconds = self._time(contextlib.nullcontext)
            costs = {"none": Cost(counting.num_bytes, 0.0)}
            if compiled_call(self._block) is None:
                keeping = KeepingProducts()
                self._call(keeping)
                products = [each for each in keeping.results if isinstance(each, Tensor)]
                num_bytes = _bytes_of([*self.activations, *products])
                costs["selective"] = Cost(num_bytes, self._time(lambda: ReusingProducts(keeping)))
            costs["full"] = Cost(self.input_bytes, seconds)
        return costs

    @contextlib.contextmanager
    def _sandbox(self) -> Iterator[None]:
        self._state, self._before = RandomState.capture(), BlockReplay(self._block)
        attributes = Snapshot(self._block)
        try:
            yield
        finally:
            attributes.restore()
            self._state.restore()

    def _call(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """As the block's own call: it may draw what it does."""
        args, kwargs = tree_map(_apart, self._inputs)
        self._state.restore()
        with self._before.restored(self.name), context:
            self._forward(*args, **kwargs)

    def _time(self, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> float:
        """On a CPU the time that it worked, which others that use it do not change."""
        is_on_gpu = any(each.is_cuda for each in self.activations)
        clock = time.perf_counter if is_on_gpu else time.process_time
        found = []
        for _ in range(_TIMES):
            begin = clock()
            self._call(context())
            if is_on_gpu:
                torch.cuda.synchronize()
            found.append(clock() - begin)
        return min(found)


def _apart(leaf: Any) -> Any:
    """A copy without a graph: a block may write to its inputs."""
    is_tensor = isinstance(leaf, Tensor)
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_tensor else leaf


def _activations(inputs: Any) -> list[Tensor]:
    """The inputs that a block keeps; what needs no gradient is usually kept elsewhere anyway."""
    return [
        leaf
        for leaf in tree_leaves(inputs)
        if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter)
    ]


def _bytes_of(tensors: Any) -> int:
    """Of their memory, each once."""
    found = {storage_id(each): storage_bytes(each) for each in tensors}
    return sum(found.values())
