"""How a block is called for a trial, and whether it uses weights without calling their layers.

The same class that guards split parameters while a model is trained is given to the parameters of
a block while it is tried; see [Note: reads of parts].
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.strategies.layers.module_snapshot import Snapshot
from shoal.strategies.tensor.layers.linear import sizes_of
from shoal.strategies.tensor.plan.known_names import HEAD_SIZES
from shoal.strategies.tensor.split_parameter import ReadGuard
from shoal.torch_internals.tensors import DispatchMode
from shoal.torch_support.random_state import RandomState

# Positions and batches, either alone, and pictures: what dimension 1 is depends on it.
SHAPES = ((2, 3), (6,), (2, 3, 2))
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class TrialCall:
    """How a block may be called.

    Attributes:
        shape: Of its input, without the features.
        training: Whether it is in training, with nothing dropped.
        flags: Arguments beyond the input.
    """

    shape: tuple[int, ...] = SHAPES[0]
    training: bool = False
    flags: tuple[tuple[str, bool], ...] = ()


def switches(block: nn.Module) -> Iterator[tuple[str, bool]]:
    """Arguments that are on or off, turned the other way.

    Those of Hugging Face are left: they only ask for more results.
    """
    if is_hugging_face(block):
        return
    for parameter in _parameters_of(block.forward)[1:]:
        if isinstance(parameter.default, bool):
            yield parameter.name, not parameter.default


def random_weights(block: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Not the module's own: what begins as zero would look as if anything may be done to it."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in block.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        values = values / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else values + 0.5
        weights[name] = values.to(parameter.device).requires_grad_()
    return weights


@contextlib.contextmanager
def unchanged(block: nn.Module) -> Iterator[Snapshot]:
    """Afterwards a block is as it was, whatever was called in which mode; random numbers too."""
    outside, snapshot = RandomState.capture(), Snapshot(block)
    try:
        yield snapshot
    finally:
        snapshot.restore()
        outside.restore()


def is_hugging_face(block: nn.Module) -> bool:
    """Whether it is one of theirs."""
    return type(block).__module__.startswith("transformers.")


def arguments(
    block: nn.Module,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...] = SHAPES[0],
) -> dict[str, Any]:
    """One tensor for the first parameter of forward, and what Hugging Face's attention wants."""
    known = _parameters_of(block.forward)
    if not known:
        raise TypeError("forward takes nothing")
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(*shape, width, generator=generator, dtype=dtype).to(device)
    call: dict[str, Any] = {known[0].name: inputs}
    for parameter in known[1:]:
        if parameter.name == "position_embeddings":
            size = _head_size(block)
            angles = torch.linspace(0, 1, shape[-1] * size, dtype=dtype, device=device)
            angles = angles.view(1, shape[-1], size)
            call[parameter.name] = (angles.cos(), angles.sin())
        elif parameter.name in ("attention_mask", "mask"):
            call[parameter.name] = None
        elif parameter.default is parameter.empty and parameter.kind in _NAMED:
            raise TypeError(f"forward needs {parameter.name}")
    return call


def _parameters_of(function: Any) -> list[inspect.Parameter]:
    """None for what is not written in Python and does not say."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return []


def _head_size(block: nn.Module) -> int:
    for part in block.modules():
        for name in ("rotary_ndims", *HEAD_SIZES):  # some rotate a part only
            size = vars(part).get(name)
            if isinstance(size, int):
                return size
    raise TypeError("no size of a head is known")


class _RecordingGuard(ReadGuard):
    """Notes that parameters were used outside of their layers' forward, and lets them be used."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__(parameters)
        self.was_used = False

    def notice(self, values: Any) -> None:
        self.was_used = self.was_used or bool(self.names_among(values))


class _Operators(DispatchMode):
    """Sees also what TorchScript and C++ do with parameters, who do not heed their class."""

    def __init__(self, guard: _RecordingGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guard = guard

    def look(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._guard.is_on:
            self._guard.notice((args, kwargs))
        return func(*args, **kwargs)


# Not in the class: torch would load its compiler, which takes a second, to keep it from tracing.
_Operators.__torch_dispatch__ = _Operators.look  # type: ignore[method-assign, assignment]


@contextlib.contextmanager
def watching(block: nn.Module, weights: dict[str, Tensor]) -> Iterator[_RecordingGuard]:
    """Inside, uses of a block's parameters are recorded, whatever way code comes by them.

    ``weights`` take the places of parameters in the block, by name; code may also have kept the
    parameters themselves.
    """
    kept = {f"its own {name}": block.get_parameter(name) for name in weights}
    guard = _RecordingGuard({**weights, **kept})
    layers = {block.get_submodule(name.rpartition(".")[0]) for name in weights}
    for layer in layers:
        # As a decorator, the context is entered around every call.
        vars(layer)["forward"] = guard.lifted()(layer.forward)
    guard.begin()
    try:
        with _Operators(guard):
            yield guard
    finally:
        guard.end()
        for layer in layers:
            del vars(layer)["forward"]


def uses_parameters(block: nn.Module, layer: nn.Module, names: Collection[str]) -> bool:
    """Whether a block uses parameters that are named, in any way in which it can be called.

    Args:
        block: Is called with one tensor; nothing is found if it cannot be.
        layer: One in it, whose inputs are as wide as those of the block.
        names: Parameters of linear layers, relative to the block.
    """
    parameter, width = next(block.parameters()), sizes_of(layer)[0]
    modes = [TrialCall(), TrialCall(training=True)]
    modes += [TrialCall(flags=(switch,)) for switch in switches(block)]
    with unchanged(block) as snapshot, torch.no_grad():
        for shape, way in product(SHAPES, modes):
            weights = random_weights(block, parameter.dtype)
            guarded = {name: weights[name] for name in names if name in weights}
            # What cannot be called this way may have used a parameter before it failed.
            with watching(block, guarded) as guard, contextlib.suppress(Exception):
                call = arguments(block, width, parameter.device, parameter.dtype, shape)
                block.train(way.training)
                functional_call(block, weights, (), call | dict(way.flags))
            snapshot.restore()
            if guard.was_used:
                return True
    return False
