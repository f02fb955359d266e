"""`GradScaler`: torch's, for gradients that are spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.comm import Backend
from shoal.errors import MismatchError
from shoal.optim.optimizer import ShardedOptimizer

Kinds = dict[tuple[torch.device, torch.dtype], list[Tensor]]


class GradScaler(torch.amp.GradScaler):
    """Scales losses so that small gradients survive 16 bits, and skips steps on all ranks together.

    Used like ``torch.amp.GradScaler``, which cannot see gradients that are elsewhere and raises.
    The ranks agree whether any of them found an infinite gradient.

    Example:
        >>> scaler = shoal.optim.GradScaler("cuda")
        >>> scaler.scale(loss_fn(model(inputs), targets)).backward()
        >>> scaler.unscale_(optimizer)
        >>> model.clip_grad_norm_(1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales what this rank holds of the optimizer's gradients; all ranks call it."""
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = found_inf
        for (device, dtype), gradients in _by_kind(_held_gradients(optimizer)).items():
            if dtype is torch.float16 and not allow_fp16:
                raise ValueError(
                    "gradients in float16 cannot be unscaled, they would be rounded to zero: keep "
                    "the parameters in float32"
                )
            here = torch.zeros((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, inv_scale.to(device))
            found = torch.maximum(found, here.to(found.device))
        engine = optimizer.model.engine
        for group in (engine.backend, *engine.holders.axes):
            found = self._agreed(found, group)
        return {found.device: found}

    def _agreed(self, found: Tensor, backend: Backend) -> Tensor:
        """Whether any rank has found an infinity; also checks that all scale alike."""
        scale = self._scale
        assert scale is not None
        numbers = torch.stack([found, scale, -scale]).to(backend.device, torch.float64)
        is_found, highest, negative_lowest = backend.all_reduce(numbers, "max").unbind()
        if highest != -negative_lowest:
            raise MismatchError(
                "the ranks scale their losses differently, between "
                f"{-float(negative_lowest):g} and {float(highest):g}: make the scaler with the "
                "same arguments, and load the same state, on every rank"
            )
        agreed: Tensor = is_found.to(found.device, found.dtype)
        return agreed


def _held_gradients(optimizer: ShardedOptimizer) -> Iterator[Tensor]:
    """All that this rank holds of the averaged gradients of an optimizer's parameters."""
    engine = optimizer.model.engine
    engine.adopt_gradients()
    places: dict[int, set[int]] = {}
    for parameter in optimizer.parameters:
        group, place = engine.locate(parameter)  # type: ignore[misc]
        places.setdefault(group, set()).add(place)
    for index, own in places.items():
        gradients = engine.gradients[index]
        held = gradients.held()
        if held is None:
            continue
        if gradients.used <= own:  # nobody else's in there
            yield held
        else:
            yield from _slices(engine, index, held, gradients.used & own)


def _slices(engine: Any, index: int, held: Tensor, places: set[int]) -> Iterator[Tensor]:
    group = engine.groups[index]
    base = group.low if engine.sharding.gradients else 0
    for place in sorted(places):
        slot = group.layout.slots[place]
        start, stop = (min(max(edge - base, 0), len(held)) for edge in slot.bounds)
        yield held[start:stop]


def _by_kind(gradients: Iterator[Tensor]) -> Kinds:
    kinds: Kinds = {}
    for gradient in gradients:
        if gradient.numel():
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return kinds
