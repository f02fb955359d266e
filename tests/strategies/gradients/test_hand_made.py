"""What users do by hand, and plain PyTorch lets them: gradients, memory, attributes.

Each of these once gave other numbers than one process, without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pools
import shoal
from shoal.errors import MismatchError, ShoalError
from strategies.loops import (
    assert_same,
    data,
    distinct,
    each,
    local,
    momentum,
    run,
    seeded,
    whole_state,
)

Train = Callable[[Any, Any, Callable[[int], Any]], None]


def alone(train: Train) -> Any:
    model = seeded()
    train(model, momentum(model), data)
    return whole_state(model)


def on_ranks(train: Train, strategy: str) -> Any:
    module = seeded()
    model, optimizer = shoal.as_distributed(
        module, momentum(module), strategy=strategy, min_group_bytes=100
    )
    train(model, optimizer, local)
    return model.state_dict()


def assert_equal(train: Train, strategy: str) -> None:
    expected = alone(train)
    for state in run(on_ranks, train, strategy):
        assert_same(state, expected)


def loss_of(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


@each
def test_a_penalty_on_the_parameters(strategy: str) -> None:
    """They are used outside of forward, and freed before backward needs them."""

    def train(model: Any, optimizer: Any, batch: Any) -> None:
        for step in range(3):
            penalty = sum(p.square().sum() for p in model.parameters())
            (loss_of(model, batch(step)) + 0.1 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_equal(train, strategy)


@each
def test_gradients_that_are_set(strategy: str) -> None:
    def train(model: Any, optimizer: Any, batch: Any) -> None:
        for parameter in model.parameters():
            values = torch.arange(parameter.numel(), dtype=parameter.dtype)
            parameter.grad = 0.01 * values.view(parameter.shape)
        optimizer.step()

    assert_equal(train, strategy)


@each
def test_gradients_that_are_replaced_and_added_to(strategy: str) -> None:
    def train(model: Any, optimizer: Any, batch: Any) -> None:
        loss_of(model, batch(0)).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        loss_of(model, batch(1)).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        optimizer.step()

    assert_equal(train, strategy)


# Gradients of one's own ------------------------------------------------------------------------


def own_gradients(model: Any, loss: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


@each
def test_own_gradients_are_averaged_before_anybody_looks(strategy: str) -> None:
    """Clipped by the model, or whole: what one process would see."""

    def train(model: Any, optimizer: Any, batch: Any) -> None:
        own_gradients(model, loss_of(model, batch(0)))
        if isinstance(model, shoal.strategies.ShardedModel):
            model.clip_grad_norm_(0.05)
            optimizer.step()
            optimizer.zero_grad()
            own_gradients(model, loss_of(model, batch(1)))
            model.synchronize_gradients()
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            own_gradients(model, loss_of(model, batch(1)))
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    assert_equal(train, strategy)


@each
def test_own_gradients_of_some_ranks(strategy: str) -> None:
    """A rank that has none counts like one that used none in backward."""

    def train() -> Any:
        module = seeded()
        model, optimizer = shoal.as_distributed(module, momentum(module), strategy=strategy)
        for _ in range(2):
            if shoal.world().rank == 1:
                weight = model.layers[0].weight  # of which only the shape is known everywhere
                weight.grad = torch.ones(weight.shape, dtype=weight.dtype)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    expected = seeded()
    optimizer = momentum(expected)
    for _ in range(2):
        expected.layers[0].weight.grad = torch.ones_like(expected.layers[0].weight) / 3
        optimizer.step()
        optimizer.zero_grad()
    for state in run(train):
        assert_same(state, whole_state(expected))


@each
def test_final_gradients_are_not_averaged(strategy: str) -> None:
    """The average of equal ones would not be it in the last bit, and ranks trust each other."""

    def train() -> Any:
        module = seeded()
        model, optimizer = shoal.as_distributed(module, momentum(module), strategy=strategy)
        world = shoal.world()
        loss_of(model, local(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, local(1)).backward()
        for is_around_step in (False, True):
            optimizer.zero_grad()
            loss_of(model, local(1)).backward()
            world.reset_stats()
            if is_around_step:
                _set_all(model, 0.1)
                with model.gradients_are_final():
                    optimizer.step()
            else:
                with model.gradients_are_final():
                    _set_all(model, 0.1)
                optimizer.step()
            counters = world.stats()
            names = ("all_reduce", "reduce_scatter")
            assert not any(counters[name].calls for name in names if name in counters)
        return model.state_dict()

    expected = seeded()
    optimizer = momentum(expected)
    loss_of(expected, data(0)).backward()
    optimizer.step()
    for _ in range(2):
        _set_all(expected, 0.1)
        optimizer.step()
    for state in run(train):
        assert_same(state, whole_state(expected))


def _set_all(model: Any, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, value, dtype=parameter.dtype)


@distinct
def test_an_own_gradient_beside_an_averaged_one_is_a_mismatch(strategy: str) -> None:
    def train(model: Any, optimizer: Any, batch: Any) -> None:
        loss_of(model, batch(0)).backward()
        first, second = list(model.parameters())[:2]
        first.grad = torch.ones_like(first)
        if shoal.world().rank == 1:
            second.grad = torch.ones_like(second)
        optimizer.step()

    with pytest.raises(MismatchError, match=r"layers\.0\.bias was put in by hand on ranks \[1\]"):
        run(on_ranks, train, strategy)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_own_and_averaged_gradients_are_not_clipped_together(strategy: str) -> None:
    def train(model: Any, optimizer: Any, batch: Any) -> None:
        loss_of(model, batch(0)).backward()
        first = next(model.parameters())
        first.grad = torch.ones_like(first)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    with pytest.raises(ShoalError, match=r"model\.synchronize_gradients\(\) before"):
        run(on_ranks, train, strategy)


@each
def test_own_gradients_that_are_made_zero(strategy: str) -> None:
    def train(model: Any, optimizer: Any, batch: Any) -> None:
        for is_none in (False, True):
            own_gradients(model, loss_of(model, batch(0)))
            optimizer.zero_grad(set_to_none=is_none)
            optimizer.step()

    assert_equal(train, strategy)


# Hooks ------------------------------------------------------------------------------------------


def hook_that_sets_none(model: Any, optimizer: Any, batch: Any) -> None:
    chosen = list(model.parameters())[1:3]
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in chosen
    ]
    for step in range(2):
        loss_of(model, batch(step)).backward()
        assert [p.grad for p in chosen] == [None, None]
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    loss_of(model, batch(2)).backward()
    optimizer.step()


@each
@pytest.mark.parametrize("team", [pools.Team("memory", 3), pools.Team("shm", 3)], ids=str)
def test_a_gradient_that_a_hook_sets_to_none_is_none(strategy: str, team: pools.Team) -> None:
    """Memory that nobody had written to was taken for the gradient."""
    expected = alone(hook_that_sets_none)
    for state in team.run(on_ranks, hook_that_sets_none, strategy):
        assert_same(state, expected)


@distinct
def test_a_gradient_that_a_hook_sets_to_none_over_gloo(strategy: str) -> None:
    expected = alone(hook_that_sets_none)
    for state in pools.Team("gloo", 3).run(on_ranks, hook_that_sets_none, strategy):
        assert_same(state, expected)


def _steps_in_hooks(model: Any) -> None:
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)

        def step(_: Any, own: Any = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


def _applied_by_torch(model: Any) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@distinct
@pytest.mark.parametrize("apply", [_steps_in_hooks, _applied_by_torch])
def test_optimizers_that_step_in_backward(strategy: str, apply: Any) -> None:
    """Each rank would step with its own gradients. One rank has no others."""

    def train(model: Any, optimizer: Any, batch: Any) -> None:
        apply(model)
        for step in range(2):
            loss_of(model, batch(step)).backward()

    with pytest.raises(ShoalError, match="each rank would step with its own"):
        run(on_ranks, train, strategy)
    expected = alone(train)
    (state,) = run(on_ranks, train, strategy, ranks=1)
    assert_same(state, expected)


@each
def test_gradients_that_are_made_zero_still_count(strategy: str) -> None:
    """Momentum goes on where a gradient is zero, and stops where there is none."""

    def train(model: Any, optimizer: Any, batch: Any) -> None:
        loss_of(model, batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()

    assert_equal(train, strategy)


def two_optimizers(strategy: str | None) -> Any:
    model: Any = seeded()
    half = len(list(model.parameters())) // 2
    parts = list(model.parameters())[:half], list(model.parameters())[half:]
    optimizers: Any = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts]
    if strategy is not None:
        model, optimizers = shoal.as_distributed(model, optimizers, strategy=strategy)
    for step in range(3):
        loss_of(model, data(step) if strategy is None else local(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return whole_state(model) if strategy is None else model.state_dict()


@each
def test_an_optimizer_forgets_its_own_gradients_only(strategy: str) -> None:
    expected = two_optimizers(None)
    for state in run(two_optimizers, strategy):
        assert_same(state, expected)


@each
def test_other_memory_inside_full_parameters(strategy: str) -> None:
    def train(model: Any, optimizer: Any, batch: Any) -> None:
        loss_of(model, batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, shoal.strategies.ShardedModel):
            with model.full_parameters():
                _halve(model)
        else:
            _halve(model)
        loss_of(model, batch(1)).backward()
        optimizer.step()

    assert_equal(train, strategy)


def _halve(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(0.5 * vector, model.parameters())


@each
def test_a_state_that_is_assigned_is_copied(strategy: str) -> None:
    def train(model: Any, optimizer: Any, batch: Any) -> None:
        start = {name: value.clone() for name, value in model.state_dict().items()}
        loss_of(model, batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        is_wrapped = isinstance(model, shoal.strategies.ShardedModel)
        model.load_state_dict(start, assign=is_wrapped)
        loss_of(model, batch(1)).backward()
        optimizer.step()

    assert_equal(train, strategy)


@distinct
def test_attributes_are_the_modules(strategy: str) -> None:
    class Scaled(nn.Linear):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    def scale() -> float:
        torch.manual_seed(0)
        model = shoal.as_distributed(Scaled(3, 3), strategy=strategy)
        before = model(torch.ones(1, 3)).sum()
        model.factor = 3.0
        return (model(torch.ones(1, 3)).sum() / before).item()

    assert run(scale) == pytest.approx([3.0] * 3)


@each
def test_what_is_registered_later_is_the_modules(strategy: str) -> None:
    def registered() -> list[str]:
        model = shoal.as_distributed(seeded(), strategy=strategy)
        model.register_buffer("count", torch.zeros(2))
        model.add_module("noise", nn.Dropout(0.1))
        assert isinstance(model.module.noise, nn.Dropout)
        return list(model.state_dict())

    for names in run(registered):
        assert "count" in names


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor", "pipeline"])
@pytest.mark.parametrize("copying", [copy.deepcopy, lambda model: copy.deepcopy(model.module)])
def test_a_wrapped_model_says_that_it_cannot_be_copied(strategy: str, copying: Any) -> None:
    def copied() -> None:
        module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
        copying(shoal.as_distributed(module, strategy=strategy))

    with pytest.raises(ShoalError, match="cannot be copied or pickled"):
        run(copied, ranks=2)


def change_at_once(strategy: str) -> Any:
    """Right after a step, while other ranks may still read this one's parameters."""
    module = seeded()
    model, optimizer = shoal.as_distributed(module, momentum(module), strategy=strategy)
    for step in range(20):
        loss_of(model, local(step, items=6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with model.full_parameters(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    return model.state_dict()


@each
def test_changes_right_after_a_step_over_shared_memory(strategy: str) -> None:
    model = seeded()
    optimizer = momentum(model)
    for step in range(20):
        loss_of(model, data(step, items=6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    for state in pools.Team("shm", 2).run(change_at_once, strategy):
        assert_same(state, whole_state(model))


@torch.no_grad()
def double(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(2)


def step_inside(strategy: str) -> Any:
    module = seeded()
    model, optimizer = shoal.as_distributed(module, momentum(module), strategy=strategy)
    loss_of(model, local(0, items=6)).backward()
    with model.full_parameters():
        double(model)
        optimizer.step()
        double(model)
    return model.state_dict()


@each
@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_a_step_inside_of_full_parameters(strategy: str, backend: str) -> None:
    model = seeded()
    optimizer = momentum(model)
    loss_of(model, data(0, items=6)).backward()
    double(model)
    optimizer.step()
    double(model)
    for state in pools.Team(backend, 2).run(step_inside, strategy):
        assert_same(state, whole_state(model))


# Gradients and graphs ------------------------------------------------------------------------


@each
def test_hooks_that_are_hung_on_later_see_every_gradient(strategy: str) -> None:
    def halve(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)

    def train(model: Any, optimizer: Any, batch: Any) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        for step in range(2):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_equal(train, strategy)


@each
def test_a_step_on_gradients_that_are_not_averaged_is_an_error(strategy: str) -> None:
    """They were left out, and nothing was trained."""

    def train(model: Any, optimizer: Any, batch: Any) -> None:
        with model.no_sync():
            loss_of(model, batch(0)).backward()
            optimizer.step()

    with pytest.raises(
        ShoalError, match="is this rank's own: it was accumulated inside of no_sync"
    ):
        run(on_ranks, train, strategy)


@distinct
@pytest.mark.parametrize("is_first", [True, False])
def test_a_graph_of_gradients_is_refused(strategy: str, is_first: bool) -> None:
    def train(model: Any, optimizer: Any, batch: Any) -> None:
        if not is_first:
            loss_of(model, batch(0)).backward()
        loss_of(model, batch(0)).backward(create_graph=True)

    with pytest.raises(ShoalError, match=r"torch\.autograd\.grad\(loss, parameters, create_graph"):
        run(on_ranks, train, strategy)


class Pair(nn.Module):
    """Two networks that are trained against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(7, 3), nn.Linear(3, 1)


def adversaries(strategy: str | None) -> Any:
    model: Any = seeded(Pair)
    optimizers: Any = [momentum(model.maker), momentum(model.judge)]
    if strategy is not None:
        model, optimizers = shoal.as_distributed(model, optimizers, strategy=strategy)
    for step in range(3):
        x, y = data(step) if strategy is None else local(step)
        made = torch.tanh(model.maker(x))
        (F.softplus(-model.judge(y)) + F.softplus(model.judge(made.detach()))).mean().backward()
        optimizers[1].step()
        F.softplus(-model.judge(made)).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return whole_state(model) if strategy is None else model.state_dict()


@each
def test_a_step_of_some_parameters_leaves_the_graphs_of_others_alone(strategy: str) -> None:
    expected = adversaries(None)
    for state in run(adversaries, strategy):
        assert_same(state, expected)


@each
def test_gradients_of_single_rows(strategy: str) -> None:
    """`torch.func` calls the module with other tensors than its parameters."""

    def rows(model: Any) -> Any:
        plain = model.module if isinstance(model, shoal.strategies.ShardedModel) else model
        values = {name: p.detach() for name, p in model.named_parameters()}

        def loss(values: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(plain, values, (x[None],)).square().mean()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(values, data(0)[0])

    expected = rows(seeded())
    for found in run(lambda: rows(shoal.as_distributed(seeded(), strategy=strategy))):
        assert_same(found, expected)


# Kinds ------------------------------------------------------------------------------------


class ClippedSGD(torch.optim.SGD):
    """Couples all parameters, but only where gradients are large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 10.0)
        return super().step(closure)


def test_coupling_above_a_threshold_is_found() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert shoal.optim.find_kind(ClippedSGD(parameters, lr=0.1)) is shoal.optim.Kind.GLOBAL


@pytest.mark.parametrize("rate", [0.0, 1e-12])
def test_a_learning_rate_of_nothing_hides_nothing(rate: float) -> None:
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.zeros(4, 4))], lr=rate)
    assert shoal.optim.find_kind(optimizer) is shoal.optim.Kind.PER_PARAMETER
