"""Ranks that have parts of parameters, or only some of them: the same checkpoint as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from checkpoint.training import assert_same, on_ranks, state
from shoal.comm import Backend
from shoal.optim.data_parallel_optimizers import DDPOptimizer, ZeRO3Optimizer
from shoal.sharding.split import Split
from shoal.strategies.data_parallel import DDPModel, ZeRO3Model

WIDTH, ROWS = 6, 11
SPLITS = {"weight": 0, "bias": 0, "out": 1}


class Full(nn.Module):
    """A matrix that is cut by rows, one by columns, and something that everybody has."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH))
        self.bias = nn.Parameter(torch.randn(rows))
        self.out = nn.Parameter(torch.randn(WIDTH, rows))
        self.norm = nn.Parameter(torch.randn(WIDTH))


def full() -> tuple[Full, Any]:
    torch.manual_seed(0)
    model = Full()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def runs_of(part: int, num_parts: int) -> tuple[tuple[int, int], ...]:
    """Two runs for each part, of different lengths, as a joined projection has them."""
    edges = [ROWS * n // (2 * num_parts) for n in range(2 * num_parts + 1)]
    return tuple((edges[n], edges[n + 1]) for n in (part, part + num_parts))


class _Parts:
    """What tensor parallelism overrides."""

    runs: tuple[tuple[int, int], ...]
    everybody: Backend

    @property
    def all_ranks(self) -> Backend:
        return self.everybody

    def split_of(self, name: str) -> Split | None:
        if name not in SPLITS:
            return None
        sizes = {"weight": [ROWS, WIDTH], "bias": [ROWS], "out": [WIDTH, ROWS]}
        return Split(torch.Size(sizes[name]), SPLITS[name], self.runs)


class DDPParts(_Parts, DDPModel):
    pass


class ZeRO3Parts(_Parts, ZeRO3Model):
    pass


def make(num_parts: int, is_sharded: bool) -> Any:
    """A model of which each part is held by one or more ranks, sharded among them or not."""
    backend = shoal.world().backend
    part = backend.rank % num_parts
    runs = runs_of(part, num_parts)
    module = Full(sum(stop - start for start, stop in runs))
    kind = ZeRO3Parts if is_sharded else DDPParts
    model = kind(module, backend.split(part), min_group_bytes=100)
    object.__setattr__(model, "runs", runs)
    object.__setattr__(model, "everybody", backend)
    pair = ZeRO3Optimizer if is_sharded else DDPOptimizer
    return model, pair(torch.optim.Adam(module.parameters(), lr=0.1), model)


def move(source: Path, target: Path, num_parts: int, is_sharded: bool) -> Any:
    model, optimizer = make(num_parts, is_sharded)
    shoal.load(source, model, optimizer)
    shoal.save(target, model, optimizer)
    with model.full_parameters():
        return {name: p.detach().clone() for name, p in model.named_parameters()}, model.runs


def check_full(path: Path) -> None:
    model, optimizer = Full(), None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.7)
    shoal.load(path, model, optimizer)
    assert_same(state(model, optimizer), state(*full()))


WAYS = [(1, 1, False), (2, 2, False), (4, 2, True), (3, 3, False), (6, 3, True)]


@pytest.mark.parametrize(("ranks", "num_parts", "is_sharded"), WAYS)
def test_parts_in_and_out(tmp_path: Path, ranks: int, num_parts: int, is_sharded: bool) -> None:
    model, optimizer = full()
    shoal.save(tmp_path / "a", model, optimizer)
    for local, runs in on_ranks(move, ranks, tmp_path / "a", tmp_path / "b", num_parts, is_sharded):
        expected = Split(torch.Size([WIDTH, ROWS]), 1, runs).take(model.out.detach())
        assert torch.equal(local["out"], expected)
    check_full(tmp_path / "b")
    # And from parts to other parts.
    on_ranks(move, 2, tmp_path / "b", tmp_path / "c", 2, False)
    on_ranks(move, 5, tmp_path / "c", tmp_path / "d", 5, False)
    check_full(tmp_path / "d")


class Stage(DDPModel):
    """What a pipeline has: some of the names."""

    @property
    def all_ranks(self) -> Backend:
        everybody: Backend = self.__dict__["everybody"]
        return everybody


def stages(path: Path, do: str) -> Any:
    """Each rank has one layer of three, under its full name."""
    backend = shoal.world().backend
    torch.manual_seed(0)
    layers = {f"layer{n}": nn.Linear(n + 2, 3) for n in range(3)}
    module = nn.ModuleDict({f"layer{backend.rank}": layers[f"layer{backend.rank}"]})
    model = Stage(module, backend.split(backend.rank))
    object.__setattr__(model, "everybody", backend)
    inner = torch.optim.SGD(
        [{"params": [p for p in module.parameters() if p.dim() == 2]},
         {"params": [p for p in module.parameters() if p.dim() == 1], "lr": 0.5}],
        lr=0.1, momentum=0.9,
    )  # fmt: skip
    optimizer = DDPOptimizer(inner, model)
    if do == "save":
        sum(p.sum() for p in module.parameters()).backward()
        optimizer.step()
        shoal.save(path, model, optimizer)
    else:
        shoal.load(path, model, optimizer)
    return state(model, optimizer)


def test_some_of_the_names(tmp_path: Path) -> None:
    saved = on_ranks(stages, 3, tmp_path, "save")
    for before, after in zip(saved, on_ranks(stages, 3, tmp_path, "load"), strict=True):
        assert_same(before, after)
    model = nn.ModuleDict({f"layer{n}": nn.Linear(n + 2, 3) for n in range(3)})
    matrices = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "lr": 9.0}, {"params": biases}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    shoal.load(tmp_path, model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[int(name[5])][f"model/{name}"])
    assert len(optimizer.state) == 6
