"""Whether a block uses the parameters of layers in it without calling the layers, found by trying.

The same class that guards split parameters while a model is trained is given to the parameters of
a block while it is tried; see [Note: reads of parts].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.strategies.layers.module_snapshot import Snapshot
from shoal.strategies.tensor.layers.linear import sizes_of
from shoal.strategies.tensor.split_parameter import ReadGuard
from shoal.strategies.tensor.trial.trial_call import all_calls, arguments, random_weights
from shoal.torch_internals.tensors import DispatchMode
from shoal.torch_support.random_state import RandomState


class RecordingGuard(ReadGuard):
    """Notes that parameters were used outside of their layers' forward, and lets them be used."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        """Nothing was used yet."""
        super().__init__(parameters)
        self.was_used = False

    def notice(self, values: Any) -> None:
        """A use that is to be known of."""
        self.was_used = self.was_used or bool(self.names_among(values))


class _Operators(DispatchMode):
    """Sees also what TorchScript and C++ do with parameters, who do not heed their class."""

    def __init__(self, guard: RecordingGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guard = guard

    def look(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets the guard look at what an operator is given."""
        kwargs = kwargs or {}
        if self._guard.is_on:
            self._guard.notice((args, kwargs))
        return func(*args, **kwargs)


# Not in the class: torch would load its compiler, which takes a second, to keep it from tracing.
_Operators.__torch_dispatch__ = _Operators.look  # type: ignore[method-assign, assignment]


@contextlib.contextmanager
def watching(block: nn.Module, weights: dict[str, Tensor]) -> Iterator[RecordingGuard]:
    """Inside, uses of a block's parameters are recorded, whatever way code comes by them.

    ``weights`` take the places of parameters in the block, by name; code may also have kept the
    parameters themselves.
    """
    kept = {f"its own {name}": block.get_parameter(name) for name in weights}
    guard = RecordingGuard({**weights, **kept})
    layers = {block.get_submodule(name.rpartition(".")[0]) for name in weights}
    for layer in layers:
        vars(layer)["forward"] = functools.partial(_call_own, guard, layer.forward)
    guard.begin()
    try:
        with _Operators(guard):
            yield guard
    finally:
        guard.end()
        for layer in layers:
            del vars(layer)["forward"]


def _call_own(guard: ReadGuard, forward: Any, *args: Any, **kwargs: Any) -> Any:
    with guard.lifted():
        return forward(*args, **kwargs)


def uses_parameters(block: nn.Module, layer: nn.Module, names: Collection[str]) -> bool:
    """Whether a block uses parameters that are named, in any way in which it can be called.

    Args:
        block: Is called with one tensor; nothing is found if it cannot be.
        layer: One in it, whose inputs are as wide as those of the block.
        names: Parameters of linear layers, relative to the block.
    """
    parameter, width = next(block.parameters()), sizes_of(layer)[0]
    outside, snapshot = RandomState.capture(), Snapshot(block)
    try:
        for way in all_calls(block):
            weights = random_weights(block, parameter.dtype)
            guarded = {name: weights[name] for name in names if name in weights}
            with contextlib.ExitStack() as stack:
                stack.callback(snapshot.restore)
                guard = stack.enter_context(watching(block, guarded))
                stack.enter_context(torch.no_grad())
                # What cannot be called this way may have used a parameter before it failed.
                stack.enter_context(contextlib.suppress(Exception))
                call = arguments(block, width, parameter.device, parameter.dtype, way.shape)
                block.train(way.training)
                functional_call(block, weights, (), call | dict(way.flags))
            if guard.was_used:
                return True
    finally:
        outside.restore()
    return False
