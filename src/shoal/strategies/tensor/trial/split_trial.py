"""Whether a block of layers may be split, found by trying.

The block is run once whole and once for each rank, with random weights and without communication:
the ranks' results before the row are collected first and summed by hand. What makes no difference
but rounding may be done. Nothing is assumed about what happens between the layers: a norm over all
features, a gate that is cut out of a joined projection or a view with a fixed number of heads is
noticed, and the block is split in another way or not at all.

Code may take other branches for other inputs, so a block is called in every `TrialCall` there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.sharding.split import Split
from shoal.strategies.tensor.layers.linear import sizes_of
from shoal.strategies.tensor.trial.trial_call import (
    SHAPES,
    TrialCall,
    arguments,
    random_weights,
    switches,
    unchanged,
)
from shoal.strategies.tensor.trial.trial_run import SplitDiffers, SplitTrial, TrialRun

# Relative to the largest number there is: what is zero but for rounding has no size of its own.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
_LARGE = 1 << 24


@dataclass(frozen=True)
class TrialFinding:
    """What a trial tells of a block that may be split; all names are those in the block.

    Attributes:
        partial: Parameters that get partial gradients.
        whole: Those that every rank gets the whole gradient of.
        inside: Modules that are called with parts of activations, and so must stay whole.
        drops: Whether something of parts of activations is dropped in training, or may be.
    """

    partial: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    drops: bool = False


def may_split(trial: SplitTrial, num_ranks: int) -> TrialFinding | None:
    """What to know of the block if it is split this way; None if it may not be.

    Raises:
        TypeError: If the block cannot be called with one tensor.
    """
    refusals: list[Exception] = []
    try:
        with unchanged(trial.block), torch.enable_grad():
            # Some modules insist on single precision; large ones need not be tried in double.
            is_large = sum(parameter.numel() for parameter in trial.block.parameters()) > _LARGE
            for dtype in [torch.float32] if is_large else _TOLERANCES:
                found = list(_findings(trial, num_ranks, dtype, refusals))
                if found:
                    return _together(found)
    except SplitDiffers:
        return None
    if any(isinstance(refusal, TypeError) for refusal in refusals):
        raise TypeError(str(refusals[0]))
    return None


def _findings(
    trial: SplitTrial, num_ranks: int, dtype: torch.dtype, refusals: list[Exception]
) -> Iterator[TrialFinding]:
    """One for each way in which the whole block can be called."""
    weights = random_weights(trial.block, dtype)
    shape: tuple[int, ...] | None = None
    for shape in SHAPES:
        found = _TrialComparison(trial, num_ranks, weights, TrialCall(shape)).find(refusals)
        if found is not None:
            yield found
            break
    else:
        return
    others = [] if trial.attends else [TrialCall(other) for other in SHAPES if other != shape]
    flagged = [TrialCall(shape, flags=((name, value),)) for name, value in switches(trial.block)]
    for way in [TrialCall(shape, training=True), *others, *flagged]:
        found = _TrialComparison(trial, num_ranks, weights, way).find(refusals)
        if found is not None:
            yield found


def _together(findings: Sequence[TrialFinding]) -> TrialFinding:
    partial, whole, inside = (
        frozenset().union(*(getattr(found, name) for found in findings))
        for name in ("partial", "whole", "inside")
    )
    if partial & whole:  # to be summed for some calls, and not for others
        raise SplitDiffers
    return TrialFinding(partial, whole, inside, any(found.drops for found in findings))


class _TrialComparison:
    """One process against the ranks, for one way to call the block."""

    def __init__(
        self, trial: SplitTrial, num_ranks: int, weights: dict[str, Tensor], way: TrialCall
    ) -> None:
        self._trial, self._num_ranks, self._weights, self._way = trial, num_ranks, weights, way
        self._dtype = next(iter(weights.values())).dtype

    def find(self, refusals: list[Exception]) -> TrialFinding | None:
        """None, and an exception added, if the block cannot be called this way.

        Raises:
            SplitDiffers: If the ranks do not give what one process gives.
        """
        trial, way = self._trial, self._way
        width, device = sizes_of(trial.columns[0])[0], next(trial.block.parameters()).device
        call = arguments(trial.block, width, device, self._dtype, way.shape) | dict(way.flags)
        whole = TrialRun(trial, self._weights, call, way)
        try:
            outputs = whole.carry_out()
        except SplitDiffers:
            raise
        except Exception as error:
            refusals.append(error)
            return None
        try:
            partial, unsplit = self._compare(whole, outputs, call)
        except Exception as error:  # whatever the parts do, they do not do what the whole does
            raise SplitDiffers from error
        inside = [name for name, part in trial.block.named_modules() if part in whole.inside]
        return TrialFinding(partial, unsplit - partial, frozenset(inside), bool(whole.dropped))

    def _compare(
        self, whole: TrialRun, outputs: list[Tensor], call: dict[str, Any]
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Parameters with partial gradients, and all that have a gradient and are not split."""
        trial = self._trial
        # What to weigh the elements of results with, so that all gradients are tried at once.
        signal = [
            torch.linspace(-1, 2, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)
            for x in outputs
        ]
        expected = whole.gradients(outputs, signal)
        runs = [
            TrialRun(trial, _parts(self._weights, trial.splits, rank), call, self._way, rank)
            for rank in range(self._num_ranks)
        ]
        total = torch.stack([run.carry_out_partially() for run in runs]).sum(0)
        found = []
        for run in runs:
            own = run.carry_out(total)
            self._check_same(own, outputs)
            run.check_dropped(whole)
            found.append(run.gradients(own, signal))
        self._scale = max((_largest(gradient) for gradient in expected.values()), default=0.0)
        partial = frozenset(
            name
            for name, gradient in expected.items()
            if self._is_partial(name, gradient, [each[name] for each in found])
        )
        unsplit = {name for name, gradient in expected.items() if gradient is not None}
        return partial, frozenset(unsplit - trial.splits.keys())

    def _check_same(self, found: list[Tensor], expected: list[Tensor]) -> None:
        if len(found) != len(expected) or not expected:
            raise SplitDiffers
        for one, other in zip(found, expected, strict=True):
            if one.shape != other.shape or not self._is_close(one, other, _largest(other)):
                raise SplitDiffers

    def _is_partial(
        self, name: str, expected: Tensor | None, found: Sequence[Tensor | None]
    ) -> bool:
        known = [gradient for gradient in found if gradient is not None]
        if expected is None and not known:
            return False
        if expected is None or len(known) < len(found):
            raise SplitDiffers
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
            raise SplitDiffers
        return True

    def _is_close(self, one: Tensor, other: Tensor, scale: float) -> bool:
        return torch.allclose(one, other, rtol=0, atol=_TOLERANCES[self._dtype] * scale)


def _largest(tensor: Tensor | None) -> float:
    return float(tensor.detach().abs().max()) if tensor is not None and tensor.numel() else 0.0


def _parts(
    weights: dict[str, Tensor], splits: Mapping[str, Sequence[Split]], rank: int
) -> dict[str, Tensor]:
    return {
        name: splits[name][rank].take(value.detach()).requires_grad_() if name in splits else value
        for name, value in weights.items()
    }
