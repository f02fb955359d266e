"""Strategy "async": parameters on servers, updated without barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

import pools
import shoal
from faults import worlds
from shoal.errors import DeadlockError, MismatchError, PeerError, ShoalError
from shoal.meeting import address as places
from shoal.optim import AsyncSGDOptimizer
from shoal.strategies import AsyncModel, DDPModel
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


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def made(make: Callable[..., Any] = momentum, **options: Any) -> tuple[Any, Any]:
    module = build()
    return shoal.as_distributed(module, make(module.parameters()), strategy="async", **options)


def replayed(
    events: Any, make: Callable[..., Any] = momentum, build: Callable[[], nn.Module] = build
) -> State:
    """The definition in one process: pulls and pushes in their order."""
    server = build()
    optimizer = make(server.parameters())
    (rate,) = {group["lr"] for group in optimizer.param_groups}
    replicas = [build() for _ in range(RANKS)]
    steps = [0] * RANKS
    for event, rank, factor in events:
        if event == "pull":
            replicas[rank].load_state_dict(server.state_dict())
            continue
        inputs, targets = data(steps[rank], rank)
        steps[rank] += 1
        gradients = torch.autograd.grad(
            F.mse_loss(replicas[rank](inputs), targets), list(replicas[rank].parameters())
        )
        if factor:
            for parameter, gradient in zip(server.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
    return server.state_dict()


# The definition ---------------------------------------------------------------------------


@pytest.mark.parametrize("servers", ["all", [1]], ids=str)
@pytest.mark.parametrize("when_stale", ["drop", "damp", "wait"])
def test_equals_its_definition_to_the_last_bit(when_stale: str, servers: Any) -> None:
    def go() -> Any:
        model, optimizer = made(max_staleness=1, when_stale=when_stale, servers=servers)
        ledger = model.shard.ledgers[0]
        ledger.events = []
        train(model, optimizer, range(STEPS))
        state = model.state_dict()
        return state, ledger.events, optimizer.staleness, optimizer.dropped, optimizer.waited_for

    ranks = on_ranks(go)
    events = ranks[model_server(servers)][1]
    assert len(events) == 2 * RANKS * STEPS
    for state, *_ in ranks:
        assert_equal(state, replayed(events))
    stale = sum((counted for _, _, counted, _, _ in ranks), start=type(ranks[0][2])())
    dropped = sum(sum(counted.values()) for *_, counted, _ in ranks)
    waited = sum(sum(counted.values()) for *_, counted in ranks)
    assert sum(stale.values()) + dropped == RANKS * STEPS
    assert (dropped > 0) == (when_stale == "drop")
    assert (waited > 0) == (when_stale == "wait")
    assert (max(stale) > 1) == (when_stale == "damp")
    if when_stale == "damp":
        assert any(0 < factor < 1 for _, _, factor in events)


@pytest.mark.parametrize("servers", ["all", [1]], ids=str)
def test_shared_weights_come_back_under_their_own_names(servers: Any) -> None:
    """They lie elsewhere in memory than their place among the names says."""

    def go() -> Any:
        module = Tied()
        model, optimizer = shoal.as_distributed(
            module, momentum(module.parameters()), strategy="async", servers=servers
        )
        model.shard.ledgers[0].events = events = []
        model.pull()
        assert_equal(dict(module.state_dict()), Tied().state_dict())
        train(model, optimizer, range(STEPS))
        return model.state_dict(), events

    ranks = on_ranks(go)
    for state, _ in ranks:
        assert_equal(state, replayed(ranks[model_server(servers)][1], build=Tied))


def model_server(servers: Any) -> int:
    return 0 if servers == "all" else servers[0]


def test_runs_repeat_exactly() -> None:
    def go() -> State:
        model, optimizer = made(Adam, when_stale="damp", max_staleness=1)
        train(model, optimizer, range(STEPS))
        return model.state_dict()

    assert_equal(on_ranks(go)[0], on_ranks(go)[0])


@pytest.mark.parametrize(
    ("when_stale", "share"),  # of the second push
    [("drop", 0.0), ("damp", 0.5), ("wait", 1.0)],
)
def test_one_update_of_each_rank_by_hand(when_stale: str, share: float) -> None:
    """Nothing is applied twice. Gradients are 1 on rank 0 and 3 on rank 1, the rate is 0.5."""

    def go() -> tuple[list[float], bool]:
        module = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(module.weight)
        optimizer = SGD(module.parameters(), lr=0.5)
        model, optimizer = shoal.as_distributed(
            module, optimizer, strategy="async", max_staleness=0, when_stale=when_stale
        )
        model(torch.ones(1, 4) * (1 + 2 * shoal.world().rank)).sum().backward()
        optimizer.step()
        return model.state_dict()["weight"].flatten().tolist(), 0 in optimizer.staleness

    (weight, was_first), (other, _) = on_ranks(go, ranks=2)
    expected = -0.5 - 1.5 * share if was_first and share < 1 else -1.5 - 0.5 * share
    assert weight == other == [expected] * 4


def test_one_rank_is_the_plain_optimizer() -> None:
    def go() -> State:
        model, optimizer = made(Adam)
        train(model, optimizer, range(3))
        return model.state_dict()

    (state,) = on_ranks(go, ranks=1)
    expected = replayed([("pull", 0, 1.0), ("push", 0, 1.0)] * 3, Adam)
    for name, value in expected.items():
        assert torch.allclose(state[name], value, atol=1e-7)


class Branches(nn.Module):
    """Each batch uses one of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 1, bias=False) for _ in range(3))
        for each in self.parameters():
            nn.init.ones_(each)

    def forward(self, inputs: Tensor, which: str) -> Tensor:
        return self.c(getattr(self, which)(inputs).expand(-1, 2))


# Workers and servers ----------------------------------------------------------------------


def test_a_worker_computes_with_what_it_pulled_until_it_steps() -> None:
    def go() -> tuple[bool, bool, bool]:
        model, optimizer = made()
        start = model[0].weight.detach().clone()
        train(model, optimizer, range(1))
        is_old = torch.equal(model[0].weight, start)
        model.pull()
        is_new = not torch.equal(model[0].weight, start)
        pulled = model[0].weight.detach().clone()
        shoal.world().barrier()
        with torch.no_grad():
            model(torch.ones(1, 5))  # an evaluation pulls nothing
        return is_old, is_new, torch.equal(model[0].weight, pulled)

    assert on_ranks(go) == [(True, True, True)] * RANKS


def test_each_update_is_made_with_the_options_of_its_worker() -> None:
    def go() -> float:
        module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(module.weight)
        optimizer = SGD(module.parameters(), lr=0.5)
        model, optimizer = shoal.as_distributed(module, optimizer, strategy="async")
        optimizer.param_groups[0]["lr"] = 10.0 ** shoal.world().rank
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        return model.state_dict()["weight"].item()

    assert on_ranks(go) == [-111.0] * RANKS


def test_unused_and_frozen_parameters_and_several_optimizers() -> None:
    def go() -> State:
        module = Branches()
        module.c.requires_grad_(False)
        first = Adam([*module.a.parameters(), *module.c.parameters()], lr=0.5)
        model, (first, second) = shoal.as_distributed(
            module, [first, SGD(module.b.parameters(), lr=1.0)], strategy="async"
        )
        used = "ab"[shoal.world().rank]
        model(torch.ones(1, 2), used).sum().backward()
        (first if used == "a" else second).step()
        return model.state_dict()

    for state in on_ranks(go, ranks=2):
        assert torch.allclose(state["a.weight"], torch.full((1, 2), 0.5), atol=1e-6)
        assert torch.equal(state["b.weight"], -torch.ones(1, 2))
        assert torch.equal(state["c.weight"], torch.ones(1, 2))


def test_ranks_may_make_other_numbers_of_steps() -> None:
    def go() -> tuple[State, int]:
        model, optimizer = made()
        train(model, optimizer, range(1 + 2 * shoal.world().rank))
        return model.state_dict(), sum(optimizer.staleness.values())

    ranks = on_ranks(go)
    assert [count for _, count in ranks] == [1, 3, 5]
    for state, _ in ranks:
        assert_equal(state, ranks[0][0])


def test_accumulated_gradients_are_one_update() -> None:
    def go() -> tuple[int, State]:
        model, optimizer = made()
        for step in range(2):
            inputs, targets = data(step, shoal.world().rank)
            F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        return sum(optimizer.staleness.values()), model.state_dict()

    assert [count for count, _ in on_ranks(go)] == [1] * RANKS


def test_mixed_precision_pulls_and_steps_masters() -> None:
    def go() -> tuple[torch.dtype, torch.dtype, State]:
        model, optimizer = made(mixed_precision="bf16")
        train(model, optimizer, range(3))
        return model[0].weight.dtype, optimizer.model.held_dtypes()["0.weight"], model.state_dict()

    ranks = on_ranks(go)
    for narrow, wide, state in ranks:
        assert (narrow, wide) == (torch.bfloat16, torch.float32)
        assert_equal(state, ranks[0][2])


def test_states_are_gathered_and_loaded() -> None:
    def go() -> tuple[Any, Any, State, State]:
        model, optimizer = made(Adam)
        train(model, optimizer, range(3))
        state, weights = optimizer.state_dict(), model.state_dict()
        other, other_optimizer = made(Adam)
        other.load_state_dict(weights)
        other_optimizer.load_state_dict(state)
        again = other_optimizer.state_dict()
        train(model, optimizer, range(3, 5))
        train(other, other_optimizer, range(3, 5))
        return state, again, model.state_dict(), other.state_dict()

    for state, again, weights, others in on_ranks(go):
        assert sorted(state["state"]) == [0, 1, 2, 3]
        for number, values in state["state"].items():
            assert torch.equal(values["exp_avg"], again["state"][number]["exp_avg"])
        assert_equal(others, weights)


def test_what_travels_is_counted() -> None:
    def go() -> dict[str, int]:
        model, optimizer = made(servers=[0])
        train(model, optimizer, range(2))
        shoal.world().barrier()
        return {kind: counter.calls for kind, counter in shoal.world().stats().items()}

    for calls in on_ranks(go):
        assert (calls["pull"], calls["admit"], calls["push"]) == (2, 2, 2)


# What is found and refused ----------------------------------------------------------------


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.clamp_(-0.01, 0.01)


def write_to_data(model: Any) -> None:
    """Leaves no trace in the counts of writes."""
    model[0].weight.data.copy_(model[0].weight.data.flip(0))


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("write", [write_in_place, write_to_data])
@pytest.mark.parametrize("then", ["train", "state_dict", "save"])
def test_changes_by_hand_are_not_lost_without_a_word(
    write: Callable[[Any], None], then: str, num_steps: int, tmp_path: Any
) -> None:
    def go() -> None:
        model, optimizer = made()
        train(model, optimizer, range(num_steps))
        write(model)
        if then == "train":
            train(model, optimizer, range(1))
        elif then == "state_dict":
            model.state_dict()
        else:
            shoal.save(str(tmp_path), model, optimizer)

    with pytest.raises(ShoalError, match="changed by hand"):
        on_ranks(go, ranks=2)


def test_two_optimizers_take_turns() -> None:
    """Each has versions of its own, and one forward serves both."""

    def go() -> tuple[int, State]:
        module = build()
        both = [SGD(module[0].parameters(), lr=0.1), SGD(module[2].parameters(), lr=0.1)]
        model, (first, second) = shoal.as_distributed(module, both, strategy="async")
        for step in range(3):
            inputs, targets = data(step, 0)
            F.mse_loss(model(inputs), targets).backward()
            first.step()
            second.step()
            model.zero_grad()
        return first.staleness.total() + second.staleness.total(), model.state_dict()

    plain = build()
    optimizer = SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = data(step, 0)
        optimizer.zero_grad()
        F.mse_loss(plain(inputs), targets).backward()
        optimizer.step()
    ((num_updates, found),) = on_ranks(go, ranks=1)
    assert num_updates == 6
    for name, values in plain.state_dict().items():
        torch.testing.assert_close(found[name], values)


def test_an_optimizer_that_computes_the_loss_itself() -> None:
    with pytest.raises(TypeError, match="LBFGS calls a closure that computes the loss again"):
        on_ranks(lambda: made(torch.optim.LBFGS, servers=[0]), ranks=2)


def test_a_step_without_a_forward() -> None:
    def go() -> None:
        model, optimizer = made()
        train(model, optimizer, range(1))
        optimizer.step()

    def in_eval() -> None:
        model, optimizer = made()
        model.eval()
        train(model, optimizer, range(1))

    with pytest.raises(ShoalError, match="without a forward since the last one"):
        on_ranks(go, ranks=2)
    with pytest.raises(ShoalError, match=r"called, model\(\.\.\.\), in training mode"):
        on_ranks(in_eval, ranks=2)


def test_a_server_that_left_is_named() -> None:
    def go() -> None:
        model, optimizer = made()
        train(model, optimizer, range(1 if shoal.world().rank == 1 else 4))

    with pytest.raises(PeerError, match="rank 1") as caught:
        on_ranks(go)
    assert "call of" in str(caught.value)
    assert "end the training with a call that all ranks make" in str(caught.value)


def test_who_waits_for_one_that_cannot_go_on_is_told_at_once() -> None:
    def go() -> None:
        model, optimizer = made(max_staleness=1, when_stale="wait")
        if shoal.world().rank == 1:
            model(data(0, 1)[0])  # pulls, and never pushes
            model.state_dict()
        else:
            train(model, optimizer, range(4))

    with pytest.raises(DeadlockError, match="waits for rank 1"):
        on_ranks(go, ranks=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topology": "ring"}, "topology must be one of"),
        ({"when_stale": "ignore"}, "when_stale must be one of drop, damp, wait"),
        ({"servers": [0, 7]}, "servers must be 'all' or different ranks from 0 to 1"),
        ({"servers": "some"}, "servers must be 'all'"),
        ({"max_staleness": -1}, "must not be negative"),
    ],
)
def test_wrong_options(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        on_ranks(lambda: made(**options), ranks=2)


def test_an_optimizer_that_couples_parameters_needs_one_server() -> None:
    def go() -> None:
        module = build()
        AsyncSGDOptimizer(momentum(module.parameters()), AsyncModel(module), kind="global")

    with pytest.raises(ValueError, match=r"servers=\[0\]"):
        on_ranks(go, ranks=2)


def test_wrong_partners() -> None:
    def go() -> None:
        module = build()
        AsyncSGDOptimizer(momentum(module.parameters()), DDPModel(module))  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="AsyncSGDOptimizer goes with AsyncModel"):
        on_ranks(go, ranks=2)


def test_described() -> None:
    def go() -> str:
        module = build()
        model = AsyncModel(module, servers=[1], max_staleness=3)
        AsyncSGDOptimizer(momentum(module.parameters()), model)
        return model.describe()

    assert "its steps are made on rank 1; drop beyond a staleness of 3" in on_ranks(go, 2)[0]


# Options of the optimizer -------------------------------------------------------------------


def test_options_of_the_optimizer_are_those_of_the_model() -> None:
    """The same run, said in two ways, and another one than without them."""

    def go(*, by_class: bool) -> tuple[State, str, dict[str, Any]]:
        if by_class:
            module = build()
            model: Any = AsyncModel(module)
            inner = momentum(module.parameters())
            optimizer: Any = AsyncSGDOptimizer(inner, model, "server", 0, "damp", [1])
        else:
            model, optimizer = made(max_staleness=0, when_stale="damp", servers=[1])
        train(model, optimizer, range(STEPS))
        return model.state_dict(), model.describe(), dict(optimizer.staleness)

    ranks, others = on_ranks(lambda: go(by_class=True)), on_ranks(lambda: go(by_class=False))
    for (state, text, staleness), (expected, described, counted) in zip(ranks, others, strict=True):
        assert_equal(state, expected)
        assert (text, staleness) == (described, counted)
        assert "its steps are made on rank 1; damp beyond a staleness of 0" in text


def test_gossip_is_an_option_of_the_optimizer_too() -> None:
    def go() -> tuple[str, int]:
        module = build()
        model = AsyncModel(module)
        inner = momentum(module.parameters())
        optimizer = AsyncSGDOptimizer(inner, model, topology="gossip", partners="ring")
        train(model, optimizer, range(2))
        model.average()
        return model.describe(), len(model.shard.parameters)

    for text, count in on_ranks(go):
        assert "every rank, which averages with ring partners" in text
        assert count == 4


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"when_stale": "skip"}, ValueError, "when_stale must be one of drop, damp, wait"),
        ({"max_staleness": -1}, ValueError, "must not be negative"),
        ({"servers": [7]}, ValueError, "different ranks from 0 to 1"),
        ({"topology": 3}, TypeError, "'topology' must be a string"),
        ({"topology": "gossip", "servers": [0]}, ValueError, 'with "gossip" there are none'),
    ],
)
def test_wrong_options_of_the_optimizer(options: Any, error: Any, text: str) -> None:
    def go() -> None:
        module = build()
        AsyncSGDOptimizer(momentum(module.parameters()), AsyncModel(module), **options)

    with pytest.raises(error, match=text):
        on_ranks(go, ranks=2)


def test_options_that_differ_between_ranks_or_come_too_late() -> None:
    def differ() -> None:
        module = build()
        rank = shoal.world().rank
        AsyncSGDOptimizer(momentum(module.parameters()), AsyncModel(module), max_staleness=rank)

    def late() -> None:
        module = build()
        model = AsyncModel(module)
        AsyncSGDOptimizer(momentum(module[0].parameters()), model)
        AsyncSGDOptimizer(momentum(module[2].parameters()), model, when_stale="drop")  # as it is
        AsyncSGDOptimizer(momentum(module[2].parameters()), model, when_stale="wait")

    with pytest.raises(MismatchError, match=r"AsyncSGDOptimizer\(max_staleness=1\)"):
        on_ranks(differ, ranks=2)
    with pytest.raises(ShoalError, match="options of its own must be wrapped before the others"):
        on_ranks(late, ranks=2)


# Processes --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
@pytest.mark.parametrize("when_stale", ["drop", "damp", "wait"])
def test_between_processes(when_stale: str, backend: str) -> None:
    def go() -> tuple[State, int, int]:
        model, optimizer = made(Adam, when_stale=when_stale, max_staleness=1)
        train(model, optimizer, range(8))
        state = model.state_dict()
        most = max(optimizer.staleness, default=0)
        return state, most, sum(optimizer.staleness.values()) + sum(optimizer.dropped.values())

    ranks = pools.Team(backend, 3).run(go)
    for state, most, count in ranks:
        assert most <= 1 or when_stale == "damp"
        assert count == 8
        assert_equal(state, ranks[0][0])
        assert all(value.isfinite().all() for value in state.values())


def stand_still(options: Any) -> tuple[dict[int, int], dict[int, int]]:
    """The last rank pulls before the others begin, and pushes when they are through."""
    model, optimizer = made(max_staleness=2, **options)
    world = shoal.world()
    last = world.size - 1
    if world.rank == last:
        inputs, targets = data(0, last)
        loss = F.mse_loss(model(inputs), targets)
        for other in range(last):
            world.send(torch.ones(1), other)
        for other in range(last):
            world.recv(src=other)
        loss.backward()
        optimizer.step()
    else:
        world.recv(src=last)
        train(model, optimizer, range(6))
        world.send(torch.ones(1), last)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    return dict(optimizer.staleness), dict(optimizer.dropped)


@pytest.mark.parametrize(
    "backend", ["memory", "shm", "gloo", pytest.param("mpi", marks=pytest.mark.mpi)]
)
@pytest.mark.parametrize(
    "options",
    [{"when_stale": "drop"}, {"when_stale": "damp"}, {"topology": "gossip"}],
    ids=lambda options: "-".join(options.values()),
)
def test_nobody_waits_for_a_rank_that_stands_still(options: Any, backend: str) -> None:
    *others, (counted, dropped) = pools.Team(backend, 3).run(stand_still, options)
    assert all(sum(made.values()) + sum(lost.values()) == 6 for made, lost in others)
    if options.get("when_stale") == "drop":
        assert counted == {}
        assert sum(dropped) == sum(sum(made.values()) for made, _ in others)
    elif options.get("when_stale") == "damp":
        assert (counted, dropped) == ({12: 1}, {})


def train_between_hosts() -> tuple[State, int, bool]:
    model, optimizer = made(Adam)
    train(model, optimizer, range(6))
    state = model.state_dict()
    address = shoal.world().backend._state.tensor_server.address
    count = sum(optimizer.staleness.values()) + sum(optimizer.dropped.values())
    return state, count, bool(places.host_and_port(address))


def test_between_hosts() -> None:
    ranks = worlds.values(worlds.outcomes_between_hosts(train_between_hosts, ranks=3))
    for state, count, is_over_tcp in ranks:
        assert (count, is_over_tcp) == (6, True)
        assert_equal(state, ranks[0][0])
        assert all(value.isfinite().all() for value in state.values())
