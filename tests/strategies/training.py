"""Training by ranks, and by one process in two ways, for comparison.

"batch": one process on the whole batch, what a user means by "the same training".
"split": one process that replays each rank's local batch in turn and averages the gradients in
rank order. It is the honest reference where a rank's numbers depend on all of its local batch
(BatchNorm) and where the optimizer turns rounding into steps (Muon rounds to bfloat16, Adafactor
divides by row statistics).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shoal
from strategies.models import TASKS, Batch, Task, part

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
MODES = ("plain", "accumulate", "clip")
ITEMS_PER_RANK = 4
STEPS = 20
MAX_NORM = 0.05
# Clipped gradients are no function's gradients, and LBFGS does not converge on them.
MAX_NORM_OF_LBFGS = 10.0
_NUM_MICRO_BATCHES = 2

State = dict[str, Tensor]


# Optimizers: an epsilon that keeps rounding noise small where a gradient is zero in exact
# arithmetic, as that of attention's key bias.


def _muon(module: nn.Module) -> list[Optimizer]:
    matrices = [p for p in module.parameters() if p.dim() == 2]
    others = [p for p in module.parameters() if p.dim() != 2]
    return [
        torch.optim.Muon(matrices, lr=0.01, momentum=0.9),
        torch.optim.AdamW(others, lr=0.01, eps=1e-3),
    ]


def _decayed(module: nn.Module) -> list[Optimizer]:
    """Weights decay, biases and norms do not: two groups of parameters."""
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=0.01, eps=1e-3)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True)],
    "adamw": _decayed,
    "rmsprop": lambda m: [torch.optim.RMSprop(m.parameters(), lr=0.005, eps=1e-2, momentum=0.5)],
    "adagrad": lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.02, eps=1e-3)],
    "adafactor": lambda m: [torch.optim.Adafactor(m.parameters(), lr=0.01)],
    "muon": _muon,
    "lbfgs": lambda m: [torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=2, history_size=4)],
}
AMPLIFYING = ("adafactor", "muon")
# A norm is added up in another order, and what its last bit does to a gradient that is zero in
# exact arithmetic these optimizers turn into a visible step.
_AMPLIFIED = 1e-4


@dataclass(frozen=True)
class Case:
    """One training: what is trained, how, and by how many ranks."""

    task: str
    optimizer: str
    mode: str = "plain"
    ranks: int = 2
    strategy: str = "zero3"
    steps: int = STEPS

    @property
    def reference(self) -> str:
        """What this training can be compared with."""
        task = TASKS[self.task]
        amplifies = self.optimizer in AMPLIFYING
        if self.optimizer == "lbfgs" and task.tolerance > 1e-10:  # divides by small differences
            amplifies = True
        return "split" if amplifies else task.reference

    @property
    def min_group_bytes(self) -> int:
        """Small models in several groups; and for some worlds in one."""
        return {2: 300, 3: 3000, 5: 1 << 20}.get(self.ranks, 1500)

    @property
    def max_norm(self) -> float:
        """Where gradients are clipped."""
        return MAX_NORM_OF_LBFGS if self.optimizer == "lbfgs" else MAX_NORM

    @property
    def in_one_process(self) -> Case:
        """The same for every strategy, so that it runs once."""
        return replace(self, strategy="")

    def __str__(self) -> str:
        parts = (self.task, self.optimizer, self.mode, self.strategy, self.ranks)
        return "-".join(map(str, parts))


def _batch(task: str, optimizer: str, step: int, ranks: int) -> Batch:
    """The global batch. LBFGS compares gradients of successive steps: always of one batch."""
    return TASKS[task].batch(1 if optimizer == "lbfgs" else step, ITEMS_PER_RANK * ranks)


# Ranks -------------------------------------------------------------------------------------


def train_rank(case: Case) -> State:
    """What each rank does; returns the whole model's state."""
    world, task = shoal.world(), TASKS[case.task]
    torch.manual_seed(0)
    module = task.build()
    # Not for a block: ranks that are threads share the filters. pytest restores them.
    warnings.filterwarnings("ignore", message=".*may couple any of its parameters")
    model, optimizers = shoal.as_distributed(
        module,
        OPTIMIZERS[case.optimizer](module),
        strategy=case.strategy,
        min_group_bytes=case.min_group_bytes,
    )
    for step in range(case.steps):
        task.before_step(model, step)
        batch = part(_batch(case.task, case.optimizer, step, world.size), world.rank, world.size)
        take_step(optimizers, functools.partial(_rank_gradients, model, case, batch))
    return model.state_dict()


def train_rank_of_pool(case: Case) -> State:
    """As `train_rank`, and leaves no garbage: it holds groups, and they connections."""
    state = train_rank(case)
    gc.collect()
    return state


def _rank_gradients(model: Any, case: Case, batch: Batch) -> Tensor:
    loss = _accumulated(model, TASKS[case.task], batch, case.mode, model.no_sync)
    if case.mode == "clip":
        model.clip_grad_norm_(case.max_norm)
    return loss


def _accumulated(
    model: nn.Module, task: Task, batch: Batch, mode: str, holding_back: Callable[[], Any]
) -> Tensor:
    """Backward of one batch, or of its parts one after the other."""
    if mode != "accumulate":
        loss = task.loss(model, batch)
        loss.backward()
        return loss.detach()
    total = torch.zeros((), dtype=torch.float64)
    for index in range(_NUM_MICRO_BATCHES):
        is_last = index == _NUM_MICRO_BATCHES - 1
        with contextlib.nullcontext() if is_last else holding_back():
            loss = task.loss(model, part(batch, index, _NUM_MICRO_BATCHES)) / _NUM_MICRO_BATCHES
            loss.backward()
            total += loss.detach()
    return total


def take_step(optimizers: Sequence[Optimizer], gradients: Callable[[], Tensor]) -> None:
    """One step of all optimizers; ``gradients`` makes the gradients and returns the loss."""
    if len(optimizers) == 1 and needs_closure(optimizers[0]):

        def closure() -> Tensor:
            optimizers[0].zero_grad()
            return gradients()

        optimizers[0].step(closure)
        return
    for optimizer in optimizers:
        optimizer.zero_grad()
    gradients()
    for optimizer in optimizers:
        optimizer.step()


def needs_closure(optimizer: Optimizer) -> bool:
    """LBFGS does, wrapped or not."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return isinstance(inner, torch.optim.LBFGS)


# One process -------------------------------------------------------------------------------


@functools.cache
def train_one_process(case: Case) -> State:
    """The state after the same training in one process."""
    task = TASKS[case.task]
    torch.manual_seed(0)
    model = task.build()
    optimizers = OPTIMIZERS[case.optimizer](model)
    gradients = _whole_gradients if case.reference == "batch" else _split_gradients
    for step in range(case.steps):
        task.before_step(model, step)
        batch = _batch(case.task, case.optimizer, step, case.ranks)
        take_step(optimizers, functools.partial(_clipped, gradients, model, case, batch))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _clipped(
    gradients: Callable[[nn.Module, Case, Batch], Tensor],
    model: nn.Module,
    case: Case,
    batch: Batch,
) -> Tensor:
    loss = gradients(model, case, batch)
    if case.mode == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
    return loss


def _whole_gradients(model: nn.Module, case: Case, batch: Batch) -> Tensor:
    loss = TASKS[case.task].loss(model, batch)
    loss.backward()
    return loss.detach()


def _split_gradients(model: nn.Module, case: Case, batch: Batch) -> Tensor:
    """Each rank's gradients as it would have them, summed in rank order and divided once.

    Training with BatchNorm does not read the running statistics, so ranks are independent of
    each other's; rank 0's are kept.
    """
    sums: dict[nn.Parameter, Tensor] = {}
    losses = []
    for rank in range(case.ranks):
        model.zero_grad()
        before = copy.deepcopy(dict(model.named_buffers()))
        own = part(batch, rank, case.ranks)
        losses.append(_accumulated(model, TASKS[case.task], own, case.mode, contextlib.nullcontext))
        if rank:
            _restore(model, before)
        for parameter in model.parameters():
            if parameter.grad is not None:
                known = sums.get(parameter)
                sums[parameter] = parameter.grad if known is None else known + parameter.grad
    for parameter in model.parameters():
        total = sums.get(parameter)
        parameter.grad = None if total is None else total / case.ranks
    return torch.stack(losses).mean()


def _restore(model: nn.Module, buffers: State) -> None:
    for name, value in model.named_buffers():
        with torch.no_grad():
            value.copy_(buffers[name])


# Comparing ---------------------------------------------------------------------------------


def compare(case: Case, states: Sequence[State], *, is_exact: bool = True) -> None:
    """Ranks have the same bits, and all are what one process has.

    ``is_exact``: the transport adds up in rank order, so "split" is met to the last bits,
    except where clipping adds up a norm in another order.
    """
    parameters = {name for name, _ in TASKS[case.task].build().named_parameters()}
    for rank, state in enumerate(states):
        for name in parameters:
            same = torch.equal(state[name], states[0][name])
            assert same, f"{name} differs between rank {rank} and rank 0"
    expected = train_one_process(case.in_one_process)
    assert list(states[0]) == list(expected)
    tolerance = TASKS[case.task].tolerance
    if case.reference == "split" and case.mode != "clip" and is_exact:
        tolerance = 1e-12 if tolerance == 1e-10 else 1e-7
    if case.optimizer in AMPLIFYING and case.mode == "clip":
        tolerance = max(tolerance, _AMPLIFIED)
    differences = {
        name: (value.double() - expected[name].double()).abs().max().item()
        for name, value in states[0].items()
    }
    if case.optimizer in AMPLIFYING:  # attention does not depend on the bias of its keys
        for name in [name for name in differences if name.endswith("in_proj_bias")]:
            assert differences.pop(name) <= max(tolerance, _AMPLIFIED), name
            tolerance = max(tolerance, TASKS[case.task].tolerance)  # others feel its last bits
    worst = max(differences, key=lambda name: differences[name])
    assert differences[worst] <= tolerance, f"{worst} is off by {differences[worst]:.3g}"
    assert all(torch.isfinite(value).all() for value in expected.values())
