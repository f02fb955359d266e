"""Mistakes that earlier attempts at this system made, one test each, by the id of the mistake."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shoal
from shoal.optim.data_parallel_optimizers import DDPOptimizer, ZeRO2Optimizer
from shoal.strategies.data_parallel import ZeRO2Model
from strategies.loops import (
    RANKS,
    assert_same,
    assert_same_gradients,
    data,
    distinct,
    each,
    full_gradients,
    gathered,
    inside,
    local,
    momentum,
    num_gathers,
    num_reductions,
    one_process,
    one_process_gradients,
    one_step,
    run,
    seeded,
    whole_state,
    wrapped,
)
from strategies.models import OddMLP

sharded = pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])


def whole_gradients(step: int) -> dict[str, Tensor]:
    found: dict[str, Any] = one_process_gradients([step])
    return found


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in state.values()])


# P11 ----------------------------------------------------------------------------------------


@each
def test_p11_one_step_is_one_step(strategy: str) -> None:
    """The averaged gradient was applied on top of the local step: two steps instead of one."""

    def train() -> tuple[dict[str, Tensor], int]:
        module = seeded()
        plain = torch.optim.SGD(module.parameters(), lr=0.5)
        num_steps = []
        plain.register_step_post_hook(lambda *_: num_steps.append(1))
        model, optimizer = shoal.as_distributed(module, plain, strategy=strategy)
        before = model.state_dict()
        one_step(model, optimizer, local(0))
        after = model.state_dict()
        return {name: before[name] - after[name] for name in before}, len(num_steps)

    gradients = whole_gradients(0)
    for moved, num_steps in run(train):
        assert num_steps == 1
        assert_same(moved, {name: 0.5 * gradient for name, gradient in gradients.items()})


# P12 ----------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Adagrad", "NAdam"])
def test_p12_nothing_steps_before_gradients_are_averaged(strategy: str, name: str) -> None:
    """A local step was made first and undone with SGD's formula, wrong for every other one."""

    def train(is_wrapped: bool) -> dict[str, Tensor]:
        model: Any = seeded()
        optimizer: Any = getattr(torch.optim, name)(model.parameters(), lr=0.01, eps=1e-3)
        if is_wrapped:
            model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
        for step in range(3):
            optimizer.zero_grad()
            before = whole_state(model)
            x, y = local(step) if is_wrapped else data(step)
            F.mse_loss(model(x), y).backward()
            assert_same(whole_state(model), before, 0.0)
            optimizer.step()
        return whole_state(model)

    expected = train(False)
    for state in run(train, True):
        assert_same(state, expected)


# P13 ----------------------------------------------------------------------------------------


@each
def test_p13_the_optimizer_sees_averaged_gradients(strategy: str) -> None:
    """Gradients only appeared inside the optimizer's black box, too late to be averaged."""

    def train() -> list[Tensor]:
        module = seeded()
        plain = torch.optim.SGD(module.parameters(), lr=0.1)
        seen: list[Tensor] = []

        def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    seen.append(p.grad.flatten().clone())

        model, optimizer = shoal.as_distributed(module, plain, strategy=strategy)
        inside(plain, look)
        one_step(model, optimizer, local(0))
        return seen

    expected = flat(whole_gradients(0))
    found = run(train)
    for seen in found if strategy == "ddp" else [list(itertools.chain.from_iterable(found))]:
        assert torch.allclose(torch.cat(seen), expected, rtol=0, atol=1e-12)


# P14 ----------------------------------------------------------------------------------------


@sharded
def test_p14_shards_of_different_parameters_are_never_mixed(strategy: str) -> None:
    """Shards that hold different parameters were reduced as if they were the same ones."""

    def train() -> list[tuple[int, Tensor]]:
        model, optimizer = wrapped(strategy)
        for step in range(3):
            one_step(model, optimizer, local(step))
        rank = shoal.world().rank
        return [(g.layout.bounds[rank], g.shard.clone()) for g in model.engine.groups]

    expected = one_process(range(3))
    by_group = list(zip(*run(train), strict=True))
    found = []
    for shards in by_group:
        whole = torch.cat([shard for _, shard in sorted(shards, key=lambda pair: pair[0])])
        found.append(whole)
    # Names are in registration order, and so are the groups; what is beyond them is padding.
    start = 0
    values = flat(expected)
    for whole in found:
        length = min(len(whole), len(values) - start)
        match = (whole[:length] - values[start : start + length]).abs() < 1e-10
        used = int(match.long().cumprod(0).sum())
        assert whole[used:].eq(0).all(), "only padding may follow the parameters"
        start += used
    assert start == len(values)


# P15 ----------------------------------------------------------------------------------------


@sharded
def test_p15_shards_are_taken_from_the_average(strategy: str) -> None:
    """Each rank cut its shard out of its own gradient, and only then averaged."""

    def train() -> dict[str, Any]:
        model, _ = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        return full_gradients(model)

    for gradients in run(train):
        assert_same_gradients(gradients, whole_gradients(0))


# P16 ----------------------------------------------------------------------------------------


@each
def test_p16_what_is_averaged_differs_between_ranks(strategy: str) -> None:
    """An all-reduce over copies that were equal already: it looked like synchronization."""

    def train() -> tuple[dict[str, Any], dict[str, Any]]:
        model, _ = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        own = seeded()
        F.mse_loss(own(x), y).backward()
        return full_gradients(model), {name: p.grad for name, p in own.named_parameters()}

    found = run(train)
    locals_ = [own for _, own in found]
    mean = {name: sum(own[name] for own in locals_) / RANKS for name in locals_[0]}
    for averaged, own in found:
        assert_same_gradients(averaged, mean)
        assert not torch.allclose(flat(averaged), flat(own), rtol=0, atol=1e-4)


# P17 ----------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (3, 5, 1), (7, 13, 11, 3)])
@pytest.mark.parametrize("ranks", [4, 5])
def test_p17_every_element_is_trained_whatever_the_sizes(
    strategy: str, sizes: Sequence[int], ranks: int
) -> None:
    """Where sizes did not divide, a rank was handed padding and some elements were nobody's."""

    def train(is_wrapped: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: Any = OddMLP(tuple(sizes)).double()
        optimizer: Any = momentum(model)
        if is_wrapped:
            model, optimizer = shoal.as_distributed(
                model, optimizer, strategy=strategy, min_group_bytes=0
            )
        for step in range(2):
            batch = data(step, 2 * ranks, sizes[0], sizes[-1])
            if is_wrapped:
                batch = local(step, items=2 * ranks, inputs=sizes[0], outputs=sizes[-1])
            one_step(model, optimizer, batch)
        return whole_state(model)

    expected = train(False)
    for state in run(train, True, ranks=ranks):
        assert_same(state, expected)


# P18 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_p18_the_step_uses_the_result_of_the_reduction(strategy: str) -> None:
    """A reduce-scatter was made and its result thrown away; the step used something else."""

    def train() -> bool:
        module = seeded()
        model, optimizer = shoal.as_distributed(
            module, torch.optim.SGD(module.parameters(), lr=0.1), strategy=strategy
        )
        before = model.state_dict()
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        for name, _ in model.named_parameters():
            model.gradient_shard(name).zero_()
        optimizer.step()
        after = model.state_dict()
        return all(torch.equal(before[name], after[name]) for name in before)

    assert all(run(train))


# P19 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_p19_gradients_are_scattered_not_all_reduced(strategy: str) -> None:
    """ZeRO-2 in name, all-reduce in fact: every rank received and kept the whole gradient."""

    def train() -> tuple[set[str], int, int]:
        model, optimizer = wrapped(strategy)
        shoal.world().backend.reset_stats()
        x, y = local(0, items=8)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        held = sum(gradients.num_bytes_held for gradients in model.engine.gradients)
        whole = sum(group.layout.num_elements * 8 for group in model.engine.groups)
        return set(shoal.world().stats()), held, whole

    for kinds, held, whole in run(train, ranks=4):
        assert "reduce_scatter" in kinds
        assert "all_reduce" not in kinds
        assert held == whole // 4


# P20 ----------------------------------------------------------------------------------------


@sharded
def test_p20_the_gradient_shard_is_where_the_optimizer_looks(strategy: str) -> None:
    """The shard existed, but no parameter of the optimizer had it as its gradient."""

    def train() -> tuple[int, bool]:
        model, optimizer = wrapped(strategy)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        seen: list[Tensor] = []

        def look(inner: torch.optim.Optimizer, *_: object) -> None:
            seen.extend(p.grad.clone() for group in inner.param_groups for p in group["params"])

        inside(optimizer.optimizer, look)
        optimizer.step()
        has_gradients = all(gradient.abs().sum() > 0 for gradient in seen)
        return sum(p.numel() for p in seen), has_gradients

    found = run(train)
    assert all(has_gradients for _, has_gradients in found)
    assert sum(count for count, _ in found) == sum(p.numel() for p in seeded().parameters())


# P23 ----------------------------------------------------------------------------------------


@each
def test_p23_gradients_are_averaged_and_parameters_are_not(strategy: str) -> None:
    """Parameters were averaged after local steps, which is another algorithm."""

    def train() -> tuple[dict[str, Tensor], int]:
        module = seeded()
        plain = torch.optim.Adam(module.parameters(), lr=0.1, eps=1e-3)
        model, optimizer = shoal.as_distributed(module, plain, strategy=strategy)
        in_steps = 0
        for step in range(3):
            optimizer.zero_grad()
            x, y = local(step)
            F.mse_loss(model(x), y).backward()
            before = num_reductions()
            optimizer.step()
            in_steps += num_reductions() - before
        return model.state_dict(), in_steps

    model = seeded()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)
    for step in range(3):
        one_step(model, optimizer, data(step))
    for state, in_steps in run(train):
        assert in_steps == 0
        assert_same(state, whole_state(model))


# P29 ----------------------------------------------------------------------------------------


@gathered
def test_p29_the_cache_of_full_parameters_is_filled_and_dropped_in_time(strategy: str) -> None:
    """Predictions never filled the cache, or it outlived the step that changed the parameters."""

    def predict() -> tuple[list[int], list[Tensor]]:
        model, optimizer = wrapped(strategy)
        x, _ = data(7)
        gathers, answers = [], []
        with model.predicting():
            for is_step in (False, False, True, False):
                if is_step:
                    with torch.enable_grad():
                        one_step(model, optimizer, local(0))
                before = num_gathers()
                answers.append(model(x))
                gathers.append(num_gathers() - before)
        return gathers, answers

    model = seeded()
    old = model(data(7)[0]).detach()
    one_step(model, momentum(model), data(0))
    new = model(data(7)[0]).detach()
    for gathers, answers in run(predict):
        assert gathers[0] > 0
        assert gathers[1] == 0
        assert gathers[2] > 0
        for answer, expected in zip(answers, (old, old, new, new), strict=True):
            assert torch.allclose(answer, expected, rtol=0, atol=1e-10)


# P30 ----------------------------------------------------------------------------------------


@distinct
def test_p30_what_is_wrapped_is_not_wrapped_again(strategy: str) -> None:
    """A wrapper around a wrapper averaged twice; a missing optimizer was wrapped as well."""

    def wrap() -> dict[str, Tensor]:
        module = seeded()
        first = shoal.as_distributed(module, momentum(module), strategy=strategy)
        model, optimizer = shoal.as_distributed(*first, strategy=strategy)
        assert model is first[0]
        assert optimizer is first[1]
        other = "zero2" if strategy == "ddp" else "ddp"
        with pytest.raises(ValueError, match="wrapped already"):
            shoal.as_distributed(model, optimizer, strategy=other)
        with pytest.raises(TypeError):
            type(optimizer)(None, model)
        with pytest.raises(TypeError):
            type(optimizer)(optimizer, model)
        for step in range(2):
            one_step(model, optimizer, local(step))
        return model.state_dict()

    for state in run(wrap):
        assert_same(state, one_process(range(2)))


def test_p30_a_wrong_pair_is_an_error() -> None:
    """Part of the same: an optimizer was accepted around a model that it does not fit."""

    def wrap() -> None:
        module = seeded()
        model = ZeRO2Model(module)
        with pytest.raises(TypeError, match="DDPOptimizer goes with DDPModel"):
            DDPOptimizer(momentum(module), model)
        assert isinstance(ZeRO2Optimizer(momentum(module), model), ZeRO2Optimizer)

    run(wrap)


# P33 ----------------------------------------------------------------------------------------


@each
def test_p33_synchronizing_a_sharded_model_is_no_no_op(strategy: str) -> None:
    """Synchronization returned at once "because the model is sharded already"."""

    def train() -> tuple[int, dict[str, Any], dict[str, Tensor]]:
        model, optimizer = wrapped(strategy, auto_sync=False)
        x, y = local(0)
        F.mse_loss(model(x), y).backward()
        before = num_reductions()
        model.synchronize_gradients()
        count = num_reductions() - before
        gradients = full_gradients(model)
        optimizer.step()
        return count, gradients, model.state_dict()

    for count, gradients, state in run(train):
        assert count > 0
        assert_same_gradients(gradients, whole_gradients(0))
        assert_same(state, one_process([0]))
