"""Which optimizer goes with which model, and what is said of options that there are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pools
import shoal
from shoal.errors import ShoalError
from shoal.optim import PAIRS, DDPOptimizer, ZeRO1Optimizer
from shoal.strategies import DDPModel, ZeRO1Model, ZeRO2Model
from shoal.strategies.options import options_of
from shoal.verification import Experiment, verify_experiment


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model_class: type, optimizer_class: type, make: str = "AdamW") -> tuple:
    """The state, the bytes of the optimizer's own, and its whole state."""
    module = build()
    options = {"lr": 0.01} | ({"eps": 1e-3} if make == "AdamW" else {})
    inner = getattr(torch.optim, make)(module.parameters(), **options)
    model = model_class(module, shoal.world(), min_group_bytes=100)
    optimizer = optimizer_class(inner, model)
    for step in range(4):
        torch.manual_seed(10 * step + shoal.world().rank)
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(4, 5)), torch.randn(4, 3)).backward()
        assert model[0].weight.grad.shape == (7, 5)  # gradients are whole
        optimizer.step()
    tensors = [value for state in inner.state.values() for value in state.values()]
    held = sum(
        value.numel() for value in tensors if isinstance(value, torch.Tensor) and value.dim()
    )
    whole = optimizer.state_dict()
    other = build()
    optimizer.load_state_dict(whole)
    other.load_state_dict(model.state_dict())
    return model.state_dict(), held, whole


@pytest.mark.parametrize(
    ("backend", "ranks"), [("memory", 2), ("memory", 3), ("shm", 2), ("gloo", 2)]
)
@pytest.mark.parametrize("make", ["AdamW", "Adafactor"])
def test_zero1_optimizer_with_ddp_model(backend, ranks, make) -> None:
    """It is what zero1 is: to the bit, and with its part of the state."""
    team = pools.Team(backend, ranks)
    for found, expected in zip(
        team.run(train, DDPModel, ZeRO1Optimizer, make),
        team.run(train, ZeRO1Model, ZeRO1Optimizer, make),
        strict=True,
    ):
        for name, value in expected[0].items():
            assert torch.equal(found[0][name], value)
        assert found[1] == expected[1]
        assert found[2].keys() == expected[2].keys()
    if make == "AdamW":
        num_parameters = sum(p.numel() for p in build().parameters())
        assert found[1] <= 2 * (num_parameters // ranks + 8)


def test_verified_and_saved(tmp_path) -> None:
    def wrap(module, optimizers, strategy, **options):
        model = DDPModel(module, shoal.world(), **options)
        return model, [ZeRO1Optimizer(optimizer, model) for optimizer in optimizers]

    def make():
        model = build()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        optimizers = [torch.optim.AdamW(matrices, eps=1e-3), torch.optim.SGD(rest, lr=0.1)]
        batches = [(torch.randn(7, 5), torch.randn(7, 3)) for _ in range(3)]
        return model, optimizers, batches, F.mse_loss

    report = verify_experiment(Experiment(make, wrap, ranks=3), shoal.run)
    assert report.equal, report

    def save() -> None:
        module = build()
        model = DDPModel(module, shoal.world())
        optimizer = ZeRO1Optimizer(torch.optim.Adam(module.parameters()), model)
        model.train_step(torch.ones(2, 5), torch.ones(2, 3), F.mse_loss)
        optimizer.step()
        shoal.save(tmp_path, model, optimizer)

    def load() -> int:
        module = build()
        optimizer = torch.optim.Adam(module.parameters())
        shoal.load(tmp_path, module, optimizer)
        return len(optimizer.state)

    shoal.run(save, 2, "memory")
    assert load() == 4


def test_after_another_optimizer() -> None:
    def wrap(first: type, second: type) -> None:
        module = build()
        model = DDPModel(module, shoal.world())
        first(torch.optim.SGD(module[0].parameters()), model)
        second(torch.optim.SGD(module[2].parameters()), model)

    with pytest.raises(ShoalError, match=r"ZeRO1Optimizer must be wrapped before .* DDPOptimizer"):
        shoal.run(wrap, 2, "memory", args=(DDPOptimizer, ZeRO1Optimizer))
    with pytest.raises(TypeError, match="all as DDPOptimizer"):
        shoal.run(wrap, 2, "memory", args=(ZeRO1Optimizer, DDPOptimizer))
    shoal.run(wrap, 2, "memory", args=(ZeRO1Optimizer, ZeRO1Optimizer))


def test_other_pairs_are_refused() -> None:
    def wrap() -> None:
        module = build()
        model = ZeRO2Model(module, shoal.world())
        ZeRO1Optimizer(torch.optim.SGD(module.parameters()), model)

    with pytest.raises(TypeError, match="ZeRO1Optimizer goes with ZeRO1Model"):
        shoal.run(wrap, 2, "memory")


# Options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "option", "words"),
    [
        ("ddp", "find_unused_parameters", "'ddp' has no option 'find_unused_parameters': param"),
        ("ddp", "broadcast_buffers", "average_buffers=True"),
        ("fsdp", "ignored_params", "requires_grad_"),
        ("fsdp", "ignored_modules", "requires_grad_"),
        ("zero3", "reshard_after_forward", "'zero2' keeps them"),
        ("zero2", "mixed_precison", "did you mean 'mixed_precision'"),
        ("zero2", "sequence_parallel", "it is one of 'tensor'"),
        ("ddp", "stage", "choose strategy='zero1'"),
        ("tensor", "colour", "It has tensor, data, zero"),
    ],
)  # fmt: skip
def test_options_that_there_are_not(strategy, option, words) -> None:
    with pytest.raises(TypeError, match=words):
        shoal.run(
            lambda: shoal.as_distributed(build(), strategy=strategy, **{option: 1}), 1, "memory"
        )


def test_options_that_there_are() -> None:
    assert "average_buffers" in options_of(PAIRS["ddp"][0])
    assert {"tensor", "zero", "seed", "replica"} <= set(options_of(PAIRS["tensor"][0]))
    assert {"pipeline", "micro_batches", "tensor"} <= set(options_of(PAIRS["hybrid"][0]))


# Words ------------------------------------------------------------------------------------


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
