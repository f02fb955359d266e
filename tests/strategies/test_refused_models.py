"""Models, and uses of them, that are refused in words."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
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


def train_inside_of_ddp() -> None:
    """A line of the old script was left in."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(shoal.as_distributed(build(), strategy="ddp"))
        model(torch.ones(2, 5)).sum().backward()
    finally:
        dist.destroy_process_group()


def test_a_wrapped_model_inside_of_ddp() -> None:
    with pytest.raises(ShoalError, match="Leave DistributedDataParallel out"):
        shoal.run(train_inside_of_ddp, 1, "memory")


class Around(torch.optim.Optimizer):
    """A wrapper as some libraries have: an optimizer by its class only."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state


def test_a_wrapper_of_an_optimizer() -> None:
    module = build()
    optimizer = Around(torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises(TypeError, match="pass the one inside"):
        shoal.run(lambda: shoal.as_distributed(module, optimizer), 1, "memory")
