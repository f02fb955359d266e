"""How a block may be called for a trial: with which tensor, in which mode, with which switches."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.strategies.tensor.plan.known_names import HEAD_SIZES

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


def all_calls(block: nn.Module) -> Iterator[TrialCall]:
    """Every combination of a shape with a mode or a switch."""
    for shape in SHAPES:
        yield TrialCall(shape)
        yield TrialCall(shape, training=True)
        for switch in switches(block):
            yield TrialCall(shape, flags=(switch,))


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
def evaluating(block: nn.Module) -> Iterator[None]:
    """Inside, nothing is dropped and no statistics are kept."""
    modes = [(module, module.training) for module in block.modules()]
    block.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


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
