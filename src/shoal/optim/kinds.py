"""What an optimizer needs to see at once: elements, whole parameters, or everything.

It is found by trying: a small copy of the optimizer steps tiny tensors whole and cut up,
together and apart. What makes no difference but rounding may be done; anything that
cannot be tried counts as "everything", so that any optimizer is right by default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Of gradients, in the steps that are tried: some couple parameters above or below a threshold.
_SCALES = (1.0, 1e4, 1e-4, 1.0)
_RATE = 0.01
# Fused kernels round the last few elements of a tensor in another way than the others.
_ROUNDING = 1e-6
_SHAPE = (6, 4)


class Kind(StrEnum):
    """How finely an optimizer's work may be divided."""

    ELEMENT_WISE = "element-wise"
    PER_PARAMETER = "per-parameter"
    GLOBAL = "global"


def find_kind(optimizer: Optimizer) -> Kind:
    """The finest division that leaves the result unchanged, up to rounding.

    Example:
        >>> find_kind(torch.optim.AdamW([nn.Parameter(torch.zeros(2))])).value
        'element-wise'
    """
    kinds = [_kind_of_group(optimizer, group) for group in optimizer.param_groups]
    order = list(Kind)
    return max(kinds, key=order.index, default=Kind.GLOBAL)


def _kind_of_group(optimizer: Optimizer, group: dict[str, Any]) -> Kind:
    def make(parameters: Sequence[nn.Parameter]) -> Optimizer:
        return similar(optimizer, group, parameters, **_changes(group))

    try:
        if not _is_same(_together(make), _apart(make)):
            return Kind.GLOBAL
    except Exception:
        return Kind.GLOBAL
    try:
        return Kind.ELEMENT_WISE if _is_same(_together(make), _cut(make)) else Kind.PER_PARAMETER
    except Exception:  # some refuse tensors that are not matrices
        return Kind.PER_PARAMETER


def similar(
    optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[nn.Parameter], **changes: Any
) -> Optimizer:
    """A new optimizer of the same class, with a parameter group's settings."""
    known = inspect.signature(type(optimizer).__init__).parameters
    settings = {key: value for key, value in group.items() if key in known and key != "params"}
    return type(optimizer)(list(parameters), **{**settings, **changes})


def _changes(group: dict[str, Any]) -> dict[str, Any]:
    """Settings that a trial, which is on the CPU whatever the model is on, has of its own."""
    if group.get("capturable"):  # steps and the rate are on a GPU, and refused elsewhere
        return {"capturable": False, "lr": _RATE}
    # With a rate of zero, as warm-up begins with, nothing would move and all seem the same.
    return {"lr": _rate(group["lr"])} if "lr" in group else {}


def _rate(given: Any) -> Any:
    return torch.full_like(given, _RATE, device="cpu") if isinstance(given, Tensor) else _RATE


def _values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(_SHAPE, generator=generator) for _ in range(2)]


def _together(make: Callable[[Sequence[nn.Parameter]], Optimizer]) -> list[Tensor]:
    parameters = [nn.Parameter(value) for value in _values(0)]
    _train(make(parameters), parameters, lambda gradients: gradients)
    return [parameter.detach() for parameter in parameters]


def _apart(make: Callable[[Sequence[nn.Parameter]], Optimizer]) -> list[Tensor]:
    results = []
    for which, value in enumerate(_values(0)):
        parameter = nn.Parameter(value)
        _train(make([parameter]), [parameter], partial(_only, which))
        results.append(parameter.detach())
    return results


def _only(which: int, gradients: list[Tensor]) -> list[Tensor]:
    return [gradients[which]]


def _cut(make: Callable[[Sequence[nn.Parameter]], Optimizer]) -> list[Tensor]:
    """Both parameters in one row, cut across the border between them."""
    row = torch.cat([value.view(-1) for value in _values(0)])
    sizes = [5, row.numel() - 16, 11]
    parameters = [nn.Parameter(part.clone()) for part in row.split(sizes)]
    _train(
        make(parameters),
        parameters,
        lambda gradients: torch.cat([g.view(-1) for g in gradients]).split(sizes),
    )
    joined = torch.cat([parameter.detach() for parameter in parameters])
    return [part.view(_SHAPE) for part in joined.chunk(2)]


def _train(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    arrange: Callable[[list[Tensor]], Sequence[Tensor]],
) -> None:
    for step, scale in enumerate(_SCALES, start=1):
        gradients = arrange([scale * value for value in _values(step)])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def _is_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=0, atol=_ROUNDING * float(a.abs().max()))
        for a, b in zip(left, right, strict=True)
    )
