"""Whether a block of layers may be split, found by trying.

The block is run once whole and once for each rank, with random weights and without communication:
the ranks' results before the row are collected first and summed by hand. What makes no difference
but rounding may be done. Nothing is assumed about what happens between the layers: a norm over all
features, a gate that is cut out of a joined projection or a view with a fixed number of heads is
noticed, and the block is split in another way or not at all.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from shoal.comm.random_state import RandomState
from shoal.sharding.split import Split
from shoal.strategies.tensor.linear import sizes_of
from shoal.strategies.tensor.naming import HEAD_SIZES

# Relative to the largest number there is: what is zero but for rounding has no size of its own.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
_SHAPE = (2, 3)
_LARGE = 1 << 24
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Trial:
    """A way to split a block.

    Attributes:
        block: The module that is called with one tensor.
        columns: Layers that take what the region begins with.
        row: The layer that ends it.
        splits: Every rank's part of each parameter that is split, by name in the block.
        numbers: What becomes of attributes: module, attribute, and a value for each rank.
    """

    block: nn.Module
    columns: Sequence[nn.Module]
    row: nn.Module
    splits: Mapping[str, Sequence[Split]]
    numbers: Sequence[tuple[nn.Module, str, Sequence[int]]] = ()


class Unlike(Exception):
    """The parts do not add up to the whole."""


def may_split(trial: Trial, num_ranks: int) -> tuple[str, ...] | None:
    """Parameters that get partial gradients if the block is split this way; None if it may not be.

    Raises:
        TypeError: If the block cannot be called with one tensor.
    """
    outside = RandomState.capture()
    try:
        with evaluating(trial.block), torch.enable_grad():
            for dtype in _dtypes(trial.block):
                with contextlib.suppress(RuntimeError, ValueError, IndexError, AttributeError):
                    return _Comparison(trial, num_ranks, dtype).partial()
    except (Unlike, AssertionError):
        return None
    finally:
        outside.restore()
    return None


def _dtypes(block: nn.Module) -> list[torch.dtype]:
    """Some modules insist on single precision, and large ones need not be tried in double."""
    is_large = sum(parameter.numel() for parameter in block.parameters()) > _LARGE
    return [torch.float32] if is_large else list(_TOLERANCES)


class _Comparison:
    """One process against the ranks."""

    def __init__(self, trial: Trial, num_ranks: int, dtype: torch.dtype) -> None:
        self._trial, self._num_ranks, self._dtype = trial, num_ranks, dtype

    def partial(self) -> tuple[str, ...]:
        """Parameters with partial gradients; raises `Unlike` where anything else differs."""
        trial, weights = self._trial, random_weights(self._trial.block, self._dtype)
        width, device = sizes_of(trial.columns[0])[0], _device(trial.block)
        call = arguments(trial.block, width, device, self._dtype)
        whole = _Run(trial, weights, call)
        outputs = whole.carry_out()
        signal = [_signal(output) for output in outputs]
        expected = whole.gradients(outputs, signal)
        runs = [
            _Run(trial, _parts(weights, trial.splits, rank), call, rank)
            for rank in range(self._num_ranks)
        ]
        total = torch.stack([run.carry_out_partially() for run in runs]).sum(0)
        found = []
        for run in runs:
            own = run.carry_out(total)
            self._check_same(own, outputs)
            found.append(run.gradients(own, signal))
        self._scale = max((_largest(gradient) for gradient in expected.values()), default=0.0)
        return tuple(
            name
            for name, gradient in expected.items()
            if self._is_partial(name, gradient, [each[name] for each in found])
        )

    def _check_same(self, found: list[Tensor], expected: list[Tensor]) -> None:
        if len(found) != len(expected) or not expected:
            raise Unlike
        for one, other in zip(found, expected, strict=True):
            if one.shape != other.shape or not self._is_close(one, other, _largest(other)):
                raise Unlike

    def _is_partial(
        self, name: str, expected: Tensor | None, found: Sequence[Tensor | None]
    ) -> bool:
        known = [gradient for gradient in found if gradient is not None]
        if expected is None and not known:
            return False
        if expected is None or len(known) < len(found):
            raise Unlike
        if name in self._trial.splits:
            wanted = [split.take(expected) for split in self._trial.splits[name]]
        else:
            wanted = [expected] * len(known)
        if all(self._is_close(*pair, self._scale) for pair in zip(known, wanted, strict=True)):
            return False
        is_sum = name not in self._trial.splits and self._is_close(
            torch.stack(known).sum(0), expected, self._scale
        )
        if not is_sum:
            raise Unlike
        return True

    def _is_close(self, one: Tensor, other: Tensor, scale: float) -> bool:
        return torch.allclose(one, other, rtol=0, atol=_TOLERANCES[self._dtype] * scale)


def _largest(tensor: Tensor | None) -> float:
    return float(tensor.detach().abs().max()) if tensor is not None and tensor.numel() else 0.0


def _signal(output: Tensor) -> Tensor:
    """What to weigh the elements of a result with, so that all gradients are tried at once."""
    steps = torch.linspace(-1, 2, output.numel(), dtype=output.dtype, device=output.device)
    return steps.view(output.shape)


class _Run:
    """The block with some weights, as one process or as one rank would run it."""

    def __init__(
        self,
        trial: Trial,
        weights: dict[str, Tensor],
        call: dict[str, Any],
        rank: int | None = None,
    ) -> None:
        self._trial, self._weights, self._call, self._rank = trial, weights, call, rank

    def carry_out_partially(self) -> Tensor:
        """What this rank's row gives, without its bias."""
        seen: list[Tensor] = []

        def look(row: nn.Module, _: Any, output: Tensor) -> None:
            bias = getattr(row, "bias", None)
            seen.append((output if bias is None else output - bias).detach())

        with self._hooked(look):
            functional_call(self._trial.block, self._tensors(), (), self._call)
        if len(seen) != 1:
            raise Unlike
        return seen[0]

    def carry_out(self, total: Tensor | None = None) -> list[Tensor]:
        """All results; ``total`` takes the place of what the row gives."""

        def replace(row: nn.Module, _: Any, output: Tensor) -> Tensor:
            if total is None:
                return output
            bias = getattr(row, "bias", None)
            known = total if bias is None else total + bias
            return known.detach() + (output - output.detach())

        with self._hooked(replace):
            result = functional_call(self._trial.block, self._tensors(), (), self._call)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # Of Hugging Face's results only the first goes on; others are shown on request.
        return leaves[:1] if _is_hugging_face(self._trial.block) else leaves

    def _tensors(self) -> dict[str, Tensor]:
        """Weights, and copies of the buffers: what a run does to them is forgotten."""
        buffers = {name: buffer.clone() for name, buffer in self._trial.block.named_buffers()}
        return {**self._weights, **buffers}

    def gradients(self, outputs: list[Tensor], signal: list[Tensor]) -> dict[str, Tensor | None]:
        """Of every parameter, with inputs of the region held fixed."""
        weighed = [(out * weight).sum() for out, weight in zip(outputs, signal, strict=True)]
        total = torch.stack(weighed).sum()
        found = torch.autograd.grad(total, list(self._weights.values()), allow_unused=True)
        return dict(zip(self._weights, found, strict=True))

    @contextlib.contextmanager
    def _hooked(self, at_row: Any) -> Iterator[None]:
        handles = [self._trial.row.register_forward_hook(at_row)]
        handles += [column.register_forward_pre_hook(_detach) for column in self._trial.columns]
        try:
            with _numbers(self._trial.numbers, self._rank):
                yield
        finally:
            for handle in handles:
                handle.remove()


def _detach(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach() for tensor in inputs)


@contextlib.contextmanager
def _numbers(
    numbers: Sequence[tuple[nn.Module, str, Sequence[int]]], rank: int | None
) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in numbers]
    try:
        if rank is not None:
            for module, name, values in numbers:
                setattr(module, name, values[rank])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def random_weights(block: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Not the module's own: what begins as zero would look as if anything may be done to it."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in block.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        values = values / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else values + 0.5
        weights[name] = values.to(parameter.device).requires_grad_()
    return weights


def _parts(
    weights: dict[str, Tensor], splits: Mapping[str, Sequence[Split]], rank: int
) -> dict[str, Tensor]:
    return {
        name: splits[name][rank].take(value.detach()).requires_grad_() if name in splits else value
        for name, value in weights.items()
    }


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


def _device(block: nn.Module) -> torch.device:
    return next(parameter.device for parameter in block.parameters())


def _is_hugging_face(block: nn.Module) -> bool:
    return type(block).__module__.startswith("transformers.")


def arguments(
    block: nn.Module,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int] = _SHAPE,
) -> dict[str, Any]:
    """One tensor for the first parameter of forward, and what Hugging Face's attention wants."""
    known = list(inspect.signature(block.forward).parameters.values())
    if not known:
        raise TypeError("forward takes nothing")
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(*shape, width, generator=generator, dtype=dtype).to(device)
    call: dict[str, Any] = {known[0].name: inputs}
    for parameter in known[1:]:
        if parameter.name == "position_embeddings":
            size = _head_size(block)
            angles = torch.linspace(0, 1, shape[1] * size, dtype=dtype, device=device)
            angles = angles.view(1, shape[1], size)
            call[parameter.name] = (angles.cos(), angles.sin())
        elif parameter.name in ("attention_mask", "mask"):
            call[parameter.name] = None
        elif parameter.default is parameter.empty and parameter.kind in _NAMED:
            raise TypeError(f"forward needs {parameter.name}")
    return call


def _head_size(block: nn.Module) -> int:
    for part in block.modules():
        for name in HEAD_SIZES:
            size = vars(part).get(name)
            if isinstance(size, int):
                return size
    raise TypeError("no size of a head is known")
