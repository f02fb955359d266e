"""Gradients of which each rank holds a part are used like any others."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pools
import shoal
from shoal.errors import DeadlockError, MismatchError, ShoalError
from strategies.gradient_idioms import IDIOMS, Loss
from strategies.loops import assert_same, data, each, local, momentum, run, seeded, whole_state

Idiom = Callable[[Any, Any, Loss], list[Tensor]]
idioms = pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)


def alone(idiom: Idiom) -> Any:
    model = seeded()

    def loss(step: int) -> Tensor:
        x, y = data(step, items=12)
        return F.mse_loss(model(x), y)

    return idiom(model, momentum(model), loss), whole_state(model)


def on_ranks(idiom: Idiom, strategy: str, options: dict[str, Any]) -> Any:
    module = seeded()
    model, optimizer = shoal.as_distributed(
        module, momentum(module), strategy=strategy, min_group_bytes=300, **options
    )

    def loss(step: int) -> Tensor:
        x, y = local(step, items=12)
        return F.mse_loss(model(x), y)

    return idiom(model, optimizer, loss), model.state_dict()


def assert_equal(found: Any, expected: Any) -> None:
    (seen, state), (numbers, weights) = found, expected
    assert len(seen) == len(numbers)
    for place, (value, number) in enumerate(zip(seen, numbers, strict=True)):
        assert torch.allclose(value, number, rtol=1e-6, atol=1e-9), place
    assert_same(state, weights, 1e-9)


@each
@idioms
def test_idioms(idiom: Idiom, strategy: str) -> None:
    expected = alone(idiom)
    for found in run(on_ranks, idiom, strategy, {}):
        assert_equal(found, expected)


@idioms
def test_idioms_with_replicas(idiom: Idiom) -> None:
    expected = alone(idiom)
    for found in run(on_ranks, idiom, "fsdp", {"replica": 2}, ranks=4):
        assert_equal(found, expected)


def all_idioms(strategy: str) -> list[Any]:
    found = [on_ranks(idiom, strategy, {}) for idiom in IDIOMS]
    gc.collect()  # models hold groups, and they connections
    return found


@pytest.mark.parametrize(
    "team", [pools.Team("shm", 2), pools.Team("gloo", 2), pools.Team("shm", 3)]
)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_idioms_between_processes(team: pools.Team, strategy: str) -> None:
    expected = [alone(idiom) for idiom in IDIOMS]
    for found in team.run(all_idioms, strategy):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)


def backward_of(model: Any, step: int = 0, **sizes: int) -> None:
    x, y = local(step, **sizes)
    F.mse_loss(model(x), y).backward()


def wrapped(strategy: str, **options: Any) -> Any:
    module = seeded()
    return shoal.as_distributed(module, momentum(module), strategy=strategy, **options)


sharded = pytest.mark.parametrize("strategy", ["zero2", "zero3"])


@sharded
def test_clipping_is_one_message_whatever_the_number_of_parameters(strategy: str) -> None:
    def clip() -> int:
        model, _ = wrapped(strategy)
        backward_of(model)
        world = shoal.world()
        world.reset_stats()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        return sum(counter.calls for counter in world.stats().values())

    assert run(clip) == [1, 1, 1]


@each
def test_nothing_is_made_anew_for_gradients_that_nobody_keeps(strategy: str) -> None:
    def train(is_kept: bool) -> list[int]:
        model, optimizer = wrapped(strategy)
        found, kept = [], []
        for step in range(3):
            backward_of(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if is_kept:
                kept.append([p.grad for p in model.parameters()])
            found.append(id(next(model.parameters()).grad))
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert all(len(set(found)) == 1 for found in run(train, False))
    assert all(len(set(found)) == 3 for found in run(train, True))


@sharded
def test_copies_and_files(strategy: str) -> None:
    def save() -> list[Tensor]:
        model, _ = wrapped(strategy)
        backward_of(model)
        gradient = next(model.parameters()).grad
        file = io.BytesIO()
        torch.save(gradient, file)
        file.seek(0)
        loaded = torch.load(file)
        assert type(loaded) is Tensor
        copied = copy.deepcopy(gradient)
        gradient.mul_(0)
        return [loaded, copied.whole()]

    model = seeded()
    x, y = data(0)
    F.mse_loss(model(x), y).backward()
    expected = next(model.parameters()).grad
    for found in run(save):
        assert all(torch.allclose(each, expected, atol=1e-12) for each in found)


@sharded
def test_what_would_change_its_memory_is_refused(strategy: str) -> None:
    def change() -> None:
        model, _ = wrapped(strategy)
        backward_of(model)
        gradient = next(model.parameters()).grad
        with pytest.raises(ShoalError, match="assign another one"):
            gradient.t_()
        with pytest.raises(RuntimeError, match="shape"):
            gradient.data = torch.zeros(2)

    run(change)


@sharded
def test_gradients_of_one_rank_are_not_looked_at(strategy: str) -> None:
    def look() -> None:
        model, _ = wrapped(strategy)
        with model.no_sync():
            backward_of(model)
        with pytest.raises(ShoalError, match="this rank's own"):
            next(model.parameters()).grad.norm()

    run(look)


@sharded
def test_hooks_cannot_see_what_is_being_collected(strategy: str) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def train() -> None:
        model, _ = wrapped(strategy)
        next(model.parameters()).register_post_accumulate_grad_hook(halve)
        backward_of(model)
        backward_of(model)

    with pytest.raises(ShoalError, match="during backward"):
        run(train)


def one_rank_looks(strategy: str) -> None:
    model, optimizer = wrapped(strategy)
    for step in range(2):
        backward_of(model, step, items=12)
        if shoal.world().rank == 0:
            next(model.parameters()).grad.norm()
        optimizer.step()


@pytest.mark.parametrize("team", [pools.Team("memory", 3), pools.Team("shm", 2)], ids=repr)
@sharded
def test_one_rank_that_looks_alone_is_named(strategy: str, team: pools.Team) -> None:
    with pytest.raises((MismatchError, DeadlockError), match="norm of the gradient of layers"):
        team.run(one_rank_looks, strategy)


def test_ranks_that_hold_nothing_take_part() -> None:
    """One parameter of three elements, five ranks."""

    def train(is_wrapped: bool) -> Any:
        torch.manual_seed(0)
        model: Any = nn.Linear(2, 1).double()
        optimizer: Any = momentum(model)
        if is_wrapped:
            model, optimizer = shoal.as_distributed(model, optimizer, strategy="zero2")
        model(torch.ones(1, 2).double()).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        largest = torch.stack([p.grad.max() for p in model.parameters()])
        first = torch.cat([p.grad[0].flatten() for p in model.parameters()])
        optimizer.step()
        return norm, largest, first, whole_state(model)

    expected = train(False)
    for norm, largest, first, state in run(train, True, ranks=5):
        assert torch.allclose(norm, expected[0])
        assert torch.allclose(largest, expected[1])
        assert torch.allclose(first, expected[2])
        assert_same(state, expected[3])


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_shows_gradients_of_the_masters(strategy: str, precision: str) -> None:
    """Clipping and scaling by torch and by the model are the same."""

    def train(by_torch: bool) -> Any:
        module = seeded().float()
        model, optimizer = shoal.as_distributed(
            module, momentum(module), strategy=strategy, mixed_precision=precision
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        norms = []
        for step in range(2):
            x, y = (tensor.float() for tensor in local(step))
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.unscale_(optimizer)
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            clip = nn.utils.clip_grad_norm_ if by_torch else _by_model(model)
            norms.append(clip(model.parameters(), 0.1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return norms, model.state_dict()

    for (norms, state), (others, other) in zip(run(train, True), run(train, False), strict=True):
        assert torch.allclose(torch.stack(norms), torch.stack(others), rtol=1e-5)
        assert_same(state, other, 1e-6)


def _by_model(model: Any) -> Any:
    return lambda _, max_norm: model.clip_grad_norm_(max_norm)


# Models of which ranks have parts ----------------------------------------------------------------


def blocks() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in "ab")
    )


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 6)


@pytest.mark.parametrize("zero", [0, 2])
def test_split_layers_have_the_norms_of_whole_parameters(zero: int) -> None:
    def train(is_wrapped: bool) -> Any:
        model: Any = blocks()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, targets = rows()
        if is_wrapped:
            model, optimizer = shoal.as_distributed(
                model, optimizer, strategy="tensor", tensor=2, zero=zero
            )
            half = model.data_group.rank
            inputs, targets = (t.chunk(model.data_group.size)[half] for t in (inputs, targets))
        loss_fn(model(inputs), targets).backward()
        seen = [p.grad.norm() for p in model.parameters()]
        seen += [p.grad.mean() for p in model.parameters()]
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        for parameter in model.parameters():
            parameter.grad.mul_(2.0)
        optimizer.step()
        return torch.stack(seen), whole_state(model)

    seen, state = train(False)
    for found, other in run(train, True, ranks=4):
        assert torch.allclose(found, seen, rtol=1e-4, atol=1e-7)
        assert_same(other, state, 1e-6)


@pytest.mark.parametrize("strategy", ["pipeline", "hybrid"])
def test_stages_know_the_gradients_of_their_own_layers(strategy: str) -> None:
    """Numbers of these would not be the model's; what is done to each element is right."""

    def train(is_wrapped: bool) -> Any:
        model: Any = blocks()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones(()))  # only the last stage has a loss to scale
        inputs, targets = rows()
        if is_wrapped:
            options = {"tensor": 2} if strategy == "hybrid" else {}
            model, optimizer = shoal.as_distributed(
                model, optimizer, strategy=strategy, pipeline=2, micro_batches=2, **options
            )
            model.train_step(inputs, targets, lambda o, t: scaler.scale(loss_fn(o, t)))
            with pytest.raises(ShoalError, match=r"model\.clip_grad_norm_"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        else:
            scaler.scale(loss_fn(model(inputs), targets)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        for parameter in model.parameters():
            parameter.grad.add_(0.01)
        scaler.step(optimizer)
        return whole_state(model)

    expected = train(False)
    for state in run(train, True, ranks=4 if strategy == "hybrid" else 2):
        assert_same(state, expected, 1e-6)
