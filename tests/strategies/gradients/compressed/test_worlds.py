"""Compressed gradients over real transports, and on the data axis of models that are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pools
import shoal
from shoal.compression import parse
from strategies.gradients.compressed.replay import Replay
from strategies.gradients.compressed.test_exchange import SHAPES, STEPS, some_steps, wishes


@pytest.mark.parametrize("name", ["int8", "topk:0.1", "powersgd:2"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("shm", 2), ("gloo", 3), pytest.param("mpi", 3, marks=pytest.mark.mpi)],
)
def test_processes_equal_the_definition(backend: str, ranks: int, strategy: str, name: str) -> None:
    results = pools.Team(backend, ranks).run(some_steps, strategy, name, True)
    shapes = [(key, torch.Size(shape)) for key, shape in SHAPES]
    replay = Replay(parse(name), shapes, ranks, sharded=strategy != "ddp")
    for step in range(STEPS):
        flat = [replay.flat([*wishes(step, rank).values()]) for rank in range(ranks)]
        average = replay.average(flat)
        found = [replay.flat([*result[step].values()]) for result in results]
        assert all(torch.equal(found[0], each) for each in found)
        assert torch.allclose(found[0], average, rtol=1e-5, atol=1e-6)


def built() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4)
    )


def trained(compression: str | None, **options: Any) -> dict[str, torch.Tensor]:
    module = built()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = shoal.as_distributed(module, optimizer, compression=compression, **options)
    group = model.data_group
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + group.rank)
        x = torch.randn(8, 8, generator=generator)
        optimizer.zero_grad()
        model.train_step(x, x[:, :4], F.mse_loss)
        optimizer.step()
    if compression not in (None, "none"):
        counted = shoal.world().stats().compression
        assert 0 < counted.sent_bytes <= 0.5 * counted.raw_bytes
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "tensor", "tensor": 2},
        {"strategy": "tensor", "tensor": 2, "zero": 2},
        {"strategy": "pipeline", "pipeline": 2, "micro_batches": 2},
        {"strategy": "hybrid", "tensor": 1, "pipeline": 2, "zero": 1, "micro_batches": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_on_the_data_axis(options: dict[str, Any]) -> None:
    def run(compression: str | None) -> list[Any]:
        return shoal.run(lambda: trained(compression, **options), 4, "memory", timeout=60)

    exact = run(None)[0]
    for name, tolerance in (("none", 1e-5), ("bf16", 2e-3), ("int8", 2e-2)):
        states = run(name)
        for state in states:
            for key, value in state.items():
                assert torch.equal(value, states[0][key])
                assert torch.allclose(value, exact[key], rtol=0, atol=tolerance), key


def sums_and_residuals(compression: str, **options: Any) -> Any:
    """Of every parameter the sum of all averaged gradients; of every rank's part its residual."""
    module = built()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0)
    model, optimizer = shoal.as_distributed(module, optimizer, compression=compression, **options)
    applied: dict[str, torch.Tensor] = {}
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + model.data_group.rank)
        x = torch.randn(8, 8, generator=generator)
        optimizer.zero_grad()
        model.train_step(x, x[:, :4], F.mse_loss)
        for name, gradient in model.full_gradients():
            applied[name] = applied.get(name, 0) + gradient
        optimizer.step()
    parts = [
        (held.name, *held.extent.runs(), held.memory.clone())
        for held in model.compression_state.held_residual()
    ]
    return applied, parts, model.data_group.size


@pytest.mark.parametrize("name", ["int4", "sign", "topk:0.1", "powersgd:2"])
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "tensor", "tensor": 2},
        {"strategy": "tensor", "tensor": 2, "zero": 3},
        {"strategy": "pipeline", "pipeline": 2, "micro_batches": 2},
        {"strategy": "pipeline", "pipeline": 2, "zero": 2, "micro_batches": 2},
        {"strategy": "hybrid", "tensor": 2, "pipeline": 1, "zero": 1},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_what_is_not_applied_is_in_the_residual_of_cut_models(
    options: dict[str, Any], name: str
) -> None:
    """Parameters stay, so that all gradients of all steps are known."""
    ranks = shoal.run(lambda: sums_and_residuals(name, **options), 4, "memory", timeout=60)
    num_replicas = ranks[0][2]
    module = built()
    for step in range(4):
        for rank in range(num_replicas):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(8, 8, generator=generator)
            (F.mse_loss(module(x), x[:, :4]) / num_replicas).backward()
    left = {key: torch.zeros_like(each).view(-1) for key, each in module.named_parameters()}
    times = {key: torch.zeros_like(each) for key, each in left.items()}
    for _, parts, _ in ranks:
        for key, full, own, sizes, memory in parts:
            for there, here, size in zip(full, own, sizes, strict=True):
                left[key][there : there + size] += memory[here : here + size]
                times[key][there : there + size] += 1
    is_any_left = False
    for key, parameter in module.named_parameters():
        mean = (left[key] / times[key]).view_as(parameter)
        is_any_left |= bool(mean.abs().max() > 1e-3)
        found = ranks[0][0][key] + mean
        assert torch.allclose(found, parameter.grad, atol=1e-5), key
    assert is_any_left


def trained_split(compression: str, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 25), nn.Tanh(), nn.Linear(25, 8))
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = shoal.as_distributed(
        module, optimizer, compression=compression, check_every=1, **options
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + model.data_group.rank)
        x = torch.randn(8, 8, generator=generator)
        optimizer.zero_grad()
        model.train_step(x, x.flip(1), F.mse_loss)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["int4", "sign", "topk:0.3", "randomk:0.5", "powersgd:1"])
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "tensor", "tensor": 2},
        {"strategy": "tensor", "tensor": 2, "zero": 3, "min_group_bytes": 10},
        {"strategy": "hybrid", "tensor": 2, "pipeline": 1, "zero": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_what_tensor_ranks_have_in_common_stays_equal(options: dict[str, Any], name: str) -> None:
    """What a codec makes of a bias may not depend on the parts of weights that lie beside it."""
    states = shoal.run(lambda: trained_split(name, **options), 4, "memory", timeout=60)
    for state in states:
        assert [key for key in state if not torch.equal(state[key], states[0][key])] == []
