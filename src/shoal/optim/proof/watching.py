"""Checks every operation of a real step against the kind that was proved for a small copy.

A proof has seen a few steps of tiny parameters. An optimizer may do something else at the fiftieth
step, from some size on, or when an option has changed. So what is not known by its class steps
under the rules of the proof, and an operation that breaks them is an error before it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ShoalError
from shoal.optim.kinds import Kind
from shoal.optim.proof.following import FORGETS, Following
from shoal.optim.proof.interception import SeededRun, intercepting
from shoal.optim.proof.judgement import Judgement, StepFinding
from shoal.optim.stepping.streams import Streams
from shoal.torch_internals.tensors import version_of
from shoal.torch_internals.trees import tree_leaves

# What libraries write on parameters for purposes of their own.
_HARMLESS = {"_is_hf_initialized"}


class Watch(Following):
    """Follows what an optimizer steps, and lets nothing happen that its kind rules out."""

    def __init__(
        self, optimizer: Optimizer, judgement: Judgement, on_violation: Callable[[], None]
    ) -> None:
        """``on_violation`` is called before the error is raised, in the middle of a step."""
        super().__init__()
        self._optimizer, self._judgement = optimizer, judgement
        self._on_violation = on_violation

    @contextlib.contextmanager
    def step(
        self, streams: Streams | None = None, numbers: Sequence[int] | None = None
    ) -> Iterator[None]:
        """Around a step of the optimizer; ``numbers`` are those of its parameters in streams."""
        stepped = [each for group in self._optimizer.param_groups for each in group["params"]]
        self.begin(stepped, [self._data_of(each) for each in stepped])
        memory = [each.data_ptr() for each in stepped]
        with_gradients = [each for each in stepped if each.grad is not None]
        with intercepting(self, SeededRun(streams, numbers)):
            yield
        if memory != [each.data_ptr() for each in stepped]:
            self.found(StepFinding(Kind.GLOBAL, "a step gave parameters other memory", ""))
        if any(each.grad is None for each in with_gradients):
            self.found(StepFinding(Kind.GLOBAL, f"a step {FORGETS}", ""))
        self.marks.forget_dead()

    def _data_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """Gradient and state, as far as it has data of the parameter."""
        own = [] if parameter.grad is None else [parameter.grad]
        for name, value in self._optimizer.state.get(parameter, {}).items():
            if self._judgement.marked_state.get(name, True):
                own += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return own

    def found(self, finding: StepFinding) -> None:
        """Refuses what the kind rules out."""
        kind = self._judgement.kind
        if not self._judgement.is_watched or not kind.is_finer_than(finding.finest):
            return
        self._on_violation()
        raise ShoalError(
            f"{type(self._optimizer).__name__} steps as {kind} ({self._judgement.reason}), but now "
            f"{finding}. Its parameters are partly stepped: load model and optimizer again, and "
            f'wrap the optimizer with kind="{finding.finest}", or with kind="{kind}" if you know '
            "that it is"
        )


class WatchedHyperparameters:
    """Hyperparameters that a proof holds for, and the names that were written on parameters.

    A learning rate is not among them: proofs choose their own. Of other fractions the sign counts:
    zero often means that something is left out, and schedules change the rest in every step. What
    else depends on them the watch will see.
    """

    def __init__(self, optimizer: Optimizer, judgement: Judgement) -> None:
        """As they are now."""
        self._optimizer = optimizer
        self._free = {"params", "lr", "initial_lr", *judgement.written_options}
        self._proved = self._fingerprint()

    def have_changed(self) -> bool:
        """Whether any has changed since it was last asked."""
        before, self._proved = self._proved, self._fingerprint()
        return before != self._proved

    def keep_asking(self) -> None:
        """What they are now is not what a proof holds for."""
        self._proved = []

    def _fingerprint(self) -> list[Mapping[str, Any]]:
        return [
            {name: _plain(value) for name, value in group.items() if name not in self._free}
            | {"params": tuple(sorted(names_written_on(group["params"])))}
            for group in self._optimizer.param_groups
        ]


def names_written_on(parameters: Iterable[nn.Parameter]) -> set[str]:
    """Attributes of parameters, which a step may look at."""
    return {name for each in parameters for name in vars(each) if name not in _HARMLESS}


def _plain(value: Any) -> Any:
    """Something to compare; a tensor by what changed it last, which takes no look at a GPU."""
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, float):
        return (value > 0) - (value < 0)
    return value if isinstance(value, bool | int | str | None) else id(value)
