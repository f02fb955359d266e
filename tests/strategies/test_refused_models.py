"""Models, and uses of them, that are refused in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ShoalError


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    for module in (scripted, nn.Sequential(scripted)):
        with pytest.raises(TypeError, match=r"torch\.jit\.script"):
            shoal.run(lambda module=module: shoal.as_distributed(module), 1, "memory")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_forward_mode_where_parameters_are_gathered() -> None:
    def derive(strategy: str) -> torch.Tensor:
        model = shoal.as_distributed(build(), strategy=strategy)
        x = torch.ones(2, 5)
        return torch.func.jvp(model, (x,), (x,))[1].detach()

    def derive_dual(strategy: str) -> None:
        model = shoal.as_distributed(build(), strategy=strategy)
        with torch.autograd.forward_ad.dual_level():
            model(torch.autograd.forward_ad.make_dual(torch.ones(2, 5), torch.ones(2, 5)))

    shoal.run(derive, 2, "memory", args=("zero2",))
    for each in (derive, derive_dual):
        with pytest.raises(ShoalError, match="forward-mode differentiation"):
            shoal.run(each, 2, "memory", args=("zero3",))
