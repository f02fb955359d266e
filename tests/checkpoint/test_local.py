"""Checkpoints of replicas that are trained apart: at boundaries, and with any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import shoal
from checkpoint.replicas import State, made, run, train
from shoal.errors import ShoalError

pytestmark = pytest.mark.timeout(60)


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def states_of(optimizer: Any) -> dict[str, State]:
    """This rank's own, by parameter."""
    return {held.name: dict(held.tensors) for held in optimizer.own_state()}


def save_and_go_on(path: Path, options: Any) -> Any:
    model, optimizer = made("local", every=3, **options)
    train(model, optimizer, range(6))
    shoal.save(path, model, optimizer)
    own = states_of(optimizer)
    train(model, optimizer, range(6, 12))
    return model.state_dict(), own


def load_and_go_on(path: Path, options: Any) -> Any:
    model, optimizer = made("local", every=3, **options)
    train(model, optimizer, range(20, 22))  # in the middle of a round, with something to overwrite
    shoal.load(path, model, optimizer)
    assert model.is_at_boundary
    own = states_of(optimizer)
    train(model, optimizer, range(6, 12))
    return model.state_dict(), own


@pytest.mark.parametrize(
    "options",
    [{}, {"outer": nesterov}, {"compression": "topk:0.2", "outer": nesterov}],
    ids=["average", "diloco", "compressed"],
)
def test_resumed_to_the_last_bit(tmp_path: Path, options: Any) -> None:
    expected = run(save_and_go_on, 3, tmp_path, options)
    found = run(load_and_go_on, 3, tmp_path, options)
    for (state, own), (other, others_own) in zip(found, expected, strict=True):
        assert all(torch.equal(state[name], other[name]) for name in other)
        for name, values in others_own.items():
            assert all(torch.equal(own[name][key], value) for key, value in values.items())
    first, second = expected[0][1], expected[1][1]
    assert not torch.equal(first["0.weight"]["exp_avg"], second["0.weight"]["exp_avg"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_number_of_ranks_gets_the_average(tmp_path: Path, ranks: int) -> None:
    saved = run(save_and_go_on, 3, tmp_path, {"outer": nesterov})
    mean = sum(own["0.weight"]["exp_avg"] for _, own in saved) / 3
    for _, own in run(load_and_go_on, ranks, tmp_path, {"outer": nesterov}):
        assert torch.allclose(own["0.weight"]["exp_avg"], mean, atol=1e-7)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_other_strategies_read_it_and_are_read(tmp_path: Path, strategy: str) -> None:
    def other(path: Path) -> tuple[State, State]:
        model, optimizer = made(strategy)
        shoal.load(path / "local", model, optimizer)
        moments = optimizer.state_dict()["state"]
        train(model, optimizer, range(2))
        shoal.save(path / "other", model, optimizer)
        return {n: s["exp_avg"] for n, s in moments.items()}, model.state_dict()

    def back(path: Path) -> State:
        model, optimizer = made("local", every=3, outer=nesterov)
        shoal.load(path / "other", model, optimizer)
        return model.state_dict()

    saved = run(save_and_go_on, 2, tmp_path / "local", {})
    mean = (saved[0][1]["0.weight"]["exp_avg"] + saved[1][1]["0.weight"]["exp_avg"]) / 2
    others = run(other, 2, tmp_path)
    for moments, _ in others:
        assert torch.allclose(moments[0].flatten(), mean, atol=1e-7)
    for state in run(back, 3, tmp_path):
        assert all(torch.equal(value, others[0][1][name]) for name, value in state.items())


def test_refused_in_the_middle_of_a_round(tmp_path: Path) -> None:
    def go(path: Path) -> None:
        model, optimizer = made("local", every=3)
        train(model, optimizer, range(2))
        with pytest.raises(ShoalError, match=r"2 of 3 steps.*optimizer\.average\(\)"):
            shoal.save(path, model, optimizer)
        optimizer.average()
        shoal.save(path, model, optimizer)

    run(go, 2, tmp_path)


def test_ranks_that_used_other_parameters_resume_with_their_own(tmp_path: Path) -> None:
    def go(path: Path, is_loaded: bool) -> tuple[list[str], list[Any]]:
        module = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in "ab"})
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        model, optimizer = shoal.as_distributed(module, optimizer, strategy="local", every=2)
        if is_loaded:
            shoal.load(path, model, optimizer)
        else:
            rank = shoal.world().rank
            for step in range(2):
                used = "b" if rank and step else "a"
                optimizer.zero_grad()
                module[used](torch.ones(1, 2)).sum().backward()
                optimizer.step()
            shoal.save(path, model, optimizer)
        own = optimizer.own_state()
        return [held.name for held in own], [float(held.shared["step"]) for held in own]

    assert run(go, 2, tmp_path, False) == run(go, 2, tmp_path, True)
    assert run(go, 2, tmp_path, True) == [(["a.weight"], [2.0]), (["a.weight", "b.weight"], [1, 1])]
