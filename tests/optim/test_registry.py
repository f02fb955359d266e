"""Which optimizer goes with which model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pools
import shoal
from shoal.errors import ShoalError
from shoal.optim import DATA_PARALLEL, PAIRS
from shoal.optim.data_parallel_optimizers import DDPOptimizer, ZeRO1Optimizer
from shoal.optim.registry import choose_strategy
from shoal.strategies.data_parallel import DDPModel, ZeRO1Model, ZeRO2Model
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


def test_described_with_an_optimizer_that_shards_more() -> None:
    def describe() -> str:
        module = build()
        model = DDPModel(module, shoal.world())
        ZeRO1Optimizer(torch.optim.SGD(module.parameters()), model)
        return model.describe()

    assert (
        "each rank has its part of the state, as under zero1" in shoal.run(describe, 2, "memory")[0]
    )


def test_every_strategy_stands_in_the_table_once() -> None:
    assert list(PAIRS)[: len(DATA_PARALLEL)] == list(DATA_PARALLEL)
    for name, (model, optimizer) in PAIRS.items():
        assert model.strategy == name
        assert optimizer.model_class is model
    assert len({pair.optimizer for pair in PAIRS.values()}) == len(PAIRS)


@pytest.mark.parametrize(
    ("num_parameters", "ranks", "strategy"),
    [(10**8, 4, "ddp"), (5 * 10**9, 4, "zero2"), (2 * 10**10, 4, "zero3"), (2 * 10**10, 1, "ddp")],
)
def test_what_auto_stands_for(num_parameters: int, ranks: int, strategy: str) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(num_parameters, device="meta"))
    assert choose_strategy(module, ranks) == strategy
