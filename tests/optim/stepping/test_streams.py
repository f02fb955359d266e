"""Random numbers of a step are the same whoever steps a parameter, and none of the user's."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import pools
import shoal
from shoal.optim import Kind, find_kind
from shoal.optim.stepping.streams import Streams
from shoal.torch_support.random_state import RandomState

pytestmark = pytest.mark.filterwarnings("ignore:.*may couple any of its parameters")
STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]


class Langevin(Optimizer):
    """Gradient descent with noise."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + self.noise(p), alpha=group["lr"])

    def noise(self, p: nn.Parameter) -> Tensor:
        return torch.randn_like(p) + torch.empty_like(p).uniform_()


class WithOwnGenerator(Langevin):
    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.generator = torch.Generator().manual_seed(5)

    def noise(self, p: nn.Parameter) -> Tensor:
        return torch.zeros_like(p).normal_(generator=self.generator)


class ForNobody(Langevin):
    def noise(self, p: nn.Parameter) -> Tensor:
        return torch.randn(p.shape)


class WithPython(Langevin):
    def noise(self, p: nn.Parameter) -> Tensor:
        return p * (random.random() + np.random.rand())


KINDS = {
    Langevin: Kind.PER_PARAMETER,
    WithOwnGenerator: Kind.PER_PARAMETER,
    ForNobody: Kind.GLOBAL,
    WithPython: Kind.GLOBAL,
}


def build(make: Any) -> Any:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 3))
    model[0].bias.requires_grad_(False)
    groups = [{"params": list(model[3].parameters())}, {"params": list(model[0].parameters())}]
    batches = [(torch.randn(6, 5), torch.randn(6, 3)) for _ in range(3)]
    return model, make(groups), batches, nn.functional.mse_loss


@pytest.mark.parametrize("make", KINDS)
def test_kinds_of_what_draws(make: Any) -> None:
    assert find_kind(build(make)[1]) is KINDS[make]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", KINDS)
def test_training_with_draws_equals_one_process(make: Any, strategy: str, ranks: int) -> None:
    shoal.verify(
        partial(build, make), strategy=strategy, ranks=ranks, steps=3, reference="split"
    ).raise_if_different()


@pytest.mark.parametrize("strategy", ["tensor", "pipeline", "fsdp"])
def test_other_strategies_draw_alike(strategy: str) -> None:
    def plain(make: Any) -> Any:
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(3)]
        return model, make(model.parameters()), batches, nn.functional.mse_loss

    shoal.verify(
        partial(plain, Langevin), strategy=strategy, ranks=2, steps=3, reference="split"
    ).raise_if_different()


def _train(model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        model(torch.full((2, 5), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _wrapped(strategy: str, make: Any, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    return shoal.as_distributed(module, make(module.parameters()), strategy=strategy)


@pytest.mark.parametrize("make", KINDS)
def test_ranks_with_other_generators_stay_alike_and_keep_them(make: Any) -> None:
    def train() -> Any:
        model, optimizer = _wrapped("ddp", make)
        torch.manual_seed(100 + shoal.world().rank)
        before = RandomState.capture()
        _train(model, optimizer, 3)
        state = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
        before.restore()
        assert torch.equal(state[0], torch.get_rng_state())
        assert state[1] == random.getstate()
        assert state[2] == np.random.get_state()[1].tolist()
        return model.state_dict()

    first, second = shoal.run(train, 2, "memory")
    assert all(torch.equal(first[name], second[name]) for name in first)


def _train_apart(strategy: str) -> Any:
    model, optimizer = _wrapped(strategy, Langevin)
    torch.manual_seed(100 + shoal.world().rank)
    _train(model, optimizer, 3)
    return dict(model.state_dict())


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_processes_draw_what_threads_draw(strategy: str, backend: str) -> None:
    (expected, _) = shoal.run(_train_apart, 2, "memory", args=("ddp",))
    for state in pools.Team(backend, 2).run(_train_apart, strategy):
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_another_seed_draws_other_numbers() -> None:
    def train(seed: int) -> Any:
        model, optimizer = _wrapped("zero2", Langevin)
        torch.manual_seed(seed)
        _, again = model, optimizer
        again.supervision.seed(torch.initial_seed())
        _train(model, again, 1)
        return model.state_dict()["0.weight"]

    (one, _), (other, _) = (shoal.run(train, 2, "memory", args=(seed,)) for seed in (1, 2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("way", ["save", "state_dict"])
def test_a_resumed_run_goes_on_drawing_where_it_was(way: str, tmp_path: Path) -> None:
    def train(resume: bool) -> Any:
        model, optimizer = _wrapped("zero2", Langevin)
        _train(model, optimizer, 2)
        if resume:
            states = model.state_dict(), optimizer.state_dict()
            shoal.save(tmp_path / "run", model, optimizer)
            model, optimizer = _wrapped("zero3", Langevin, seed=9)
            if way == "save":
                shoal.load(tmp_path / "run", model, optimizer)
            else:
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
        _train(model, optimizer, 2)
        return model.state_dict()

    (straight, _), (resumed, *_) = (
        shoal.run(train, ranks, "memory", args=(resume,))
        for resume, ranks in ((False, 2), (True, 3))
    )
    for name, value in straight.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-6)


def test_a_plain_optimizer_loads_the_state() -> None:
    def state() -> Any:
        model, optimizer = _wrapped("zero1", Langevin)
        _train(model, optimizer, 1)
        return optimizer.state_dict()

    found = shoal.run(state, 2, "memory")[0]
    plain = Langevin(nn.Linear(5, 7).parameters())
    found["param_groups"][0]["params"] = [0, 1]
    plain.load_state_dict(found)


def test_what_does_not_draw_has_no_streams() -> None:
    def state() -> Any:
        model, optimizer = _wrapped("zero2", torch.optim.AdamW)
        _train(model, optimizer, 1)
        return optimizer.supervision.streams, sorted(optimizer.state_dict())

    assert shoal.run(state, 1, "memory") == [(None, ["param_groups", "state"])]


def test_streams_differ_by_step_parameter_and_draw() -> None:
    streams, seen = Streams(0), set()
    normal = torch.ops.aten.normal_.default
    for _ in range(2):
        with streams.step():
            for number in (0, 1, 0):
                seen.add(streams.draw(number, normal, (torch.zeros(1),), {}).item())
    assert len(seen) == 6
