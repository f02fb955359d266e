"""State that an optimizer made in its constructor, for parameters that had no memory yet.

Most optimizers make their state in the first step. Adagrad, for one, makes it when it is built:
over a model on the meta device that state has no memory either, and must be made again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ShoalError
from shoal.optim.proof.small_copy import similar


def renew_state(optimizer: Optimizer) -> None:
    """Makes what is on the meta device anew; the parameters have their values by now.

    Example:
        >>> optimizer = torch.optim.Adagrad(module_on_meta.parameters())
        >>> model = ZeRO2Model(module_on_meta)
        >>> renew_state(optimizer)
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _has_meta(optimizer.state.get(parameter, {})):
                optimizer.state[parameter] = _fresh_state(optimizer, group, parameter)


def _has_meta(state: dict[str, Any]) -> bool:
    return any(isinstance(value, Tensor) and value.is_meta for value in state.values())


def _fresh_state(
    optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> dict[str, Any]:
    twin = nn.Parameter(parameter.detach().clone())
    state: dict[str, Any] = dict(similar(optimizer, group, [twin]).state.get(twin, {}))
    if state.keys() != optimizer.state[parameter].keys() or _has_meta(state):
        raise ShoalError(
            f"{type(optimizer).__name__} has state for parameters on the meta device that it did "
            "not make when it was built, so it has no values: build it after the model is wrapped"
        )
    return state
