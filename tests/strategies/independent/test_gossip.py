"""Strategy "async" without servers: each rank has its own parameters and averages with partners."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import pools
import shoal
from shoal.errors import ShoalError
from strategies.independent.replicas import (
    RANKS,
    State,
    Tied,
    assert_equal,
    build,
    data,
    on_ranks,
    train,
)

pytestmark = pytest.mark.timeout(60)

STEPS = 5
Events = list[tuple[str, int, float]]


def made(**options: Any) -> tuple[Any, Any]:
    module = build()
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    return shoal.as_distributed(module, optimizer, strategy="async", topology="gossip", **options)


def replayed(events: list[Any]) -> list[State]:
    """The definition in one process: what happened to whose parameters, in order."""
    own = [build() for _ in range(RANKS)]
    optimizers = [SGD(each.parameters(), lr=0.1, momentum=0.9) for each in own]
    replicas, steps = [build() for _ in range(RANKS)], [0] * RANKS
    for holder, event, rank, factor in events:
        if event == "pull":
            replicas[rank].load_state_dict(own[rank].state_dict())
        elif event == "push":
            inputs, targets = data(steps[rank], rank)
            steps[rank] += 1
            loss = F.mse_loss(replicas[rank](inputs), targets)
            gradients = torch.autograd.grad(loss, list(replicas[rank].parameters()))
            if factor:
                for parameter, gradient in zip(own[rank].parameters(), gradients, strict=True):
                    parameter.grad = gradient
                optimizers[rank].param_groups[0]["lr"] = 0.1 * factor
                optimizers[rank].step()
        else:
            with torch.no_grad():
                pairs = zip(own[holder].parameters(), own[rank].parameters(), strict=True)
                for here, there in pairs:
                    way = (there - here) / 2
                    here += way
                    there -= way
    return [each.state_dict() for each in own]


@pytest.mark.parametrize("partners", ["random", "ring"])
@pytest.mark.parametrize("when_stale", ["drop", "damp", "wait"])
def test_equals_its_definition_to_the_last_bit(when_stale: str, partners: str) -> None:
    class Noted(list[Any]):
        """With the moment: ranks are threads of one process, and take turns."""

        def append(self, event: Any) -> None:
            super().append((time.perf_counter_ns(), *event))

    def go() -> tuple[State, int, int, Any]:
        model, optimizer = made(max_staleness=1, when_stale=when_stale, partners=partners)
        noted = model.shard.ledgers[0].events = Noted()
        own = shoal.world().rank
        train(model, optimizer, range(STEPS))
        shoal.world().barrier()
        model.pull()
        state = {name: each.detach().clone() for name, each in model.named_parameters()}
        events = [(moment, own, *event) for moment, *event in noted]
        return state, max(optimizer.staleness), sum(optimizer.dropped.values()), events

    ranks = on_ranks(go)
    events = [tuple(event) for _, *event in sorted(e for *_, noted in ranks for e in noted)]
    expected = replayed(events)
    assert any(event == "mix" for _, event, _, _ in events)
    for (state, most, dropped, _), own in zip(ranks, expected, strict=True):
        assert all(torch.equal(state[name], value) for name, value in own.items())
        assert most <= 1 or when_stale == "damp"
        assert not dropped or when_stale == "drop"
    weights = [state["0.weight"] for state, *_ in ranks]
    assert not all(torch.equal(each, weights[0]) for each in weights)


def test_by_hand() -> None:
    """Gradients are 3 on rank 1, which happens to push first, and 1 on rank 0."""

    def go() -> tuple[list[float], float]:
        module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(module.weight)
        model, optimizer = shoal.as_distributed(
            module, SGD(module.parameters(), lr=0.5), strategy="async", topology="gossip"
        )
        model(torch.ones(1, 1) * (1 + 2 * shoal.world().rank)).sum().backward()
        optimizer.step()
        shoal.world().barrier()
        model.pull()
        return module.weight.flatten().tolist(), model.state_dict()["weight"].item()

    assert on_ranks(go, 2) == [([-1.0], -1.0)] * 2


def test_the_average_is_that_of_all_updates() -> None:
    """What one rank adds another subtracts."""

    def go() -> float:
        module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(module.weight)
        model, optimizer = shoal.as_distributed(
            module, SGD(module.parameters(), lr=1.0), strategy="async", topology="gossip"
        )
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.full((1, 1), 1.0 + shoal.world().rank)).sum().backward()
            optimizer.step()
        return model.state_dict()["weight"].item()

    assert on_ranks(go) == [pytest.approx(-4 * (1 + 2 + 3) / 3)] * RANKS


def test_the_average_of_shared_weights_has_all_their_names() -> None:
    def go() -> tuple[State, State]:
        module = Tied()
        optimizer = SGD(module.parameters(), lr=0.1)
        model, optimizer = shoal.as_distributed(
            module, optimizer, strategy="async", topology="gossip"
        )
        train(model, optimizer, range(2))
        mean = model.state_dict()
        model.average()
        return mean, model.state_dict()

    ranks = on_ranks(go)
    for mean, agreed in ranks:
        assert_equal(mean, ranks[0][0])
        assert_equal(agreed, mean)


def test_saved_once_all_ranks_agree(tmp_path: Path) -> None:
    def save(path: Path) -> tuple[State, Tensor]:
        model, optimizer = made()
        train(model, optimizer, range(3))
        with pytest.raises(ShoalError, match=r"call model\.average\(\) on every rank"):
            shoal.save(path, model, optimizer)
        mean = model.state_dict()
        model.average()
        agreed = model.state_dict()
        assert all(torch.equal(agreed[name], value) for name, value in mean.items())
        shoal.save(path, model, optimizer)
        return agreed, optimizer.own_state()[0].tensors["momentum_buffer"]

    def load(path: Path) -> tuple[State, Tensor]:
        model, optimizer = made()
        train(model, optimizer, range(9, 10))
        shoal.load(path, model, optimizer)
        momentum = optimizer.own_state()[0].tensors["momentum_buffer"]
        return model.state_dict(), momentum

    saved = on_ranks(save, RANKS, tmp_path)
    assert not torch.equal(saved[0][1], saved[1][1])
    for (state, momentum), (others, others_momentum) in zip(
        on_ranks(load, RANKS, tmp_path), saved, strict=True
    ):
        assert all(torch.equal(state[name], value) for name, value in others.items())
        assert torch.equal(momentum, others_momentum)
    mean = sum(momentum for _, momentum in saved) / RANKS
    for _, momentum in on_ranks(load, 2, tmp_path):
        assert torch.allclose(momentum, mean, atol=1e-7)


def test_servers_are_refused() -> None:
    with pytest.raises(ValueError, match='servers= is for topology="server"'):
        on_ranks(lambda: made(servers=[0]), 2)
    with pytest.raises(ValueError, match="partners must be one of random, ring"):
        on_ranks(lambda: made(partners="all"), 2)


def test_described_and_verified() -> None:
    def go() -> str:
        model, _ = made(partners="ring")
        return model.describe()

    assert "made on every rank, which averages with ring partners" in on_ranks(go, 2)[0]
    with pytest.raises(ValueError, match='leave out topology="gossip"'):
        shoal.verify(lambda: None, "async", topology="gossip")


@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_between_processes(backend: str) -> None:
    def go() -> tuple[State, float]:
        model, optimizer = made()
        train(model, optimizer, range(6))
        state = model.state_dict()
        model.average()
        return state, float((model[0].weight - state["0.weight"]).abs().max())

    ranks = pools.Team(backend, 3).run(go)
    for state, apart in ranks:
        assert apart == 0.0
        assert all(torch.equal(state[name], value) for name, value in ranks[0][0].items())
