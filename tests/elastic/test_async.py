"""Strategy "async" while ranks come, go and die: the others go on, lost shards come from copies."""

from __future__ import annotations

import copy
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import leaks
import shoal
from elastic import faults
from shoal.comm.memory.peer_tensors import ThreadPeerTensors
from shoal.elastic import AsyncElasticOptimizer, Elastic, ElasticOptimizer
from shoal.elastic.async_keeper import AsyncKeeper
from shoal.errors import CheckpointWarning, ShoalError
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.strategies import AsyncModel
from shoal.strategies.independent.shard import Shard
from shoal.strategies.independent.versions import VersionCount
from strategies.independent.replicas import State, assert_equal, build, data

pytestmark = pytest.mark.timeout(120)

STEPS = 5


def made(**options: Any) -> tuple[Any, Any]:
    module = build()
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    return shoal.as_distributed(module, optimizer, strategy="async", elastic=True, **options)


def step_of(model: Any, optimizer: Any, seed: int) -> None:
    inputs, targets = data(optimizer.num_committed, seed)
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def is_first() -> bool:
    membership = shoal.world().membership
    return membership is not None and membership.generation == 1


# The definition ---------------------------------------------------------------------------------

Events = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _burning(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install(monkeypatch)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What is pulled, pushed and copied over memory, in its order; calls burn fuses."""
    faults.noted.clear()
    push, take, call = Shard._push, AsyncKeeper.handle, ThreadPeerTensors.call

    def note(self: Any, event: str, rank: int, factor: float) -> None:
        faults.noted.append((event, rank))

    def pushing(self: Any, request: Any, values: Any) -> Any:
        faults.noted.append(("part", request["rank"], list(request["names"])))
        return push(self, request, values)

    def taking(self: Any, request: Any, values: Any) -> Any:
        answer = take(self, request, values)
        (part,) = (each for each in self._sent.values() if each.data is values)
        faults.noted.append(("copy", part.seat.generation, part.seat.rank))
        return answer

    def burning(self: Any, *args: Any) -> Any:
        fuse = getattr(threading.current_thread(), "fuse", None)
        if fuse is not None and is_first():
            fuse.burn()
        return call(self, *args)

    monkeypatch.setattr(VersionCount, "_note", note)
    monkeypatch.setattr(Shard, "_push", pushing)
    monkeypatch.setattr(AsyncKeeper, "handle", taking)
    monkeypatch.setattr(ThreadPeerTensors, "call", burning)
    return faults.noted


def save_each_2(folder: str, victim: int) -> tuple[State, int, int]:
    """The victim is lost before its fourth step, when the others wait in a save already."""
    number = shoal.world().rank if is_first() else 3
    model, optimizer = made()
    while optimizer.num_committed < STEPS:
        if number == victim and optimizer.num_committed == 3:
            for _ in range(9):
                model.worker._peers.hand_over()
            raise faults.Lost
        with optimizer.attempt():
            step_of(model, optimizer, number)
        if optimizer.has_committed and optimizer.num_committed % 2 == 0:
            optimizer.together(lambda: shoal.save(folder, model, optimizer, wait=True))
    return optimizer.together(model.state_dict), optimizer.num_committed, number


def train(servers: Any, victim: int | None, nth: int) -> Any:
    """The last rank of the first world is lost at its n-th call of another, from step 2 on."""
    seed = shoal.world().rank
    model, optimizer = made(servers=servers, max_staleness=100)
    optimizer.copy_every = 2
    fuse = None
    try:
        while optimizer.num_committed < STEPS:
            if optimizer.num_committed == 2 and seed == victim and is_first() and fuse is None:
                fuse = faults.light(nth)
            with optimizer.attempt():
                step_of(model, optimizer, seed)
        state = optimizer.together(model.state_dict)
    except faults.Lost:
        owned = [name for name, owner in model.worker.owners.items() if owner == victim]
        faults.noted.append(("lost", victim, owned))
        raise
    faults.light(-1)
    return state, seed, 0 if fuse is None else fuse.count


def replayed(noted: Events) -> State:
    """In one process: a server that is lost goes back to what it was when it was copied last."""
    server = build()
    named = dict(server.named_parameters())
    optimizer = SGD(named.values(), lr=0.1, momentum=0.9)

    def now() -> Any:
        momenta = {n: copy.deepcopy(optimizer.state[p]) for n, p in named.items()}
        return {n: p.detach().clone() for n, p in named.items()}, momenta

    replicas, steps = [build() for _ in range(3)], [0] * 3
    gradients: dict[int, dict[str, torch.Tensor]] = {}
    copies, pushing = dict.fromkeys(range(3), now()), -1
    for event, *about in noted:
        if event == "pull":
            replicas[about[0]].load_state_dict(server.state_dict())
        elif event == "push":
            pushing = about[0]
            replica = dict(replicas[pushing].named_parameters())
            inputs, targets = data(steps[pushing], pushing)
            loss = F.mse_loss(replicas[pushing](inputs), targets)
            found = torch.autograd.grad(loss, list(replica.values()))
            gradients[pushing] = dict(zip(replica, found, strict=True))
            steps[pushing] += 1
        elif event == "part":
            for name, parameter in named.items():
                parameter.grad = gradients[about[0]][name] if name in about[1] else None
            optimizer.step()
        elif event == "copy" and about[0] == 1:
            copies[about[1]] = now()
        elif event == "lost":
            values, momenta = copies[about[0]]
            for name in about[1]:
                named[name].data.copy_(values[name])
                optimizer.state[named[name]] = copy.deepcopy(momenta[name])
    return server.state_dict()


@pytest.mark.parametrize("servers", ["all", [0], [2]], ids=str)
def test_equals_its_definition_wherever_a_rank_is_lost(servers: Any, events: Events) -> None:
    """To the last bit: nothing of the others is lost or counts twice, momentum comes along."""

    def run(nth: int) -> Any:
        events.clear()
        args = (servers, 2, nth)
        return shoal.run(train, 3, "memory", args=args, timeout=30, elastic=Elastic())

    found = run(-1)
    assert_equal(found[0][0], replayed(events))
    num_calls = found[2][2]
    assert num_calls > 6
    for nth in range(1, num_calls + 1, 1 if servers == "all" else 3):
        found = run(nth)
        assert [seed for _, seed, _ in found] == [0, 1]
        assert [event for event, *_ in events].count("lost") == 1
        for state, *_ in found:
            assert_equal(state, replayed(events))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_is_replaced(victim: int, events: Events) -> None:
    """All make all of their steps; the replacement begins with the count of the slowest."""
    for nth in (1, 4):
        args, elastic = ("all", victim, nth), Elastic(restarts=1)
        found = shoal.run(train, 3, "memory", args=args, timeout=30, elastic=elastic)
        assert len(found) == 3
        for state, *_ in found:
            assert_equal(state, found[0][0])


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_replacement_takes_part_in_what_others_wait_for(victim: int, tmp_path: Path) -> None:
    args, elastic = (str(tmp_path), victim), Elastic(min_ranks=3, restarts=1)
    found = shoal.run(save_each_2, 3, "memory", args=args, timeout=30, elastic=elastic)
    assert sorted(number for *_, number in found) == sorted({0, 1, 2, 3} - {victim})
    for state, num_committed, _ in found:
        assert num_committed == STEPS
        assert_equal(state, found[0][0])


# What counts ------------------------------------------------------------------------------------


class Counter(nn.Module):
    """Three parameters, of which each gets the same gradient: its digits say whose updates came."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(1).double()) for _ in range(3))

    def forward(self, weight: float) -> torch.Tensor:
        return sum(each.sum() for each in self.weights) * -weight  # type: ignore[return-value]


def counted(act: Any, steps: int = STEPS, **options: Any) -> tuple[list[list[int]], int]:
    """By parameter how many updates of the ranks that began as 0, 1, 2, ... count."""
    number = shoal.world().rank if is_first() else 3
    module = Counter()
    model, optimizer = shoal.as_distributed(
        module, SGD(module.parameters(), lr=1.0), strategy="async", elastic=True, **options
    )
    while optimizer.num_committed < steps:
        with optimizer.attempt():
            act(optimizer, number)
            model(100.0**number).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = optimizer.together(model.state_dict)
    values = [int(state[f"weights.{n}"].item()) for n in range(3)]
    return [[value // 100**n % 100 for n in range(4)] for value in values], number


def leave_at_2(optimizer: Any, number: int) -> None:
    if number == 1 and optimizer.num_committed == 2:
        shoal.world().leave()


def invite_at_2(optimizer: Any, number: int) -> None:
    if number == 1 and optimizer.num_committed == 2 and optimizer.generation == 1:
        shoal.world().membership.invite(1)  # type: ignore[union-attr]


def nothing(optimizer: Any, number: int) -> None: ...


@pytest.mark.parametrize("servers", ["all", [1]], ids=str)
def test_a_rank_that_leaves_takes_nothing_with_it(servers: Any) -> None:
    found = shoal.run(
        lambda: counted(leave_at_2, servers=servers), 3, "memory", timeout=30, elastic=Elastic()
    )
    assert found == [([[STEPS, 3, STEPS, 0]] * 3, 0), ([[STEPS, 3, STEPS, 0]] * 3, 2)]


def test_a_rank_that_comes_trains_along() -> None:
    found = shoal.run(lambda: counted(invite_at_2), 3, "memory", timeout=30, elastic=Elastic())
    assert sorted(number for _, number in found) == [0, 1, 2, 3]
    for counts, _ in found:
        for own in counts:
            assert own[:3] == [STEPS] * 3
            assert own == counts[0]
            assert 0 < own[3] <= STEPS


# Several losses ---------------------------------------------------------------------------------


def train_four(other: int, nth: int) -> tuple[State, int]:
    """Rank 0 is lost after two steps, another at its n-th operation from then on."""
    number = shoal.world().rank
    model, optimizer = made()
    optimizer.copy_every = 1
    if number == other and is_first():
        faults._LaterFuse.light(number, nth)
    while optimizer.num_committed < STEPS:
        if number == 0 and optimizer.num_committed == 2 and is_first():
            raise faults.Lost
        with optimizer.attempt():
            step_of(model, optimizer, number)
    faults.light(-1)
    return optimizer.together(model.state_dict), shoal.world().size


def test_another_is_lost_while_the_others_recover() -> None:
    """Of four ranks the buddy of neither."""
    for nth in range(1, 40, 5):
        args = (2, nth)
        found = shoal.run(train_four, 4, "memory", args=args, timeout=30, elastic=Elastic())
        assert len(found) in (2, 3)
        assert len(found) == found[0][1]
        for state, _ in found:
            assert_equal(state, found[0][0])
            assert all(value.isfinite().all() for value in state.values())


def lose_buddies(folder: str | None) -> tuple[int, list[int]]:
    """Rank 0 is lost, and while the others recover rank 1, which has the copy."""
    number = shoal.world().rank
    model, optimizer = made()
    steps: list[int] = []
    optimizer._on_change = lambda change: steps.append(change.step)
    if number == 1:
        faults._LaterFuse.light(1, 1)
    while optimizer.num_committed < STEPS:
        if folder is not None and optimizer.has_committed and optimizer.num_committed == 1:
            optimizer.together(lambda: shoal.save(folder, model, optimizer, wait=True))
        if optimizer.num_committed == 2 and is_first() and number == 0:
            raise faults.Lost
        with optimizer.attempt():
            step_of(model, optimizer, number)
    optimizer.together(model.state_dict)
    return optimizer.num_committed, steps


def test_a_server_and_its_buddy_are_lost_together(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    with pytest.warns(CheckpointWarning, match="training goes back to"):
        found = shoal.run(lose_buddies, 3, "memory", args=(folder,), timeout=30, elastic=Elastic())
    assert found == [(STEPS, [1])]
    with pytest.raises((ShoalError, faults.Lost)):
        shoal.run(lose_buddies, 3, "memory", args=(None,), timeout=30, elastic=Elastic())


# Processes --------------------------------------------------------------------------------------


def train_and_die(servers: Any, place: str) -> tuple[State, int, int, list[Any]]:
    """Rank 1 kills itself in its third step."""
    number = shoal.world().rank if is_first() else 3
    model, optimizer = made(servers=servers)
    optimizer.copy_every = 1
    changes: list[Any] = []
    optimizer._on_change = changes.append

    def die_in(here: str) -> None:
        if number == 1 and optimizer.num_committed == 2 and here == place:
            os.kill(os.getpid(), signal.SIGKILL)

    while optimizer.num_committed < 12:
        die_in("between")
        with optimizer.attempt():
            inputs, targets = data(optimizer.num_committed, number)
            loss = F.mse_loss(model(inputs), targets)
            die_in("forward")
            loss.backward()
            optimizer.step()
            die_in("step")
            optimizer.zero_grad()
    state = optimizer.together(model.state_dict)
    return state, optimizer.num_committed, shoal.world().size, changes


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("servers", "place", "restarts"),
    [("all", "forward", 1), ("all", "step", 0), ([1], "between", 0), ([0], "forward", 0)],
    ids=str,
)
def test_others_go_on_when_a_process_is_killed(
    backend: str, servers: Any, place: str, restarts: int
) -> None:
    fork_server()
    leaks.baseline()
    elastic = Elastic(min_ranks=2 + restarts, restarts=restarts)
    found = shoal.run(train_and_die, 3, backend, args=(servers, place), timeout=60, elastic=elastic)
    assert len(found) == 2 + restarts
    for state, num_committed, size, changes in found:
        assert (num_committed, size) == (12, 2 + restarts)
        assert all(value.isfinite().all() for value in state.values())
        assert_equal(state, found[0][0])
        assert any(1 in change.left for change in changes) or not changes[0].left


def leave_at_20(optimizer: Any, number: int) -> None:
    if number == 1 and optimizer.num_committed == 20:
        shoal.world().leave()


def die_at_20(optimizer: Any, number: int) -> None:
    if number == 1 and optimizer.num_committed == 20:
        threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()


def count_between_processes(act: Any) -> tuple[list[list[int]], int]:
    return counted(act, 40, max_staleness=1000)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_is_under_way_when_a_process_leaves_counts_once(backend: str) -> None:
    fork_server()
    leaks.baseline()
    found = shoal.run(
        count_between_processes, 3, backend, args=(leave_at_20,), timeout=60, elastic=Elastic()
    )
    assert found == [([[40, 21, 40, 0]] * 3, 0), ([[40, 21, 40, 0]] * 3, 2)]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_is_under_way_when_a_process_is_killed_counts_once(backend: str) -> None:
    """On the servers that are left; the one that is lost goes back to its copy."""
    fork_server()
    leaks.baseline()
    found = shoal.run(
        count_between_processes, 3, backend, args=(die_at_20,), timeout=60, elastic=Elastic()
    )
    for counts, _ in found:
        for own in (counts[0], counts[2]):
            assert (own[0], own[2]) == (40, 40)
        assert 20 <= counts[1][0] <= 40


# What is refused --------------------------------------------------------------------------------


def test_gossip_is_refused() -> None:
    with pytest.raises(ShoalError, match='topology="gossip", where nobody else has'):
        shoal.run(lambda: made(topology="gossip"), 2, "memory", timeout=30, elastic=Elastic())


def test_a_loader_is_refused() -> None:
    def go() -> None:
        module = build()
        loader = torch.utils.data.DataLoader(torch.randn(8, 5), batch_size=4)
        optimizer = SGD(module.parameters(), lr=0.1)
        shoal.as_distributed(module, optimizer, loader, strategy="async", elastic=True)

    with pytest.raises(ValueError, match="Give each rank a loader of its own data"):
        shoal.run(go, 2, "memory", timeout=30, elastic=Elastic())


def test_the_class_goes_with_the_strategy() -> None:
    def go() -> bool:
        module = build()
        model = AsyncModel(module)
        optimizer = ElasticOptimizer(SGD(module.parameters(), lr=0.1), model)
        return isinstance(optimizer, AsyncElasticOptimizer)

    assert shoal.run(go, 1, "memory", timeout=30) == [True]


def test_without_an_elastic_run_it_trains_as_ever() -> None:
    def go() -> State:
        model, optimizer = made()
        for _ in range(STEPS):
            with optimizer.attempt():
                step_of(model, optimizer, shoal.world().rank)
        return optimizer.together(model.state_dict)

    found = shoal.run(go, 2, "memory", timeout=30)
    assert_equal(found[0], found[1])
